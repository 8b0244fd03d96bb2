"""Pace of islands that end their rounds together: pauses of equal machines, strides of unequal ones.

Islands tell each other, in every exchange, which round they have ended and how many seconds ago, so that no two clocks
are compared. An island that was earlier than its partner pauses before its next inner steps, at a quarter of its speed,
until its lead is gone. It does not pause for a partner that is usually slower by more than a quarter, which would be in
vain, nor for one that is away, which sends nothing.

With `--pace=time` rounds, learning rates and the end of a run follow a schedule of inner steps, and an inner step may
stand for several of them. Islands tell how long a round takes them with every inner step, which depends on nobody else:
following what others take now, all would follow each other down. The round time to keep is the first quartile of those
of the island and its last partners: of four the fastest one's, of five to eight the second fastest's, so that one false
time among them moves nothing. An island takes as many inner steps as fit, and makes up for half of its lateness in the
next round.
"""

import math
import statistics
import threading
from collections import deque

from noloco_jax.islands import messages_pb2 as pb

STEPS_KEPT = 16  # inner steps whose median is the present speed
STEPS_NEEDED = 4
USUAL_STEPS = 256  # inner steps whose median is the usual speed, robust to other work on the machine
USUAL_NEEDED = 64  # inner steps, before which an island pauses for every partner
ENDS_KEPT = 64  # rounds whose ends are known
MAX_STRIDE = 16.0  # steps of the schedule that one inner step may stand for
MAX_CHANGE = 2.0  # factor between the round time to keep and the one of a round that makes up for a delay
SHARE = 0.5  # share of a delay to make up for in a round
PARTNERS = 8  # last partners whose round times count
MAX_PAUSE = 3.0  # before an inner step, in inner steps
MAX_UNEQUAL = 1.25  # slowest partner to pause for, in multiples of the own round time
MAX_SECONDS = 1e6  # that a peer may tell


class Pace:
    """Pace of one island. Times are seconds of one monotonic clock; the methods may be called from any thread.

    Args:
      steps_per_round: inner steps of the schedule.
      by_time: True for `--pace=time`.

    Attributes:
      unequal: a partner's round time over the own one, where pauses are in vain; None: they are not.
    """

    def __init__(self, steps_per_round: float, by_time: bool = False):
        self._steps_per_round, self._by_time = steps_per_round, by_time
        self._lock = threading.Lock()
        self._recent: deque[float] = deque(maxlen=STEPS_KEPT)
        self._usual: deque[float] = deque(maxlen=USUAL_STEPS)
        self._told: dict[str, float] = {}  # partner -> its round time
        self._ends: dict[int, tuple[float, int]] = {}  # round -> time, inner steps
        self._last: float | None = None  # begin of the inner step under way
        self._paused = 0.0  # seconds, in front of it
        self._steps = 0
        self._carry = 0.0  # fraction of a stride left over
        self._lead = 0.0  # seconds by which this island is earlier than its last partner; negative: later
        self.unequal: float | None = None

    def stride(self, now: float, largest: int) -> int:
        """Begin an inner step: return the steps of the schedule, from 1 to `largest`, that it stands for."""
        with self._lock:
            if self._last is not None:
                for seconds in (self._recent, self._usual):
                    seconds.append(now - self._last - self._paused)
            self._last, self._paused = now, 0.0
            self._steps += 1
            wanted = self._carry + self._fitting_stride()
            stride = max(1, min(math.floor(wanted), largest))
            self._carry = min(max(wanted - stride, 0.0), MAX_STRIDE)
            return stride

    def pause(self) -> float:
        """Return the seconds to pause before the next inner step, for partners that are later."""
        with self._lock:
            step = self._step_seconds()
            if self._lead <= 0 or not step or (self._by_time and self._fitting_stride() > 1):
                return 0.0
            seconds = min(self._lead, MAX_PAUSE * step)
            self._lead -= seconds
            self._paused = seconds
            return seconds

    def round_ended(self, round: int, now: float) -> None:
        with self._lock:
            self._ends[round] = now, self._steps
            self._ends.pop(round - ENDS_KEPT, None)

    def timing(self, round: int, now: float) -> pb.Timing:
        """Return what to tell a partner: the end of this round, or of the last one where this has not ended."""
        with self._lock:
            if not self._ends:
                return pb.Timing()
            known = round if round in self._ends else max(self._ends)
            return pb.Timing(round=known, ago=max(now - self._ends[known][0], 0.0), round_seconds=self._round_seconds())

    def meet(self, partner: str, timing: pb.Timing, now: float) -> None:
        """Adapt to a partner's timing; ignore one that no island has, and that of rounds long ago."""
        if not (0 <= timing.ago < MAX_SECONDS and 0 < timing.round_seconds < MAX_SECONDS):
            return
        with self._lock:
            own = self._round_seconds()
            self._told.pop(partner, None)
            self._told[partner] = timing.round_seconds
            while len(self._told) > PARTNERS:
                del self._told[next(iter(self._told))]
            if timing.round not in self._ends or not own:
                return
            ended, steps = self._ends[timing.round]
            # By the clock, but no more than the steps taken since: who was held up itself has not been ahead meanwhile.
            since = min(now - ended, (self._steps - steps) * self._step_seconds())
            lead = since - timing.ago
            ratio = timing.round_seconds / own if len(self._usual) >= USUAL_NEEDED else 1.0
            self.unequal = None if self._by_time or 1 / MAX_UNEQUAL <= ratio <= MAX_UNEQUAL else ratio
            if self._by_time:
                limit = 2 * self._target()
                self._lead = min(max(lead, -limit), limit)
            else:
                self._lead = lead if ratio <= MAX_UNEQUAL else 0.0

    def round_seconds(self) -> float:
        """Return the usual duration of a round; 0 while unknown."""
        with self._lock:
            return self._target()

    def restart(self) -> None:
        """Forget delays, as a peer's weights have been taken."""
        with self._lock:
            self._last, self._paused, self._carry, self._lead = None, 0.0, 0.0, 0.0
            self._ends.clear()

    def _fitting_stride(self) -> float:
        own, target = self._round_seconds(), self._target()
        if not self._by_time or not target:
            return 1.0
        wanted = min(max(target + SHARE * self._lead, target / MAX_CHANGE), target * MAX_CHANGE)
        return min(max(own / wanted, 1.0), MAX_STRIDE)

    def _target(self) -> float:
        """Return the round time to keep; 0 while the own one is unknown."""
        own = self._round_seconds()
        if not self._by_time or not own:
            return own
        times = sorted([own, *self._told.values()])
        return max(times[(len(times) - 1) // 4], own / MAX_STRIDE)

    def _step_seconds(self) -> float:
        return statistics.median(self._recent) if len(self._recent) >= STEPS_NEEDED else 0.0

    def _round_seconds(self) -> float:
        """Return the duration of a round in which every inner step is taken."""
        seconds = self._recent if self._by_time else self._usual
        return statistics.median(seconds) * self._steps_per_round if len(seconds) >= STEPS_NEEDED else 0.0
