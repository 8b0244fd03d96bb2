"""Which documents are trained on, and which are held out for validation."""

from typing import Any

import numpy as np

HELD_OUT_EVERY = 50


class HoldOut:
    """The items, of those numbered 0 to count - 1, that belong to a split: "all", the "held_out" ones or the "rest".

    Every 50th item is held out, from the 26th on; of fewer than 50 items, the middle one.
    """

    def __init__(self, count: int, split: str):
        self._split = split
        self._every = max(1, min(HELD_OUT_EVERY, count))

    def count_before(self, item: Any) -> Any:
        """Number of items in front of `item` (an integer or an array of them) that belong to the split."""
        held_out = (item - self._every // 2 + self._every - 1) // self._every
        return {"all": item, "held_out": held_out, "rest": item - held_out}[self._split]

    def mask(self, start: int, stop: int) -> np.ndarray:
        """Whether each of the items start to stop - 1 belongs to the split: bool (stop - start,)."""
        if self._split == "all":
            return np.ones(stop - start, bool)
        held_out = np.arange(start, stop) % self._every == self._every // 2
        return held_out if self._split == "held_out" else ~held_out
