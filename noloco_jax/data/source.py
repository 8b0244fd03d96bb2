"""What a data set offers to whoever reads it, whatever the format of its files.

The documents of an epoch are divided into as many *shards* as there are replicas, one each. A source gives the
documents of a shard an order that is a function of (epoch, shard, number of shards) and the run's seed alone, so a
position in it is a few integers.
"""

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

PADDING = -1  # in place of an input id: padding, which a packer keeps where it ends a sequence and drops elsewhere

EncodeTexts = Callable[[Sequence[str]], list[np.ndarray]]  # texts -> int32 (1, n) of each


class EpochShard(Protocol):
    """One replica's documents of one epoch, open for reading."""

    @property
    def seek_hint(self) -> tuple[int, ...]:
        """Integers with which `Source.open_shard` finds the document last read without reading all before it."""
        ...

    def has(self, document: int) -> bool:
        """Whether there is a document of that number; it is read if there is no other way to know."""
        ...

    def part(self, document: int) -> int:
        """The part of the files, a number of its own, that is read for the document and for others beside it."""
        ...

    def get(self, document: int) -> Any | None:
        """The record of document number `document`, for `Source.load`; None beyond the end."""
        ...

    def close(self) -> None: ...


class Source(Protocol):
    """A data set.

    Attributes:
      name: the data set's name in error messages.
      num_columns: 1 for plain token streams, 2 where labels are stored beside the input ids.
      chunk_size: number of documents that are worth loading together.
      shared_out_in_parts: what worker processes take turns with: the parts that are read (`EpochShard.part`), where
        reading is the work; otherwise chunks, where loading is.
    """

    name: str
    num_columns: int
    chunk_size: int
    shared_out_in_parts: bool

    @functools.cached_property
    def fingerprint(self) -> dict[str, int | str]:
        """Facts about the files that must not change under a saved position; samples of them are read."""
        ...

    def check_replicas(self, num_replicas: int) -> None:
        """Raises `UserError` where some replica would get no document."""
        ...

    def open_shard(self, epoch: int, shard: int, num_shards: int, seek_hint: tuple[int, ...]) -> EpochShard:
        """Shard `shard` of `num_shards` of an epoch. An empty `seek_hint` stands for the shard's beginning."""
        ...

    def load(self, records: Sequence[Any]) -> list[np.ndarray]:
        """Tokens of each record that `EpochShard.get` gave: int32 (num_columns, n), `PADDING` behind them if at all."""
        ...


class SourceOptions(NamedTuple):
    """What a source reads, and in which order.

    Attributes:
      path: a folder or a file.
      field: the field of the configuration that holds `path`.
      split: "train" or "validation".
      holds_both_splits: whether `path` has the documents of both splits; otherwise all of them belong to `split`.
      exclude: the path of the other split's data, or ""; files below it are left out.
      seed: seed of the shuffles.
      shuffle_buffer: number of documents that are shuffled together; 1 keeps the order of the files.
      on_bad_shard: whether to "stop" at a damaged file or to "skip" it.
      text_column: the column or field that holds a document's text, of kinds that have more than one.
    """

    path: str
    field: str
    split: str
    holds_both_splits: bool
    exclude: str
    seed: int
    shuffle_buffer: int
    on_bad_shard: str
    text_column: str

    @property
    def name(self) -> str:
        """The data set's name in error messages, for example data.path='/data'."""
        return f"{self.field}={self.path!r}"

    @property
    def validation_field(self) -> str:
        """The field that names the validation documents."""
        return f"{self._group}.validation_path"

    @property
    def text_column_field(self) -> str:
        """The field that names the column of the text."""
        return f"{self._group}.text_column"

    @property
    def _group(self) -> str:
        return self.field.rpartition(".")[0]

    @property
    def part(self) -> str:
        """The part of the documents, see `splits.HoldOut`, that belongs to the split if no file is named after it."""
        if not self.holds_both_splits:
            return "all"
        return "rest" if self.split == "train" else "held_out"

    def digest(self, files: Iterable[tuple[str, Any]]) -> str:
        """Tells the files of `path` from others: their names below it, in order, and what is known of each as JSON.

        A folder may be moved, and a single file renamed: what they hold is the same.
        """
        return _digest(os.path.expanduser(self.path), tuple(files))


@functools.lru_cache(maxsize=8)  # shared by the streams of a process
def _digest(root: str, files: tuple[tuple[str, Any], ...]) -> str:
    found = hashlib.sha256()
    for file, facts in files:
        found.update(json.dumps([os.path.relpath(file, root), facts]).encode())
    return found.hexdigest()[:16]
