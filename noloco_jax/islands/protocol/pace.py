"""Pace of islands that end their rounds together (design §12): strides and pauses.

Rounds, learning rates and the end of a run follow a schedule of inner steps. The fastest island takes every step of it;
an inner step of an island of half the speed stands for two. So a round takes equally long on all islands, each takes as
many inner steps as it has time for, and nobody waits.

Two things decide how many steps of the schedule an inner step stands for. One is the island's speed against that of the
fastest one that it has heard of (`speeds.py`). The other is when its partners end the same rounds: who is later catches
up with half of the delay, and who is earlier and not the fastest falls back by half of it. Islands tell each other the
seconds that have passed since, so that no two clocks are compared, and what holds all of them up alike, as an
evaluation does, changes nothing.

Islands of equal speed do not keep pace: they take every step. Short delays would still drive them apart until they no
longer met. So an island that is earlier than a partner gives way: it pauses before its next inner steps, at a quarter
of its speed, until its lead is gone or it hears from a partner that is not late. Corrections are then late by few
steps. It does not give way to a partner that is usually slower by more than a quarter, which would be in vain, nor to
one that is away, which sends nothing.
"""

import math
import statistics
from collections import deque
from collections.abc import Collection
from typing import NamedTuple

from noloco_jax.islands.protocol.messages import Speed, Timing
from noloco_jax.islands.protocol.speeds import ROUNDS_KNOWN, Speeds

STEPS_KEPT = 16  # inner steps whose median is the island's speed
STEPS_NEEDED = 4
USUAL_STEPS = 256  # inner steps whose median is its usual speed, robust to other work on its machine
ENDS_KEPT = 64  # rounds; a peer at an older one is too far away to wait for
LONGEST_STRIDE = 64  # steps of the schedule that one inner step may stand for
SHARE = 0.5  # share of a delay to make up for; the partner makes up for the other half
MOST_GIVEN = 3.0  # longest pause before an inner step, in inner steps
MOST_UNEQUAL = 1.25  # slowest partner to give way to, in multiples of the own usual inner step


class _End(NamedTuple):
    """End of a round: its time; `made_up`, inner steps and steps of the schedule then."""

    time: float
    made_up: float
    steps: int
    scheduled: int


