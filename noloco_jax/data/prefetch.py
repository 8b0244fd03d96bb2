"""Documents of a replica in order, packed into sequences; loading by worker processes; batches ahead of time.

No worker and no thread keeps a position to save: documents carry the positions before them, and sequences the one after
them. So any number of workers continues where any other number stopped.
"""

import atexit
import functools
import multiprocessing
import os
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from typing import Any, NamedTuple, TypeVar

import grain
import numpy as np
from grain.experimental import ThreadPrefetchIterDataset

from noloco_jax.data.packing import HostSequence, Packer
from noloco_jax.data.positions import DataPosition, after_document, share
from noloco_jax.data.reading import WorkerLostError
from noloco_jax.data.source import EncodeTexts, EpochShard, Source, load_documents
from noloco_jax.errors import UserError, tell

T = TypeVar("T")
Loaded = Callable[[], list[np.ndarray]]  # waits for documents, int32 (C, n) each


class ReplicaDocuments(NamedTuple):
    """One replica's documents of the source `name`."""

    name: str
    source: Source
    replica: int
    num_replicas: int


class DocumentReader:
    """Walk through a replica's documents from a position on, epoch after epoch without end.

    Attributes:
      position: the one before the current document.
    """

    position: DataPosition

    def __init__(self, documents: ReplicaDocuments, position: DataPosition):
        self._documents = documents
        self._epoch, self._shards = position
        self._open_shards: dict[tuple[int, ...], EpochShard] = {}
        self._current: tuple[int, ...] = ()  # the shard of the current document

    def advance(self) -> None:
        """Go to the next document, at first to the first one, without reading it where its shard can tell.

        Raises:
          UserError: where the replica's own shard of an epoch is empty.
        """
        _, source, replica, num_replicas = self._documents
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
                self._current = key
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
        self._current = ()

    def close(self) -> None:
        for shard in self._open_shards.values():
            shard.close()
        self._open_shards.clear()


class Loader:
    """Loading of records, where it is asked for.

    Attributes:
      ahead: number of chunks of documents that a replica has on their way.
    """

    ahead = 1

    def __init__(self, sources: Mapping[str, Source], encode: EncodeTexts):
        self._sources, self._encode = sources, encode

    def load(self, name: str, records: Sequence[Any]) -> list[np.ndarray]:
        """Return the tokens of each record of a source."""
        return load_documents(self._sources[name], self._encode, records)

    def submit(self, name: str, records: Sequence[Any]) -> Loaded:
        """Begin to load records of a source."""
        return functools.partial(self.load, name, records)

    def close(self) -> None:
        pass


