"""The Grain pipeline: a replica's documents, loaded in worker processes or here, packed into batches.

Positions are cursors, which know nothing of workers and prefetching: every chunk of documents carries the cursors
that stand before them, so any pipeline can go on where another one stopped.
"""

import atexit
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict

import grain
import numpy as np
from absl import flags
from grain.experimental import ThreadPrefetchIterDataset

from noloco_jax.data.lanes import Cursor, Source, Walker
from noloco_jax.data.packing import Batch, Packer
from noloco_jax.errors import UserError

_BATCHES_AHEAD = 4
_CHUNKS_AHEAD = 2  # of each worker process


class _Closable(Protocol):
    def close(self) -> None: ...


closed_at_exit: weakref.WeakSet[_Closable] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Ends threads and worker processes while there is still an interpreter for Grain to end them with."""
    for closable in list(closed_at_exit):
        closable.close()


@dataclass(frozen=True)
class Cursors:
    """The cursors before each of some documents; no pytree, so that Grain does not take it apart."""

    cursors: Sequence[Cursor]


class Chunk(TypedDict):
    """Some consecutive documents: one array, which Grain can pass between processes in shared memory."""

    tokens: np.ndarray  # int32 (C, N), one document after another
    ends: np.ndarray  # int64 (documents,), where each of them ends
    cursors: Cursors


@dataclass(frozen=True)
class Replica:
    """Whose documents a pipeline reads."""

    source: Source
    replica: int
    num_replicas: int


class _Chunks(grain.DatasetIterator[Chunk]):
    """Chunks `begin`, `begin + step`, ... from a cursor on."""

    def __init__(self, replica: Replica, cursor: Cursor, begin: int, step: int):
        super().__init__()
        self._source = replica.source
        self._walker = Walker(replica.source, replica.replica, replica.num_replicas, cursor)
        self._skip, self._step = begin, step

    def __next__(self) -> Chunk:
        while True:
            cursors, documents = zip(*(self._walker.next() for _ in range(self._source.chunk)), strict=True)
            if self._skip == 0:
                self._skip = self._step - 1
                arrays = self._source.load(documents)
                ends = np.cumsum([array.shape[1] for array in arrays])
                return {"tokens": np.concatenate(arrays, axis=1), "ends": ends, "cursors": Cursors(cursors)}
            self._skip -= 1

    def get_state(self) -> dict[str, Any]:
        return {}  # the chunks carry their positions

    def set_state(self, state: dict[str, Any]) -> None:
        raise NotImplementedError("make a new data set from a chunk's cursor")

    def close(self) -> None:
        super().close()
        self._walker.close()


class ChunkDataset(grain.IterDataset[Chunk]):
    """A replica's documents from a cursor on, in chunks, which Grain's worker processes may divide among themselves."""

    def __init__(self, replica: Replica, cursor: Cursor):
        super().__init__()
        self._replica, self._cursor = replica, cursor
        self._begin, self._step = 0, 1

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        """Grain's protocol: this worker makes only every `sl.step`-th chunk from the `sl.start`-th on."""
        self._begin, self._step = sl.start, sl.step

    def __iter__(self) -> grain.DatasetIterator[Chunk]:
        return _Chunks(self._replica, self._cursor, self._begin, self._step)


def _in_worker(index: int, count: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism


class _Batches(grain.DatasetIterator[Batch]):
    def __init__(self, replica: Replica, batch_size: int, sequence_length: int, num_workers: int, cursor: Cursor):
        super().__init__()
        self._replica, self._num_workers = replica, num_workers
        self._shape = (replica.source.columns, batch_size, sequence_length)
        self._cursor = cursor
        self._packer = Packer(*self._shape)
        self._chunks: grain.DatasetIterator[Chunk] | None = None

    def _open_chunks(self) -> grain.DatasetIterator[Chunk]:
        chunks = ChunkDataset(self._replica, self._cursor)
        if self._num_workers:
            if not flags.FLAGS.is_parsed():
                flags.FLAGS.mark_as_parsed()  # Grain reads flags of its own, which no command line may have parsed
            options = grain.MultiprocessingOptions(self._num_workers, per_worker_buffer_size=_CHUNKS_AHEAD)
            chunks = chunks.mp_prefetch(options, worker_init_fn=_in_worker)
        return iter(chunks)

    def __next__(self) -> Batch:
        if self._chunks is None:
            self._chunks = self._open_chunks()
        begun = None  # the epoch in which documents without a token began
        try:
            while not self._packer.full:
                chunk = next(self._chunks)
                tokens = np.array(chunk["tokens"])  # frees the shared memory
                documents = np.split(tokens, chunk["ends"][:-1], axis=1)
                for document, cursor in zip(documents, chunk["cursors"].cursors, strict=True):
                    self._packer.add(document, cursor)
                    if document.shape[1]:
                        begun = None
                    elif begun is None:
                        begun = cursor.epoch
                    elif cursor.epoch > begun + 1:
                        raise UserError(
                            f"the documents of replica {self._replica.replica} of {self._replica.num_replicas} hold "
                            "no token: data.path has nothing but empty documents or padding"
                        )
        except BaseException:
            self._reset(self._cursor)  # so that the next call meets the same error again
            raise
        batch = self._packer.pop()
        self._cursor = self._packer.cursor
        return batch

    def _reset(self, cursor: Cursor) -> None:
        if self._chunks is not None:
            self._chunks.close()
        self._chunks, self._packer, self._cursor = None, Packer(*self._shape), cursor

    def get_state(self) -> dict[str, Any]:
        return self._cursor.to_json()

    def set_state(self, state: dict[str, Any]) -> None:
        self._reset(Cursor.from_json(state))

    def close(self) -> None:
        super().close()
        self._reset(self._cursor)


class BatchDataset(grain.IterDataset[Batch]):
    """A replica's endless batches; the iterator's state is a cursor as JSON."""

    def __init__(self, replica: Replica, batch_size: int, sequence_length: int, num_workers: int, cursor: Cursor):
        super().__init__()
        self._arguments = (replica, batch_size, sequence_length, num_workers, cursor)

    def __iter__(self) -> grain.DatasetIterator[Batch]:
        return _Batches(*self._arguments)


def batches(
    replica: Replica, batch_size: int, sequence_length: int, num_workers: int, cursor: Cursor
) -> grain.DatasetIterator[Batch]:
    """Batches made ahead in a thread; the iterator's state is that of the batches delivered."""
    dataset = BatchDataset(replica, batch_size, sequence_length, num_workers, cursor)
    return iter(ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=_BATCHES_AHEAD))
