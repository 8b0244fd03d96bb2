"""Speeds of the other islands, for those that keep pace: bounded, so that a false one costs few steps of the schedule.

An island that follows a speed which nobody has runs through its schedule, and so does every island that follows it.
Hence an island speaks for itself alone, and what it says is held against the rounds that it ends: whoever takes
inner steps of s seconds ends its rounds at least as fast. Speeds of islands that were never met are passed on by those
that have met them, and no further.
"""

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import replace

from noloco_jax.islands.protocol.messages import Speed, Timing

ROUNDS_KNOWN = 16  # rounds for which another island's speed counts
MOST_TOLD = 8.0  # fastest speed to believe of an island whose rounds were not timed yet, in multiples of the own
MOST_TIMED = 2.0  # fastest speed to believe, in multiples of the speed at which an island ends its rounds


class Speeds:
    """Speeds of other islands.

    Args:
      names: the other islands; the caller may change them.
    """

    def __init__(self, names: Collection[str]):
        self._names = names
        self._told: dict[str, Speed] = {}  # by the island itself; `round` is the own one then
        self._passed_on: dict[str, Speed] = {}
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
        """Yield a speed for each island that is known, within the bounds; those told by islands themselves first."""
        for speeds in (self._told, self._passed_on):
            for name, speed in speeds.items():
                if speeds is self._told or name not in self._told:
                    yield replace(speed, seconds=max(speed.seconds, self._least_seconds(name, own_seconds)))

    def fastest_met(self, own: Speed) -> Speed:
        """Return the fastest of the own speed and those that islands have told of themselves."""
        met = [speed for speed in self.believed(own.seconds) if speed.name in self._told]
        return min([own, *met], key=lambda speed: speed.seconds)

    def _least_seconds(self, name: str, own_seconds: float) -> float:
        known = self._timed.get(name, ())
        if len(known) < 2:
            return own_seconds / MOST_TOLD
        (_, first, began), (_, last, ended) = known[0], known[-1]
        return (ended - began) / max(last - first, 1) / MOST_TIMED
