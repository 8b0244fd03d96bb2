"""Documents of a replica in order, their loading, by worker processes if asked for, and their packing into sequences.

No worker and no thread keeps a position to save: documents carry the positions before them, and sequences the one after
them. So any number of workers continues where any other number stopped.
"""

import atexit
import functools
import itertools
import math
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
from typing import Any, NamedTuple

import numpy as np

from noloco_jax.data.packing import HostSequence, Packer
from noloco_jax.data.positions import DataPosition, after_document, share
from noloco_jax.data.source import EncodeTexts, EpochShard, Source
from noloco_jax.errors import TransientError, UserError, tell

Loaded = Callable[[], list[np.ndarray]]  # waits for documents, int32 (C, n) each


class WorkerLostError(TransientError):
    """A worker process was killed or broke down; another may make its chunks."""


class ReplicaDocuments(NamedTuple):
    """One replica's documents of the source `name`."""

    name: str
    source: Source
    replica: int
    num_replicas: int


def read_records(documents: ReplicaDocuments, position: DataPosition) -> Generator[tuple[Any, DataPosition]]:
    """Yield a replica's records from `position` on, epoch after epoch without end, each with the position before it.

    Raises:
      UserError: where the replica's own shard of an epoch is empty.
    """
    _, source, replica, num_replicas = documents
    epoch, shards = position
    opened: dict[tuple[int, ...], EpochShard] = {}
    try:
        while True:
            if not shards:
                epoch += 1
                shards = (share(epoch, replica, num_replicas),)
            first, *rest = shards
            # Two positions may be in the same shard (divided once and merged again); each reads it at its own pace.
            key = (*first[:3], *((first.document,) if first.is_single else (first.first_turn, first.end_turn)))
            if key not in opened:
                opened[key] = source.open_shard(*first[:3], first.seek_hint)
            record = opened[key].get(first.document)
            if record is not None:
                shards = (first._replace(seek_hint=opened[key].seek_hint), *rest)
                yield record, DataPosition(epoch, shards)
                shards = after_document(shards)
            elif first.document == 0 and first[1:3] == share(epoch, replica, num_replicas)[1:3]:
                raise UserError(
                    f"replica {replica} of {num_replicas} gets no document of {source.name}: "
                    "use fewer replicas or more data"
                )
            else:
                shards = tuple(rest)
            if record is None or first.is_single:
                opened.pop(key).close()
    finally:
        for shard in opened.values():
            shard.close()


def load_documents(source: Source, encode: EncodeTexts, records: Sequence[Any]) -> list[np.ndarray]:
    """Return the tokens of each record of a source: int32 (num_columns, n)."""
    loaded = source.load(records)
    return encode(loaded) if source.num_columns == 1 else loaded


class Loader:
    """Loading of records, of texts by `num_workers` processes, which all replicas and sources of a process share.

    Without workers a record is loaded where it is waited for. Token ids are there once they are read: a process more
    would only copy them.

    Attributes:
      ahead: number of chunks of documents that a replica has on their way.
    """

    def __init__(self, sources: Mapping[str, Source], encode: EncodeTexts, num_workers: int = 0, num_replicas: int = 1):
        self._sources, self._encode, self._num_workers = sources, encode, num_workers
        self._lock = threading.Lock()
        self._pool: ProcessPoolExecutor | None = None
        atexit.register(_close_at_exit, weakref.ref(self))
        self.ahead = max(2, -(-2 * num_workers // max(1, num_replicas * len(sources)))) if num_workers else 1

    def submit(self, name: str, records: Sequence[Any]) -> Loaded:
        """Begin to load records of a source. What it returns waits for their tokens."""
        if not self._num_workers or self._sources[name].num_columns > 1:
            return functools.partial(load_documents, self._sources[name], self._encode, records)
        with self._lock:
            if self._pool is None:
                self._pool = ProcessPoolExecutor(
                    self._num_workers,
                    mp_context=multiprocessing.get_context("spawn"),  # threads of JAX do not survive a fork
                    initializer=_init_worker,
                    initargs=(self._sources, self._encode),
                )
            pool = self._pool
        try:
            loading: Future[list[np.ndarray]] = pool.submit(_load, name, records)
        except BrokenProcessPool as error:
            loading = Future()
            loading.set_exception(error)
        return functools.partial(self._result, pool, loading)

    def _result(self, pool: ProcessPoolExecutor, loading: Future[list[np.ndarray]]) -> list[np.ndarray]:
        """Wait for documents. A pool that lost a process is given up, for a new one to take its place."""
        try:
            return loading.result()
        except BrokenProcessPool:
            error = WorkerLostError("a process that reads data (data.num_workers) was ended, as where memory is short")
            with self._lock:
                if self._pool is pool:
                    self._pool = None
                    tell(f"warning: {error}: reading begins anew after the last batch")
            raise error from None

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)


def _close_at_exit(loader: "weakref.ref[Loader]") -> None:
    if (still_open := loader()) is not None:
        still_open.close()


_of_worker: tuple[Mapping[str, Source], EncodeTexts]  # the sources and their encoder, of a worker process


def _init_worker(sources: Mapping[str, Source], encode: EncodeTexts) -> None:
    # A terminal sends these to all processes; the trainer needs its batches until it has saved. SIGTERM stays, as
    # multiprocessing ends workers by it at the interpreter's end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    threading.Thread(target=_end_with_parent, daemon=True).start()
    global _of_worker
    _of_worker = sources, encode


def _load(name: str, records: Sequence[Any]) -> list[np.ndarray]:
    sources, encode = _of_worker
    return load_documents(sources[name], encode, records)


def _end_with_parent() -> None:
    """End a worker whose trainer is killed: it would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def read_documents(
    documents: ReplicaDocuments, position: DataPosition, loader: Loader, last_epoch: float = math.inf
) -> Generator[tuple[np.ndarray, DataPosition]]:
    """Yield a replica's documents from `position` on through `last_epoch`, each with the position before it."""
    pending: deque[tuple[list[DataPosition], Loaded]] = deque()
    with closing(read_records(documents, position)) as read:
        wanted = itertools.takewhile(lambda record: record[1].epoch <= last_epoch, read)
        while True:
            while len(pending) < loader.ahead and (chunk := [*itertools.islice(wanted, documents.source.chunk_size)]):
                records, positions = map(list, zip(*chunk, strict=True))
                pending.append((positions, loader.submit(documents.name, records)))
            if not pending:
                return
            positions, loaded = pending.popleft()
            yield from zip(loaded(), positions, strict=True)


def sequences(
    documents: ReplicaDocuments,
    position: DataPosition,
    sequence_length: int,
    document_mask: bool,
    loader: Loader,
    last_epoch: float = math.inf,
) -> Generator[tuple[HostSequence, DataPosition]]:
    """Yield the sequences from `position` on through `last_epoch`, each with the position after it.

    The last one is filled up with ignored labels; its position is that before its last document.

    Raises:
      UserError: where a file is damaged, an epoch of documents holds no token, or all of them hold no label to score.
    """
    source = documents.source
    packer = Packer(source.num_columns, sequence_length, document_mask=document_mask)
    with closing(read_documents(documents, position, loader, last_epoch)) as read:
        any_yet = False
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
            position = before
            while packer.full:
                any_yet, sequence = True, packer.pop()
                yield sequence, packer.position
    if (rest := packer.pop_rest()) is not None:
        yield rest, position
    elif not any_yet:
        field = source.options.field
        others = f"another {field}" if field.startswith("--") else source.options.beside("validation_path")
        raise UserError(f"the validation documents of {source.name} hold no token to predict: give {others}")
