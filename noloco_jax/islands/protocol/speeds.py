"""Speeds of the other islands, for those that keep pace: bounded, so that a false one costs few steps of the schedule.

An island that follows a speed which nobody has runs through its schedule, and so does every island that follows it.
Hence an island speaks for itself alone, and what it says is held against the rounds that it ends: whoever takes
inner steps of s seconds ends its rounds as fast, and so does whoever keeps pace with one that does. A word that these
contradict is ignored, not believed in part: who says it keeps pace with those that believe it, and would be believed
the more the faster they are. Speeds of islands that were never met are passed on by those that have met them, and no
further.
"""

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import replace

from noloco_jax.islands.protocol.messages import Speed, Timing

ROUNDS_KNOWN = 16  # rounds for which another island's speed counts
MOST_TOLD = 8.0  # fastest speed to believe, in multiples of the own
MOST_TIMED = 2.0  # fastest speed to believe, in multiples of the speed at which the island that says it ends its rounds


class Speeds:
    """Speeds of other islands.

    Args:
      names: the other islands; the caller may change them.
    """

    def __init__(self, names: Collection[str]):
        self._names = names
        self._told: dict[str, Speed] = {}  # by the island itself; `round` is the own one then
        self._passed_on: dict[str, Speed] = {}
        self._passed_by: dict[str, str] = {}
        self._timed: dict[str, deque[tuple[int, int, float]]] = {}  # round, steps of the schedule up to it, time

    def hear(self, sender: str, timing: Timing, round: int) -> None:
        """Learn from a peer's timing; `round` is the last one ended here."""
        own, passed_on = timing.own, timing.fastest
        if own is not None and own.name == sender and sender in self._names and own.seconds > 0:
            self._told[sender] = replace(own, round=round)
        if (
            passed_on is not None
            and passed_on.name != sender
            and passed_on.name in self._names
            and passed_on.seconds > 0
        ):
            self._passed_on[passed_on.name] = replace(passed_on, round=min(passed_on.round, round))
            self._passed_by[passed_on.name] = sender
        for speeds in (self._told, self._passed_on):
            for name in [name for name, speed in speeds.items() if speed.round < round - ROUNDS_KNOWN]:
                del speeds[name]

    def time(self, name: str, round: int, scheduled: int, now: float) -> None:
        """Record that an island was heard to have ended a round, up to which the schedule has so many steps."""
        known = self._timed.setdefault(name, deque())
        if name in self._names and not (known and round <= known[-1][0]):
            known.append((round, scheduled, now))
            while known[0][0] < round - ROUNDS_KNOWN:
                known.popleft()

    def restart(self) -> None:
        """Forget the times of rounds, as the count of the schedule's steps begins anew."""
        self._timed.clear()

    def believed(self, own_seconds: float) -> Iterator[Speed]:
        """Yield the speeds that are believed, one an island, those told by islands themselves first."""
        told = self._told
        passed_on = [(self._passed_by[name], speed) for name, speed in self._passed_on.items() if name not in told]
        for sender, speed in (*told.items(), *passed_on):
            if speed.seconds >= self._timed_seconds(sender) / MOST_TIMED:
                yield replace(speed, seconds=max(speed.seconds, own_seconds / MOST_TOLD))

    def fastest_met(self, own: Speed) -> Speed:
        """Return the fastest of the own speed and those that islands have told of themselves."""
        met = [speed for speed in self.believed(own.seconds) if speed.name in self._told]
        return min([own, *met], key=lambda speed: speed.seconds)

    def _timed_seconds(self, name: str) -> float:
        """Return the seconds in which an island passes a step of the schedule; 0 while unknown."""
        known = self._timed.get(name, ())
        if len(known) < 2:
            return 0.0
        (_, first, began), (_, last, ended) = known[0], known[-1]
        return (ended - began) / max(last - first, 1)
