"""Which documents of a data set are wanted, and their order: seeded shuffles, shuffle windows, what is held out."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

HELD_OUT_EVERY = 50

Encode = Callable[[Sequence[str]], list[np.ndarray]]  # texts -> int32 (1, n) each


class Wanted(NamedTuple):
    """What a source is to read.

    Attributes:
      path: a folder or a file.
      field: the field of the configuration that names it.
      split: which of its documents: of a C4 folder the shards called so, of others as `Selection` says.
      seed: of the shuffles.
      shuffle_buffer: documents that are shuffled together; 1 keeps the files' order.
    """

    path: str
    field: str
    split: str
    seed: int
    shuffle_buffer: int

    @property
    def name(self) -> str:
        """How errors call it."""
        return f"{self.field}={self.path!r}"


@functools.lru_cache(maxsize=16)
def shuffled(count: int, *key: int) -> np.ndarray:
    """A permutation of range(count), int64 (count,), as a function of the non-negative integers `key`.

    Built from a bit generator's raw output, which numpy promises never to change, as it does not of `permutation`:
    a saved position means the same under every version.
    """
    seed = np.random.SeedSequence((len(key), *key))  # which by itself takes (1,) and (1, 0) for the same
    order = np.argsort(np.random.PCG64(seed).random_raw(count), kind="stable")
    order.setflags(write=False)  # callers share it
    return order


class Selection:
    """Which of the items 0..count-1 a split holds: "all", the "held_out" ones or the "rest".

    Every 50th item is held out, from the 26th on; of fewer than 50 items, the middle one.
    """

    def __init__(self, count: int, split: str):
        self.count, self._split = count, split
        self._every = max(1, min(HELD_OUT_EVERY, count))

    def before(self, item: Any) -> Any:
        """How many of the items in front of `item` (an integer or an array of them) belong to the split."""
        held_out = (item - self._every // 2 + self._every - 1) // self._every
        return {"all": item, "held_out": held_out, "rest": item - held_out}[self._split]

    def mask(self, start: int, stop: int) -> np.ndarray:
        """bool (stop - start,): which of the items start..stop-1 belong to the split."""
        if self._split == "all":
            return np.ones(stop - start, bool)
        held_out = np.arange(start, stop) % self._every == self._every // 2
        return held_out if self._split == "held_out" else ~held_out


class WindowLane(ABC):
    """A lane that is read in sequence and shuffled within windows of `size` documents.

    A document's place depends on the lane and on `key` alone, so a position needs no buffer to be saved: reading
    the window again restores it. `size` 1 keeps the order of the files.
    """

    def __init__(self, size: int, key: tuple[int, ...]):
        self._size, self._key = size, key
        self._window, self._documents = -1, []

    @property
    @abstractmethod
    def anchor(self) -> tuple[int, ...]:
        """Where the window at hand begins, for a lane opened there again; empty where a window is found without."""

    @abstractmethod
    def read_window(self, window: int) -> list[Any]:
        """The documents of a window in the files' order: `size` of them, fewer where the lane ends."""

    def get(self, position: int) -> Any | None:
        """The document at `position`, or None beyond the lane's end. Ever growing positions are the fast ones."""
        window, slot = divmod(position, self._size)
        if window != self._window:
            self._documents = self.read_window(window)
            self._window = window
        if slot >= len(self._documents):
            return None
        return self._documents[shuffled(len(self._documents), *self._key, window)[slot]]

    @abstractmethod
    def close(self) -> None:
        """Closes the files."""
