"""Whether a replica sends something out of all proportion: it is on its way to diverge, and to take others with it."""

from collections import deque
from collections.abc import Mapping
from statistics import median

_FACTOR = 10.0  # of what is usual; a warmup or a decay changes less in `_REMEMBERED` outer steps
_REMEMBERED = 16  # outer steps
_FEWEST = 4  # values that tell what is usual


class Proportion:
    """Compares how far replicas have moved between outer steps with the others here, and with those before."""

    def __init__(self) -> None:
        self._usual: deque[float] = deque()

    def unusual(self, moved: Mapping[int, float]) -> list[str]:
        """A line for every replica that moved ten times as far as usual, or is no longer finite.

        Args:
          moved: replica -> root mean square of what its inner steps and its last outer step did to its weights.
        """
        values = [*self._usual, *moved.values()]
        usual = median(values) if len(values) >= _FEWEST else float("inf")
        lines = [
            f"replica {replica} moved {value / usual:.0f} times as far as usual since its last outer step "
            f"(root mean square {value:.2g}, usually {usual:.2g}): a partner takes half of it"
            for replica, value in moved.items()
            if not value <= _FACTOR * usual
        ]
        self._usual.extend(value for value in moved.values() if value <= _FACTOR * usual)
        while len(self._usual) > _REMEMBERED * len(moved):
            self._usual.popleft()
        return lines
