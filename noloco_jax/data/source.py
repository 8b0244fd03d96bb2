"""Interface of a data set to its readers, the same for every file format; shuffles.

The documents of an epoch are divided into as many *shards* as there are replicas, one each. A source gives the
documents of a shard an order that is a function of (epoch, shard, number of shards) and the run's seed alone, so a
position in it is a few integers.
"""

import functools
import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from noloco_jax.errors import UserError
from noloco_jax.storage import is_remote

IGNORED_LABEL = -100  # out of every loss: the convention of Hugging Face and PyTorch
PADDING = -1  # in place of an input id: padding, which a packer keeps where it ends a sequence and drops elsewhere

GOLDEN_STEP = 0x9E3779B97F4A7C15  # the odd integer next to 2^64 divided by the golden ratio

EncodeTexts = Callable[[Sequence[str]], list[np.ndarray]]  # texts -> int32 (1, n) of each


class SourceOptions(NamedTuple):
    """Options of a source: its data and their order.

    Attributes:
      path: a folder or a file.
      field: the field or flag that holds `path`.
      split: "train" or "validation".
      holds_both_splits: whether `path` has the documents of both splits; otherwise all of them belong to `split`.
      exclude: the path of the other split's data, or ""; files below it are left out.
      seed: seed of the shuffles.
      shuffle_buffer: number of documents that are shuffled together; 1 keeps the order of the files.
      text_column: the column or field that holds a document's text, of kinds that have more than one.
    """

    path: str
    field: str
    split: str
    holds_both_splits: bool
    exclude: str
    seed: int
    shuffle_buffer: int
    text_column: str

    @property
    def name(self) -> str:
        """The data set's name in error messages, for example data.path='/data'."""
        return f"{self.field}={self.path!r}"

    @property
    def root(self) -> str:
        """The path without "~" and a slash at its end."""
        return self.path.rstrip("/") if is_remote(self.path) else str(Path(self.path).expanduser())

    @property
    def part(self) -> str:
        """The part of the documents, see `HoldOut`, that belongs to the split if no file is named after it."""
        if not self.holds_both_splits:
            return "all"
        return "rest" if self.split == "train" else "held_out"

    def beside(self, name: str) -> str:
        """Return the field of a name in the group of `field`, or the flag if that is one."""
        return f"--{name}" if self.field.startswith("--") else f"{self.field.rpartition('.')[0]}.{name}"

    def digest(self, files: Iterable[tuple[str, Any]]) -> str:
        """Digest the files of `path`: their names below it, in order, and the facts about each, as JSON.

        A folder may be moved, and a single file renamed: what they hold is the same.
        """
        root, found = os.path.expanduser(self.path), hashlib.sha256()
        for file, facts in files:
            found.update(json.dumps([os.path.relpath(file, root), facts]).encode())
        return found.hexdigest()[:16]


class EpochShard(ABC):
    """One replica's documents of one epoch, open for reading.

    Attributes:
      seek_hint: integers by which `Source.open_shard` finds the document last read without reading all before it.
    """

    seek_hint: tuple[int, ...] = ()

    @abstractmethod
    def get(self, document: int) -> Any | None:
        """Return the record of document number `document`, for `Source.load`; None beyond the end."""

    def close(self) -> None:  # noqa: B027  # most have nothing open
        """Close the files."""


class Source(ABC):
    """A data set.

    Attributes:
      options: its data and their order.
      files: what it reads, whole or in part.
      part: the part of their documents that it gives, see `HoldOut`.
      num_columns: 1 for plain token streams, 2 where labels are stored beside the input ids.
      chunk_size: number of documents that are worth loading together.
    """

    num_columns = 1
    chunk_size = 32

    def __init__(self, options: SourceOptions, files: Sequence[str], part: str):
        self.options, self.files, self.part = options, files, part

    @property
    def name(self) -> str:
        """The data set's name in error messages."""
        return self.options.name

    @functools.cached_property
    @abstractmethod
    def fingerprint(self) -> dict[str, int | str]:
        """Facts about the files that must not change under a saved position; samples of them are read."""

    @abstractmethod
    def count_documents(self, limit: int) -> int:
        """Count documents, at most `limit`, and read the first one where that finds a fault at once."""

    def check_replicas(self, num_replicas: int) -> None:
        """Raise `UserError` where some replica would get no document."""
        found = self.count_documents(num_replicas)
        if found < num_replicas:
            raise UserError(
                f"num_replicas={num_replicas}, but {self.name} holds {found} {self.options.split} documents: "
                "use fewer replicas or more data"
            )

    @abstractmethod
    def open_shard(self, epoch: int, shard: int, num_shards: int, seek_hint: tuple[int, ...]) -> EpochShard:
        """Open shard `shard` of `num_shards` of an epoch. An empty `seek_hint` stands for the shard's beginning."""

    def load(self, records: Sequence[Any]) -> list[Any]:
        """Return the content of records from `EpochShard.get`.

        With one column that is its text; with two, its input ids and labels, int32 (2, n), `PADDING` behind them if at
        all.
        """
        return list(records)


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


class WindowShuffledShard(EpochShard):
    """An epoch's shard that is read in sequence and shuffled within windows of `window_size` documents.

    The place of a document depends on the shard and on `key` alone, so a position is saved without a shuffle buffer:
    reading the window again restores it. A window of 1 keeps the order of the files.
    """

    def __init__(self, window_size: int, key: tuple[int, ...]):
        self._window_size, self._key = window_size, key
        self._window, self._records = -1, []

    @abstractmethod
    def read_window(self, window: int) -> list[Any]:
        """The records of a window in the order of the files: `window_size` of them, fewer at the shard's end."""

    def get(self, document: int) -> Any | None:
        """The record of document number `document`, or None beyond the end. Reading in ascending order is fast."""
        window, slot = divmod(document, self._window_size)
        if window != self._window:
            self._records = self.read_window(window)
            self._window = window
        if slot >= len(self._records):
            return None
        return self._records[seeded_permutation(len(self._records), *self._key, window)[slot]]
