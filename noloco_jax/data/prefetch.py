"""Sequences of a replica's documents, made ahead of time: Grain's worker processes or its threads do the loading.

Nothing here keeps a position to save. Every chunk of documents carries the positions before each of them, and every
sequence the position after it, so any number of workers can continue where any other number stopped.
"""

import functools
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar

import grain
import numpy as np
from absl import flags
from grain.experimental import ThreadPrefetchIterDataset

from noloco_jax.data.packing import HostSequence, Packer
from noloco_jax.data.positions import DataPosition, after_document, share
from noloco_jax.data.reading import WorkerLostError
from noloco_jax.data.source import EpochShard, Source
from noloco_jax.errors import UserError

T = TypeVar("T")

_PREFETCHED_CHUNKS = 2  # per worker process


@dataclass(frozen=True)
class Positions:
    """The positions before each of some documents. A class, because Grain would treat a plain list as a pytree."""

    positions: Sequence[DataPosition]


class Chunk(TypedDict):
    """Some consecutive documents: one array, which Grain can pass between processes in shared memory."""

    tokens: np.ndarray  # int32 (C, N), one document after another
    ends: np.ndarray  # int64 (documents,), the end of each of them in `tokens`
    positions: Positions
    ends_turn: bool  # the next chunk is another worker's


@dataclass(frozen=True)
class ReplicaDocuments:
    """One replica's documents of a source."""

    source: Source
    replica: int
    num_replicas: int


class DocumentReader:
    """Walk through a replica's documents from a position on, epoch after epoch without end.

    Attributes:
      position: the one before the current document.
      begins_part: true where the current document is of another part than the one before it in its shard, see
        `EpochShard.part`.
    """

    position: DataPosition
    begins_part: bool

    def __init__(self, documents: ReplicaDocuments, position: DataPosition):
        self._documents = documents
        self._epoch, self._shards = position
        self._open_shards: dict[tuple[int, ...], EpochShard] = {}
        self._parts: dict[tuple[int, ...], int] = {}  # open shard -> part of the document before
        self._current: tuple[int, ...] = ()  # the shard of the current document

    def advance(self) -> None:
        """Go to the next document, at first to the first one, without reading it where its shard can tell.

        Raises:
          UserError: where the replica's own shard of an epoch is empty.
        """
        source, replica, num_replicas = self._documents.source, self._documents.replica, self._documents.num_replicas
        if self._current and not self.position.shards[0].stride:
            self._close(self._current)
        while True:
            if not self._shards:
                self._epoch += 1
                self._shards = (share(self._epoch, replica, num_replicas),)
            position, *rest = self._shards
            # Two positions may be in the same shard (divided once and merged again); each reads it at its own pace.
            start = position.document % position.stride if position.stride else position.document
            key = (position.epoch, position.shard, position.num_shards, position.stride, start)
            if key not in self._open_shards:
                self._open_shards[key] = source.open_shard(
                    position.epoch, position.shard, position.num_shards, position.seek_hint
                )
            shard = self._open_shards[key]
            if shard.has(position.document):
                if position.seek_hint != shard.seek_hint:
                    position = position._replace(seek_hint=shard.seek_hint)
                self.position = DataPosition(self._epoch, (position, *rest))
                self._shards = after_document(self.position.shards)
                part = shard.part(position.document)
                self.begins_part = self._parts.get(key) != part
                self._parts[key], self._current = part, key
                return
            self._close(key)
            own = position[1:3] == share(self._epoch, replica, num_replicas)[1:3]
            if own and position.document == 0:
                raise UserError(
                    f"replica {replica} of {num_replicas} gets no document of {source.name}: "
                    "use fewer replicas or more data"
                )
            self._shards = tuple(rest)

    def read(self) -> Any:
        """Return the current document's record."""
        return self._open_shards[self._current].get(self.position.shards[0].document)

    def _close(self, key: tuple[int, ...]) -> None:
        self._open_shards.pop(key).close()
        self._parts.pop(key, None)
        self._current = ()

    def close(self) -> None:
        for shard in self._open_shards.values():
            shard.close()
        self._open_shards.clear()


def chunks(
    documents: ReplicaDocuments, position: DataPosition, worker: int = 0, num_workers: int = 1
) -> Generator[Chunk]:
    """Yield a replica's documents from `position` on in chunks: those of one worker of several.

    Workers take turns. A turn is a part of the files where reading is the work (`Source.shared_out_in_parts`), else one
    chunk, whose documents every worker finds and one loads.
    """
    source, by_part = documents.source, documents.source.shared_out_in_parts
    turn = 0  # counted over all workers
    is_ahead = False  # the reader has gone to the next chunk's first document
    with closing(DocumentReader(documents, position)) as reader:
        while True:
            mine = turn % num_workers == worker
            positions: list[DataPosition] = []
            records: list[Any] = []
            ends_turn = not by_part
            while len(positions) < source.chunk_size:
                if not is_ahead:
                    reader.advance()
                positions.append(reader.position)
                if mine:
                    records.append(reader.read())
                is_ahead = by_part
                if is_ahead:
                    reader.advance()
                    if reader.begins_part:
                        ends_turn = True
                        break
            turn += ends_turn
            if mine:
                arrays = source.load(records)
                yield {
                    "tokens": np.concatenate(arrays, axis=1),
                    "ends": np.cumsum([array.shape[1] for array in arrays]),
                    "positions": Positions(positions),
                    "ends_turn": ends_turn,
                }


