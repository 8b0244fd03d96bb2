"""Training throughput in tokens per second."""

import collections
import time
from collections.abc import Callable


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
