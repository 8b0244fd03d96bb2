"""Islands of unequal speed that end their rounds together (design §12): how far an inner step carries each of them.

A run has a schedule of inner steps, which rounds, learning rates and its end go by. The fastest island takes every step
of it; the inner step of an island of half the speed stands for two. So a round takes all of them as long as it takes
the fastest, each with as many inner steps as it has time for, and nobody waits.

Two things decide how many steps of the schedule an inner step stands for. One is the island's speed against that of the
fastest one that it has heard of. The other is when its partners end the same rounds: who is later catches up with half
of the delay, and who is earlier and not the fastest falls back by half of it. Islands tell each other the seconds that
have passed since, so that no two clocks are compared, and what holds all of them up alike, as an evaluation does,
changes nothing.
"""

import math
import statistics
from collections import deque

from noloco_jax.islands.protocol.headers import Speed, Timing

STEPS_KEPT = 16  # whose median is the island's speed
STEPS_NEEDED = 4
ROUNDS_KNOWN = 16  # for which another island's speed is believed
LONGEST_STRIDE = 64  # steps of the schedule that one inner step may stand for
SHARE = 0.5  # of a delay; the partner makes up for the other half, where it can


class Pace:
    """The pace of one island. Times are monotonic seconds of the caller's.

    Args:
      name: of the island.
      is_kept: whether islands keep pace; else every inner step stands for one, and nothing is told.

    Attributes:
      made_up: steps of the schedule that catching up has added so far; below 0 where it has fallen back.
    """

    def __init__(self, name: str, is_kept: bool = True):
        self._name, self._is_kept = name, is_kept
        self._seconds: deque[float] = deque(maxlen=STEPS_KEPT)
        self._last: float | None = None
        self._others: dict[str, Speed] = {}
        self._carry = 0.0  # of a stride that was no whole number
        self._behind = 0.0  # steps of the schedule to make up for
        self.made_up = 0.0

    def stride(self, now: float, most: int) -> int:
        """Steps of the schedule, from 1 to `most`, that the inner step which begins now is to stand for."""
        if not self._is_kept:
            return 1
        if self._last is not None:
            self._seconds.append(now - self._last)
        self._last = now
        if len(self._seconds) < STEPS_NEEDED:
            return 1
        own, fastest = statistics.median(self._seconds), self._fastest_seconds()
        even = min(own / fastest, LONGEST_STRIDE) if fastest > 0 else 1.0
        extra = min(max(self._behind, 1.0 - even), even)
        self._behind -= extra
        self.made_up += extra
        wanted = self._carry + even + extra
        stride = max(1, min(math.floor(wanted), most))
        self._carry = min(wanted - stride, even)  # what `most` leaves over shows as a delay
        return stride

    def timing(self, ended: float, now: float, round: int) -> Timing | None:
        """What a partner is told.

        Args:
          ended: when the round ended whose messages are exchanged.
          now: the time.
          round: the last one that was ended.
        """
        if not self._is_kept:
            return None
        if len(self._seconds) < STEPS_NEEDED:
            return Timing(now - ended, None, self._fastest(None))
        own = Speed(self._name, statistics.median(self._seconds), round)
        return Timing(now - ended, own, self._fastest(own))

    def hear(self, timing: Timing | None, round: int) -> None:
        """Another island, met or not, tells of speeds; `round` is the last one that was ended here."""
        if timing is None:
            return
        for speed in (timing.own, timing.fastest):
            if speed is None or speed.name == self._name or not 0 < speed.seconds < math.inf:
                continue
            known = self._others.get(speed.name)
            if known is None or known.round < speed.round:
                self._others[speed.name] = speed
        self._others = {name: speed for name, speed in self._others.items() if speed.round >= round - ROUNDS_KNOWN}

    def meet(self, timing: Timing | None, ended: float, made_up: float, now: float) -> None:
        """A partner tells when it ended a round that ended here at `ended`, `made_up` being what it was then."""
        fastest = self._fastest_seconds()
        if timing is not None and fastest > 0:
            late = (timing.ago - (now - ended)) / fastest
            self._behind = SHARE * (late - (self.made_up - made_up))

    def restart(self) -> None:
        """At another island's weights: what was late is past."""
        self._last = None
        self._carry = self._behind = 0.0

    def _fastest_seconds(self) -> float:
        """Of an inner step of the fastest; 0 where not even the own ones are known."""
        if len(self._seconds) < STEPS_NEEDED:
            return 0.0
        return min([statistics.median(self._seconds), *(speed.seconds for speed in self._others.values())])

    def _fastest(self, own: Speed | None) -> Speed | None:
        speeds = [*([] if own is None else [own]), *self._others.values()]
        return min(speeds, key=lambda speed: speed.seconds, default=None)
