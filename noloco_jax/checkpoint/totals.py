"""Totals of a run since its first start, which its checkpoints save and a resume continues, and its speed."""

import collections
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace


@dataclass(frozen=True)
class Totals:
    """Sums over the steps of a run and all its starts, without steps lost by a kill after the last checkpoint.

    Attributes:
      tokens: tokens trained on by all replicas together.
      bytes_sent_total: bytes sent by a replica to other replicas, averaged over replicas, see `messages`.
      seconds: seconds of training, evaluating and saving.
      seconds_waiting_for_data: seconds of these spent waiting for batches: an upper bound of the cost of data, since
        devices compute a step meanwhile.
      seconds_in_outer_steps: seconds of these spent in outer steps.
      unlogged_outer_steps: the last outer steps taken, which no metrics line has yet.
    """

    tokens: int = 0
    bytes_sent_total: int | float = 0
    seconds: float = 0.0
    seconds_waiting_for_data: float = 0.0
    seconds_in_outer_steps: float = 0.0
    unlogged_outer_steps: int = 0

    @property
    def figures(self) -> dict[str, int | float]:
        """Return what metrics lines show: all but the counter that only a resume needs."""
        return {name: value for name, value in asdict(self).items() if name != "unlogged_outer_steps"}

    def plus(self, **values: int | float) -> "Totals":
        """Return the totals with the given values added."""
        return replace(self, **{name: getattr(self, name) + value for name, value in values.items()})


class Throughput:
    """Tokens per second over the last `window` steps.

    `reset()` restarts the clock after anything but a training step: a compilation, an evaluation, a checkpoint.
    """

    def __init__(self, window: int = 50, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._marks: collections.deque[tuple[float, int]] = collections.deque(maxlen=window + 1)
        self.reset()

    def reset(self) -> None:
        """Discard the steps so far; the next one is timed from now."""
        self._marks.clear()
        self._marks.append((self._clock(), 0))

    def step(self, tokens: int) -> None:
        """Count a finished step's tokens."""
        self._marks.append((self._clock(), self._marks[-1][1] + tokens))

    @property
    def tokens_per_second(self) -> float:
        """Return the throughput; 0 before the first step."""
        (start, before), (end, after) = self._marks[0], self._marks[-1]
        return (after - before) / (end - start) if end > start else 0.0


def wall_clock() -> str:
    """Return the current time in the format of the run's records: 2026-11-22T12:00:00+0000."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
