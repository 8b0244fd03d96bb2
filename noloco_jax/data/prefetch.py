"""Batches prefetched with Grain: documents are loaded in worker processes or a thread, and packed ahead of time.

A saved position knows nothing of workers and prefetching: every chunk of documents carries the positions before each
of them, so a pipeline with any number of workers can continue where another one stopped.
"""

import atexit
import functools
import multiprocessing
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict

import grain
import numpy as np
from absl import flags
from grain.experimental import ThreadPrefetchIterDataset

from noloco_jax.data.packing import HostBatch, Packer
from noloco_jax.data.positions import DataPosition
from noloco_jax.data.reader import DocumentReader
from noloco_jax.data.source import Source
from noloco_jax.errors import UserError

_PREFETCHED_BATCHES = 4
_PREFETCHED_CHUNKS = 2  # per worker process


class _Closable(Protocol):
    def close(self) -> None: ...


closed_at_exit: weakref.WeakSet[_Closable] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Ends threads and worker processes while Grain can still do so; at the interpreter's end it cannot."""
    for closable in list(closed_at_exit):
        closable.close()


@dataclass(frozen=True)
class Positions:
    """The positions before each of some documents. A class, because Grain would treat a plain list as a pytree."""

    positions: Sequence[DataPosition]


class Chunk(TypedDict):
    """Some consecutive documents: one array, which Grain can pass between processes in shared memory."""

    tokens: np.ndarray  # int32 (C, N), one document after another
    ends: np.ndarray  # int64 (documents,), where each of them ends
    positions: Positions
    ends_turn: bool  # whether the next chunk is another worker's


@dataclass(frozen=True)
class ReplicaDocuments:
    """The documents that a pipeline reads: those of one replica."""

    source: Source
    replica: int
    num_replicas: int


class _ChunkIterator(grain.DatasetIterator[Chunk]):
    """The chunks of a replica's documents from a position on that are made by one worker of several."""

    def __init__(self, documents: ReplicaDocuments, position: DataPosition, worker: int, num_workers: int):
        super().__init__()
        self._source = documents.source
        self._reader = DocumentReader(documents.source, documents.replica, documents.num_replicas, position)
        self._worker, self._num_workers = worker, num_workers
        self._turn = 0  # counted over all workers
        self._ahead = False  # whether the reader has gone to the next chunk's first document

    def __next__(self) -> Chunk:
        while True:
            mine = self._turn % self._num_workers == self._worker
            positions, records, ends_turn = self._next_chunk(mine)
            self._turn += ends_turn
            if mine:
                arrays = self._source.load(records)
                return {
                    "tokens": np.concatenate(arrays, axis=1),
                    "ends": np.cumsum([array.shape[1] for array in arrays]),
                    "positions": Positions(positions),
                    "ends_turn": ends_turn,
                }

    def _next_chunk(self, read: bool) -> tuple[list[DataPosition], list[Any], bool]:
        """(positions before its documents, their records if they are to be read, whether it ends a turn)."""
        positions: list[DataPosition] = []
        records: list[Any] = []
        while len(positions) < self._source.chunk_size:
            if not self._ahead:
                self._reader.advance()
            positions.append(self._reader.position)
            if read:
                records.append(self._reader.read())
            self._ahead = self._source.shared_out_in_parts
            if self._ahead:
                self._reader.advance()
                if self._reader.begins_part:
                    return positions, records, True
        return positions, records, not self._source.shared_out_in_parts

    def get_state(self) -> dict[str, Any]:
        return {}  # the chunks carry their positions

    def set_state(self, state: dict[str, Any]) -> None:
        raise NotImplementedError("make a new data set from a chunk's positions")

    def close(self) -> None:
        super().close()
        self._reader.close()


class ChunkDataset(grain.IterDataset[Chunk]):
    """A replica's documents from a position on, in chunks: those of one worker of several."""

    def __init__(self, documents: ReplicaDocuments, position: DataPosition, worker: int = 0, num_workers: int = 1):
        super().__init__()
        self._arguments = (documents, position, worker, num_workers)

    def __iter__(self) -> grain.DatasetIterator[Chunk]:
        return _ChunkIterator(*self._arguments)


