"""Warnings about replicas that move much farther than usual: they may be diverging, and pull their partners along."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

_FACTOR = 10.0  # multiple of the usual; a warm-up or decay changes less than that in `_REMEMBERED` outer steps
_REMEMBERED = 16  # outer steps that define the usual
_FEWEST = 4  # the fewest values that define the usual


class Proportion:
    """Comparison of replicas' movement between outer steps with that of the others and of earlier steps."""

    def __init__(self) -> None:
        self._usual: deque[float] = deque()

    def unusual(self, moved: Mapping[int, float]) -> list[str]:
        """Return a warning for replicas that moved ten times as far as usual, and one for non-finite replicas.

        Args:
          moved: replica -> root-mean-square movement of its weights by its inner steps and its last outer step.
        """
        values = [*self._usual, *moved.values()]
        usual = median(values) if len(values) >= _FEWEST else float("inf")
        lost = [replica for replica, value in moved.items() if not math.isfinite(value)]
        far = {replica: value for replica, value in moved.items() if _FACTOR * usual < value < math.inf}
        lines = []
        if lost:
            lines.append(
                f"{_named(lost)} moved to weights that are not finite, which its next partner averages with: resume "
                "from an earlier checkpoint with a lower inner.lr"
            )
        if far:
            longest = max(far.values())
            lines.append(
                f"{_named(list(far))} moved {longest / usual:.0f} times as far as usual since the last "
                f"outer step (root mean square {longest:.2g}, usually {usual:.2g}), half of which passes to a partner: "
                "lower inner.lr if the loss rises"
            )
        self._usual.extend(value for value in moved.values() if value <= _FACTOR * usual)
        while len(self._usual) > _REMEMBERED * len(moved):
            self._usual.popleft()
        return lines


def _named(replicas: Sequence[int]) -> str:
    """Format replicas by their numbers, which ascend."""
    *others, last = replicas
    if not others:
        return f"replica {last}"
    if len(replicas) == last - others[0] + 1 > 2:
        return f"replicas {others[0]} to {last}"
    return f"replicas {', '.join(map(str, others))} and {last}"
