"""Pace of islands that end their rounds together: pauses of equal machines, strides of unequal ones.

Islands tell each other, in every exchange, how many seconds ago they ended its round, so that no two clocks are
compared. An island believes it within what it sees itself: a partner that calls has ended the round by then; one that
called before the own round's end was earlier by that much, and no more is believed of one that answers. An island that
was earlier than its partner pauses before its next inner steps, at a quarter of its speed, until its lead is gone.
Pauses are earned by inner steps. So islands whose speed differs for a while stay level, and for partners that are
always slower an island pauses for a third of its time at most. That is more than a round without an exchange saves, so
an island that has been alone falls back. Speeds are not compared: islands that share a machine measure each other's
load.

With `--pace=time` rounds, learning rates and the end of a run follow a schedule of inner steps, and an inner step may
stand for several of them. Islands tell how long a round takes them with every inner step, which depends on nobody else:
following what others take now, all would follow each other down. The goal is the first quartile of the times of the
island and its last partners: of four the fastest one's, of five to eight the second fastest's. An island begins with
its own time. It comes nearer to the goal while partners that tell a shorter time are earlier than it, and farther from
it while they are later: a false time is not followed. It takes as many inner steps as fit, and makes up for half of its
lateness in the next round.
"""

import math
import statistics
import threading
from collections import deque

from noloco_jax.islands import messages_pb2 as pb

STEPS_KEPT = 16  # inner steps whose median is the present speed
STEPS_NEEDED = 4
MAX_STRIDE = 16.0  # steps of the schedule that one inner step may stand for
MAX_CHANGE = 2.0  # factor between the round time to keep and the one of a round that makes up for a delay
MAX_LATE = 2.0  # the longest lateness that is believed, in round times to keep
SHARE = 0.5  # share of a delay to make up for in a round
NEARER = 0.5  # of the way to the goal, for a lateness of an own round
FASTER = 0.95  # of the round time to keep: who tells less has a say in it
PARTNERS = 8  # last partners whose round times count
ENDS_KEPT = 64  # rounds whose ends are known
MAX_PAUSE = 3.0  # before an inner step, in inner steps
EARNED, MAX_EARNED = 0.5, 256.0  # pauses that an inner step earns, and those that can be saved up, in inner steps


class Pace:
    """Pace of one island. Times are seconds of one monotonic clock; the methods may be called from any thread.

    Args:
      steps_per_round: inner steps of the schedule.
      by_time: True for `--pace=time`.
    """

    def __init__(self, steps_per_round: float, by_time: bool = False):
        self._steps_per_round, self._by_time = steps_per_round, by_time
        self._lock = threading.Lock()
        self._recent: deque[float] = deque(maxlen=STEPS_KEPT)
        self._ends: dict[int, tuple[float, int]] = {}  # round -> time, inner steps
        self._steps = 0
        self._told: dict[str, float] = {}  # partner -> its round time
        self._last: float | None = None  # begin of the inner step under way
        self._paused = 0.0  # seconds, in front of it
        self._carry = 0.0  # fraction of a stride left over
        self._lead = 0.0  # seconds by which this island is earlier than its last partner; negative: later
        self._nearness = 0.0  # share of the way from the own round time to the goal
        self._earned = MAX_EARNED  # pauses left, in inner steps

    def stride(self, now: float, largest: int) -> int:
        """Begin an inner step: return the steps of the schedule, from 1 to `largest`, that it stands for."""
        with self._lock:
            if self._last is not None:
                self._recent.append(now - self._last - self._paused)
                self._earned = min(self._earned + EARNED, MAX_EARNED)
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
            seconds = min(self._lead, min(MAX_PAUSE, self._earned) * step)
            self._lead -= seconds
            self._earned -= seconds / step
            self._paused = seconds
            return seconds

    @property
    def has_paused_in_vain(self) -> bool:
        """True if all pauses that were earned are spent, and this island is still earlier than its last partner."""
        with self._lock:
            return self._earned < 1 and self._lead > 0 and not self._by_time

    def round_ended(self, round: int, now: float) -> None:
        with self._lock:
            self._ends[round] = now, self._steps
            self._ends.pop(round - ENDS_KEPT, None)
            self._lead = max(self._lead, (1 - SHARE) * self._lead)  # this round has made up for the rest

    def timing(self, round: int, now: float) -> pb.Timing:
        """Return what to tell a partner of a round that this island has ended."""
        with self._lock:
            ended, _ = self._ends.get(round, (now, 0))
            return pb.Timing(ago=max(now - ended, 0.0), round_seconds=self._round_seconds())

    def adapt(
        self, partner: str, round: int, timing: pb.Timing, came: float, now: float, has_called: bool = True
    ) -> None:
        """Adapt to a partner that has ended a round.

        Args:
          partner, round: of the exchange.
          timing: as it tells, finite and not negative.
          came: the time when its call, or its answer, was sent.
          now: the present: this island may not have ended the round yet.
          has_called: False for an answer, which does not show how much later this island was.
        """
        with self._lock:
            if round not in self._ends and round < max(self._ends, default=0):
                return
            own = self._round_seconds()
            self._told.pop(partner, None)
            self._told[partner] = timing.round_seconds or math.inf
            while len(self._told) > PARTNERS:
                del self._told[next(iter(self._told))]
            if not own:
                return
            ended, steps = self._ends.get(round, (now, self._steps))
            # By the clock, but no more than the steps taken since: who was held up itself has not been ahead meanwhile.
            most = min(came - ended, (self._steps - steps) * self._step_seconds())
            least = min(most, 0.0 if has_called else self._lead, 0.0)
            self._lead = max(min(max(came - timing.ago - ended, least), most), -MAX_LATE * self._target())
            if has_called and timing.round_seconds < FASTER * self._target():
                self._nearness = min(max(self._nearness - NEARER * self._lead / own, 0.0), 1.0)

    def round_seconds(self) -> float:
        """Return the usual duration of a round, by `--pace=time` the one to keep; 0 while unknown."""
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
        goal = max(times[(len(times) - 1) // 4], own / MAX_STRIDE)
        return own - self._nearness * max(own - goal, 0.0)

    def _step_seconds(self) -> float:
        return statistics.median(self._recent) if len(self._recent) >= STEPS_NEEDED else 0.0

    def _round_seconds(self) -> float:
        """Return the duration of a round in which every inner step is taken."""
        return self._step_seconds() * self._steps_per_round