class Pace:
    """Pace of one island. Times are monotonic seconds of the caller's.

    Args:
      name: the island's name.
      others: the names of all other islands; the caller may change them.
      is_kept: True if islands keep pace; else every inner step stands for one, and the first give way.

    Attributes:
      made_up: steps of the schedule that catching up has added so far; below 0 where it has fallen back.
    """

    def __init__(self, name: str, others: Collection[str], is_kept: bool = True):
        self._name, self._is_kept = name, is_kept
        self._seconds: deque[float] = deque(maxlen=STEPS_KEPT)
        self._all_seconds: deque[float] = deque(maxlen=USUAL_STEPS)
        self._last: float | None = None
        self._speeds = Speeds(others)
        self._carry = 0.0  # fraction of a stride left over
        self._behind = 0.0  # steps of the schedule to make up for
        self._ends: dict[int, _End] = {}
        self._steps = 0  # inner steps that were begun
        self._scheduled = 0  # steps of the schedule that they stand for
        self._paused = 0.0  # seconds, in front of the inner step that is under way
        self.made_up = 0.0

    def stride(self, now: float, most: int) -> int:
        """Return the steps of the schedule, from 1 to `most`, that the next inner step is to stand for."""
        if self._last is not None:
            seconds = now - self._last - self._paused
            self._seconds.append(seconds)
            self._all_seconds.append(seconds)
        self._last, self._paused = now, 0.0
        self._steps += 1
        stride = self._stride(most)
        self._scheduled += stride
        return stride

    def _stride(self, most: int) -> int:
        own, fastest = self._own_seconds(), self._fastest_seconds()
        if not self._is_kept or not own:
            return 1
        even = min(own / fastest, LONGEST_STRIDE) if fastest > 0 else 1.0
        extra = min(max(self._behind, 1.0 - even), even)
        self._behind -= extra
        self.made_up += extra
        wanted = self._carry + even + extra
        stride = max(1, min(math.floor(wanted), most))
        self._carry = min(wanted - stride, even)  # the rest beyond `most` appears as a delay
        return stride

    def pause(self) -> float:
        """Return the seconds to pause before the next inner step, for partners that are later."""
        if self._is_kept or self._behind >= 0:
            return 0.0
        given = min(-self._behind, MOST_GIVEN)
        self._behind += given
        self._paused = given * self._own_seconds()
        return self._paused

    def round_ended(self, round: int, now: float) -> None:
        self._ends[round] = _End(now, self.made_up, self._steps, self._scheduled)
        self._ends = {known: end for known, end in self._ends.items() if known > round - ENDS_KEPT}

    def timing(self, round: int, now: float) -> Timing | None:
        """Return the timing to send for this round; None for a round that ended before the last start."""
        if round not in self._ends:
            return None
        seconds = self._own_seconds() if self._is_kept else self._usual_seconds()
        own = Speed(self._name, seconds, max(self._ends)) if seconds else None
        return Timing(now - self._ends[round].time, own, own and self._speeds.fastest_met(own))

    def hear(self, sender: str, round: int, timing: Timing | None, now: float) -> None:
        """Learn speeds from a peer's timing of a round."""
        if timing is None:
            return
        self._speeds.hear(sender, timing, max(self._ends, default=-1))
        if round in self._ends:
            self._speeds.time(sender, round, self._ends[round].scheduled, now)

    def meet(self, round: int, timing: Timing | None, now: float, delay: float) -> None:
        """Adapt to the time when the partner ended a round; ignore one that this island ended long ago.

        With islands that keep pace a partner may be rounds ahead: it meets nobody until this island has caught up, as
        the fastest of all never falls back.

        Args:
          round: the round.
          timing: the partner's timing.
          now: the time.
          delay: latency of the partner's header, in seconds.
        """
        unit = self._fastest_seconds() if self._is_kept else self._own_seconds()
        if timing is None or not unit:
            return
        if round not in self._ends:
            self._follow(round, timing.ago / unit)
            return
        end = self._ends[round]
        if self._is_kept:
            late = (timing.ago - (now - end.time)) / unit
            self._behind = SHARE * min(late - (self.made_up - end.made_up), self._most_late())
            return
        # Count by the clock, as begun steps may still wait in a queue, but no more than those steps: an island that
        # was held up itself has not been ahead meanwhile.
        taken = min((now - end.time) / unit, self._steps - end.steps)
        ahead = taken - (timing.ago + delay) / unit
        in_vain = timing.own is None or timing.own.seconds > MOST_UNEQUAL * self._usual_seconds()
        self._behind = 0.0 if in_vain else -ahead

    def _follow(self, round: int, ago: float) -> None:
        """Make up for the steps to a partner that ended a later `round` so many steps of the schedule ago."""
        if not self._is_kept or len(self._ends) < 2:
            return
        last = max(self._ends)
        if not 0 < round - last <= ENDS_KEPT:
            return
        taken = self._scheduled - self._ends[last].scheduled
        late = (round - last) * self._per_round() + ago - taken
        self._behind = max(self._behind, SHARE * min(late, self._most_late()))

    def _per_round(self) -> float:
        """Return the steps of the schedule in a round; all so far, before two rounds have ended."""
        first, last = min(self._ends), max(self._ends)
        before = self._ends[first].scheduled if first < last else 0
        return (self._ends[last].scheduled - before) / max(last - first, 1)

    def _most_late(self) -> float:
        """Return the most steps of the schedule to be late by: what a peer says counts for no more rounds."""
        return ROUNDS_KNOWN * self._per_round()

    def unequal(self, timing: Timing | None) -> tuple[float, float] | None:
        """Return the usual seconds of an inner step here and of a partner with which no pause helps, or None."""
        own = self._usual_seconds()
        if self._is_kept or timing is None or timing.own is None or not own:
            return None
        ratio = timing.own.seconds / own
        return (own, timing.own.seconds) if max(ratio, 1 / ratio) > MOST_UNEQUAL else None

    def restart(self) -> None:
        """Reset after taking a peer's weights: earlier delays no longer count."""
        self._last = None
        self._carry = self._behind = self._paused = 0.0
        self._ends.clear()
        self._speeds.restart()

    def _own_seconds(self) -> float:
        """Return the median seconds of recent inner steps; 0 while unknown."""
        return statistics.median(self._seconds) if len(self._seconds) >= STEPS_NEEDED else 0.0

    def _usual_seconds(self) -> float:
        return statistics.median(self._all_seconds) if len(self._all_seconds) >= STEPS_NEEDED else 0.0

    def _fastest_seconds(self) -> float:
        """Return the seconds of an inner step of the fastest known island; 0 while even the own ones are unknown."""
        own = self._own_seconds()
        return min([own, *(speed.seconds for speed in self._speeds.believed(own))]) if own else 0.0