def _chunks_of_workers(documents: ReplicaDocuments, position: DataPosition, num_workers: int) -> Generator[Chunk]:
    """Yield `chunks`, made by worker processes that take turns of unequal lengths."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # Grain reads flags of its own; a command line need not have parsed them
    options = grain.MultiprocessingOptions(num_workers=1, per_worker_buffer_size=_PREFETCHED_CHUNKS)
    workers = []
    try:
        for worker in range(num_workers):
            made = _Made(functools.partial(chunks, documents, position, worker, num_workers))
            # A thread starts the process now: Grain by itself does so when the first chunk is asked for.
            workers.append(_in_thread(made.mp_prefetch(options, worker_init_fn=_init_worker), 1))
            workers[-1].start_prefetch()
        turn = 0
        while True:
            chunk = _next_chunk(workers[turn])
            turn = (turn + chunk["ends_turn"]) % num_workers
            chunk["tokens"] = np.array(chunk["tokens"])  # a copy frees the shared memory
            yield chunk
    finally:
        for worker in workers:
            worker.close()


def _next_chunk(worker: grain.DatasetIterator[Chunk]) -> Chunk:
    """Return the next chunk of a worker; raise `WorkerLostError` where its process has ended."""
    try:
        return next(worker)
    except RuntimeError as error:  # Grain has no class for it
        if (found := re.search(r"terminated unexpectedly with exit code (-?\d+)", str(error))) is None:
            raise
        status = int(found[1])
        reason = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        raise WorkerLostError(
            f"a process that reads data (data.num_workers) {reason}, as where memory is short"
        ) from None


def sequences(
    documents: ReplicaDocuments, position: DataPosition, sequence_length: int, document_mask: bool, num_workers: int
) -> Generator[tuple[HostSequence, DataPosition]]:
    """Yield the sequences from `position` on without end, each with the position after it.

    Args:
      num_workers: number of worker processes that read and tokenize; 0 does it here. The sequences are the same.

    Raises:
      UserError: where a file is damaged, and where an epoch of documents holds no token.
    """
    source = documents.source
    packer = Packer(source.num_columns, sequence_length, document_mask=document_mask)
    made = _chunks_of_workers(documents, position, num_workers) if num_workers else chunks(documents, position)
    with closing(made):
        empty_since = None  # the epoch of the first of consecutive documents without a token
        for chunk in made:
            arrays = np.split(chunk["tokens"], chunk["ends"][:-1], axis=1)
            for array, before in zip(arrays, chunk["positions"].positions, strict=True):
                packer.add(array, before)
                if array.shape[1]:
                    empty_since = None
                elif empty_since is None:
                    empty_since = before.epoch
                elif before.epoch > empty_since + 1:
                    raise UserError(
                        f"the documents of replica {documents.replica} of {documents.num_replicas} hold no token: "
                        f"{source.name} has nothing but empty documents or padding"
                    )
            while packer.full:
                sequence = packer.pop()
                yield sequence, packer.position


class _Made(grain.IterDataset[T]):
    """The elements of a generator, for Grain to prefetch. They carry their positions, so Grain has no state to keep."""

    def __init__(self, make: Callable[[], Generator[T]]):
        super().__init__()
        self._make = make

    def __iter__(self) -> grain.DatasetIterator[T]:
        return _MadeIterator(self._make())


class _MadeIterator(grain.DatasetIterator[T]):
    def __init__(self, elements: Generator[T]):
        super().__init__()
        self._elements = elements

    def __next__(self) -> T:
        return next(self._elements)

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        raise NotImplementedError("begin anew from the position that an element carries")

    def close(self) -> None:
        super().close()
        self._elements.close()


def _in_thread(dataset: grain.IterDataset[T], buffer_size: int) -> grain.DatasetIterator[T]:
    return iter(ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=buffer_size))


def prefetched(make: Callable[[], Generator[T]], buffer_size: int) -> grain.DatasetIterator[T]:
    """Return an iterator over the elements of `make()`, which a thread makes up to `buffer_size` ahead of time."""
    return _in_thread(_Made(make), buffer_size)


def _init_worker(index: int, count: int) -> None:
    # A terminal sends these to all processes; the trainer needs its batches until it has saved. SIGTERM stays, as
    # multiprocessing ends workers by it at the interpreter's end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End a worker whose trainer is killed: nobody takes its chunks any more, and it would wait for that for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
