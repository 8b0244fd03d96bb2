"""Whether a replica sends something out of all proportion: it is on its way to diverge, and to take others with it."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

_FACTOR = 10.0  # of what is usual; a warmup or a decay changes less in `_REMEMBERED` outer steps
_REMEMBERED = 16  # outer steps
_FEWEST = 4  # values that tell what is usual


class Proportion:
    """Compares how far replicas have moved between outer steps with the others here, and with those before."""

    def __init__(self) -> None:
        self._usual: deque[float] = deque()

    def unusual(self, moved: Mapping[int, float]) -> list[str]:
        """A line for the replicas that moved ten times as far as usual, and one for those that are no longer finite.

        Args:
          moved: replica -> root mean square of what its inner steps and its last outer step did to its weights.
        """
        values = [*self._usual, *moved.values()]
        usual = median(values) if len(values) >= _FEWEST else float("inf")
        lost = [replica for replica, value in moved.items() if not math.isfinite(value)]
        far = {replica: value for replica, value in moved.items() if _FACTOR * usual < value < math.inf}
        lines = []
        if lost:
            lines.append(f"{_named(lost)} moved to what is not finite: a partner takes it over")
        if far:
            longest = max(far.values())
            lines.append(
                f"{_named(list(far))} moved {longest / usual:.0f} times as far as usual since the last "
                f"outer step (root mean square {longest:.2g}, usually {usual:.2g}): a partner takes half of it"
            )
        self._usual.extend(value for value in moved.values() if value <= _FACTOR * usual)
        while len(self._usual) > _REMEMBERED * len(moved):
            self._usual.popleft()
        return lines


def _named(replicas: Sequence[int]) -> str:
    """Replicas by their numbers, which ascend."""
    *others, last = replicas
    if not others:
        return f"replica {last}"
    if len(replicas) == last - others[0] + 1 > 2:
        return f"replicas {others[0]} to {last}"
    return f"replicas {', '.join(map(str, others))} and {last}"