class Workers(Loader):
    """Loading of texts by `num_workers` processes, shared by all replicas and sources that a process reads.

    Token ids are there once they are read: a process more would only copy them.
    """

    def __init__(self, sources: Mapping[str, Source], encode: EncodeTexts, num_workers: int, num_replicas: int):
        super().__init__(sources, encode)
        self._num_workers, self._lock = num_workers, threading.Lock()
        self._pool: ProcessPoolExecutor | None = None
        atexit.register(_close_at_exit, weakref.ref(self))
        self.ahead = max(2, -(-2 * num_workers // max(1, num_replicas * len(sources))))

    def submit(self, name: str, records: Sequence[Any]) -> Loaded:
        if self._sources[name].num_columns > 1:
            return super().submit(name, records)
        with self._lock:
            if self._pool is None:
                self._pool = ProcessPoolExecutor(
                    self._num_workers,
                    mp_context=multiprocessing.get_context("spawn"),  # threads of JAX do not survive a fork
                    initializer=_init_worker,
                    initargs=(Loader(self._sources, self._encode),),
                )
            pool = self._pool
        try:
            return functools.partial(self._result, pool, pool.submit(_load, name, records))
        except BrokenProcessPool:
            raise self._lost(pool) from None

    def _result(self, pool: ProcessPoolExecutor, loading: Future[list[np.ndarray]]) -> list[np.ndarray]:
        try:
            return loading.result()
        except BrokenProcessPool:
            raise self._lost(pool) from None

    def _lost(self, pool: ProcessPoolExecutor) -> WorkerLostError:
        """Give up a pool that lost a process, for a new one to take its place, and tell it once."""
        error = WorkerLostError("a process that reads data (data.num_workers) was ended, as where memory is short")
        with self._lock:
            if self._pool is pool:
                self._pool = None
                tell(f"warning: {error}: reading begins anew after the last batch")
        return error

    def close(self) -> None:
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)


def _close_at_exit(workers: "weakref.ref[Workers]") -> None:
    if (open_ones := workers()) is not None:
        open_ones.close()


_loader: Loader  # of a worker process


def _init_worker(loader: Loader) -> None:
    # A terminal sends these to all processes; the trainer needs its batches until it has saved. SIGTERM stays, as
    # multiprocessing ends workers by it at the interpreter's end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    threading.Thread(target=_end_with_parent, daemon=True).start()
    global _loader
    _loader = loader


def _load(name: str, records: Sequence[Any]) -> list[np.ndarray]:
    return _loader.load(name, records)


def _end_with_parent() -> None:
    """End a worker whose trainer is killed: it would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def read_documents(
    documents: ReplicaDocuments, position: DataPosition, loader: Loader
) -> Generator[tuple[np.ndarray, DataPosition]]:
    """Yield a replica's documents from `position` on without end, each with the position before it.

    An error in a document that is read ahead is raised behind the documents in front of it.
    """
    pending: deque[tuple[list[DataPosition], Loaded]] = deque()
    failed: Exception | None = None
    with closing(DocumentReader(documents, position)) as reader:
        while True:
            while failed is None and len(pending) < loader.ahead:
                positions, records = [], []
                try:
                    for _ in range(documents.source.chunk_size):
                        reader.advance()
                        records.append(reader.read())
                        positions.append(reader.position)
                except Exception as error:
                    failed = error
                if positions:
                    pending.append((positions, loader.submit(documents.name, records)))
            if not pending:
                assert failed is not None
                raise failed
            positions, loaded = pending.popleft()
            yield from zip(loaded(), positions, strict=True)


def sequences(
    documents: ReplicaDocuments, position: DataPosition, sequence_length: int, document_mask: bool, loader: Loader
) -> Generator[tuple[HostSequence, DataPosition]]:
    """Yield the sequences from `position` on without end, each with the position after it.

    Raises:
      UserError: where a file is damaged, and where an epoch of documents holds no token.
    """
    source = documents.source
    packer = Packer(source.num_columns, sequence_length, document_mask=document_mask)
    with closing(read_documents(documents, position, loader)) as read:
        empty_since = None  # the epoch of the first of consecutive documents without a token
        for tokens, before in read:
            packer.add(tokens, before)
            if tokens.shape[1]:
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


class StatefulElements(grain.DatasetIterator[T]):
    """A generator of (element, state after it) as an iterator whose `get_state` is that of its last element."""

    def __init__(self, make: Callable[[dict[str, Any]], Generator[tuple[T, dict[str, Any]]]], state: dict[str, Any]):
        super().__init__()
        self._make, self._state = make, state
        self._elements: Generator[tuple[T, dict[str, Any]]] | None = None

    def __next__(self) -> T:
        if self._elements is None:
            self._elements = self._make(self._state)
        element, self._state = next(self._elements)
        return element

    def get_state(self) -> dict[str, Any]:
        return self._state

    def set_state(self, state: dict[str, Any]) -> None:
        self.close()
        self._state = state

    def close(self) -> None:
        if self._elements is not None:
            self._elements.close()
            self._elements = None


class _Dataset(grain.IterDataset[T]):
    def __init__(self, make: Callable[[], grain.DatasetIterator[T]]):
        super().__init__()
        self._make = make

    def __iter__(self) -> grain.DatasetIterator[T]:
        return self._make()


def prefetched(make: Callable[[], grain.DatasetIterator[T]], buffer_size: int) -> Any:
    """Return `make()` as an iterator whose elements a thread makes up to `buffer_size` ahead of time."""
    return iter(ThreadPrefetchIterDataset(_Dataset(make), prefetch_buffer_size=buffer_size))