class _WorkerChunks:
    """The chunks of worker processes, which take turns of unequal lengths."""

    def __init__(self, documents: ReplicaDocuments, position: DataPosition, num_workers: int):
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()  # Grain reads flags of its own; a command line need not have parsed them
        options = grain.MultiprocessingOptions(num_workers=1, per_worker_buffer_size=_PREFETCHED_CHUNKS)
        datasets = [ChunkDataset(documents, position, worker, num_workers) for worker in range(num_workers)]
        # The threads start the processes now: Grain by itself does so when a process's first chunk is asked for.
        self._workers = [
            iter(
                ThreadPrefetchIterDataset(
                    dataset.mp_prefetch(options, worker_init_fn=_init_worker), prefetch_buffer_size=1
                )
            )
            for dataset in datasets
        ]
        for worker in self._workers:
            worker.start_prefetch()
        self._turn = 0

    def __next__(self) -> Chunk:
        chunk = next(self._workers[self._turn])
        self._turn = (self._turn + chunk["ends_turn"]) % len(self._workers)
        return chunk

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


def _init_worker(index: int, count: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends a worker whose trainer is killed: nobody takes its chunks any more, and it would wait for that for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class _BatchIterator(grain.DatasetIterator[HostBatch]):
    """A replica's endless batches from a position on; the state is the position after those delivered, as JSON."""

    def __init__(
        self,
        documents: ReplicaDocuments,
        batch_size: int,
        sequence_length: int,
        num_workers: int,
        position: DataPosition,
        document_mask: bool,
    ):
        super().__init__()
        self._documents, self._num_workers = documents, num_workers
        self._new_packer = functools.partial(
            Packer, documents.source.num_columns, batch_size, sequence_length, document_mask=document_mask
        )
        self._position = position
        self._packer = self._new_packer()
        self._chunks: grain.DatasetIterator[Chunk] | _WorkerChunks | None = None

    def _open_chunks(self) -> grain.DatasetIterator[Chunk] | _WorkerChunks:
        if self._num_workers:
            return _WorkerChunks(self._documents, self._position, self._num_workers)
        return iter(ChunkDataset(self._documents, self._position))

    def __next__(self) -> HostBatch:
        if self._chunks is None:
            self._chunks = self._open_chunks()
        empty_since = None  # the epoch of the first of consecutive documents without a token
        try:
            while not self._packer.full:
                chunk = next(self._chunks)
                tokens = np.array(chunk["tokens"])  # frees the shared memory
                documents = np.split(tokens, chunk["ends"][:-1], axis=1)
                for document, position in zip(documents, chunk["positions"].positions, strict=True):
                    self._packer.add(document, position)
                    if document.shape[1]:
                        empty_since = None
                    elif empty_since is None:
                        empty_since = position.epoch
                    elif position.epoch > empty_since + 1:
                        raise UserError(
                            f"the documents of replica {self._documents.replica} of {self._documents.num_replicas} "
                            f"hold no token: {self._documents.source.name} has nothing but empty documents or padding"
                        )
        except BaseException:
            self._reset(self._position)  # so that the next call meets the same error again
            raise
        batch = self._packer.pop()
        self._position = self._packer.position
        return batch

    def _reset(self, position: DataPosition) -> None:
        if self._chunks is not None:
            self._chunks.close()
        self._chunks, self._packer, self._position = None, self._new_packer(), position

    def get_state(self) -> dict[str, Any]:
        return self._position.to_json()

    def set_state(self, state: dict[str, Any]) -> None:
        self._reset(DataPosition.from_json(state))

    def close(self) -> None:
        super().close()
        self._reset(self._position)


class BatchDataset(grain.IterDataset[HostBatch]):
    """A replica's endless batches, for Grain to iterate over."""

    def __init__(
        self,
        documents: ReplicaDocuments,
        batch_size: int,
        sequence_length: int,
        num_workers: int,
        position: DataPosition,
        document_mask: bool,
    ):
        super().__init__()
        self._arguments = (documents, batch_size, sequence_length, num_workers, position, document_mask)

    def __iter__(self) -> grain.DatasetIterator[HostBatch]:
        return _BatchIterator(*self._arguments)


def prefetched_batches(dataset: grain.IterDataset[HostBatch]) -> grain.DatasetIterator[HostBatch]:
    """Batches that a thread makes ahead of time; the iterator's state is that of the batches delivered."""
    return iter(ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=_PREFETCHED_BATCHES))
