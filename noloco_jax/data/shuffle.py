"""Seeded shuffles, of a whole data set and within windows of it."""

import functools
from abc import ABC, abstractmethod
from typing import Any

import numpy as np


@functools.lru_cache(maxsize=16)
def seeded_permutation(count: int, *key: int) -> np.ndarray:
    """A permutation of range(count) as a function of the non-negative integers `key`: int64 (count,), read-only.

    It is built from a bit generator's raw output, which numpy promises never to change (it makes no such promise for
    `permutation`), so that a saved position means the same under every version of numpy.
    """
    # An integer is as many 32-bit words as it needs. Without the length, (1,) and (1, 0) would be the same seed, and
    # without the number of words of each (2**32, 0) and (0, 1); where all have one it is left out.
    words = tuple(max(-(-int(number).bit_length() // 32), 1) for number in key)
    seed = np.random.SeedSequence((len(key), *key), spawn_key=words if max(words, default=1) > 1 else ())
    order = np.argsort(np.random.PCG64(seed).random_raw(count), kind="stable")
    order.setflags(write=False)  # callers share it
    return order


class WindowShuffledShard(ABC):
    """An epoch's shard that is read in sequence and shuffled within windows of `window_size` documents.

    The place of a document depends on the shard and on `key` alone, so a position is saved without a shuffle buffer:
    reading the window again restores it. A window of 1 keeps the order of the files.
    """

    def __init__(self, window_size: int, key: tuple[int, ...]):
        self._window_size, self._key = window_size, key
        self._window, self._records = -1, []

    @property
    @abstractmethod
    def seek_hint(self) -> tuple[int, ...]:
        """Where the current window begins in the files; empty where a window is found without it."""

    @abstractmethod
    def read_window(self, window: int) -> list[Any]:
        """The records of a window in the order of the files: `window_size` of them, fewer at the shard's end."""

    def has(self, document: int) -> bool:
        return self.get(document) is not None

    def part(self, document: int) -> int:
        return 0

    def get(self, document: int) -> Any | None:
        """The record of document number `document`, or None beyond the end. Reading in ascending order is fast."""
        window, slot = divmod(document, self._window_size)
        if window != self._window:
            self._records = self.read_window(window)
            self._window = window
        if slot >= len(self._records):
            return None
        return self._records[seeded_permutation(len(self._records), *self._key, window)[slot]]

    @abstractmethod
    def close(self) -> None:
        """Closes the files."""
