"""Batches to train on, whose iterator owns the position in the data.

Shapes: B sequences of T tokens.
"""

import atexit
import functools
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from noloco_jax.data.from_config import Mixture, mixture_of, open_sources
from noloco_jax.data.identity import CONTENT_FACTS
from noloco_jax.data.packing import HostBatch, HostSequence
from noloco_jax.data.positions import DataPosition, start_position
from noloco_jax.data.reading import WorkerLostError
from noloco_jax.data.source import Source
from noloco_jax.data.tokenizers import Tokenizer
from noloco_jax.errors import UserError, tell

if TYPE_CHECKING:
    import grain

    from noloco_jax.config import DataConfig

_PREFETCHED_BATCHES = 4
# Facts of a source that checkpoints of earlier versions do not have.
_NOT_ALWAYS_SAVED = (*CONTENT_FACTS, "text column")

# A source's name and a position -> its sequences from there on, each with the position after it.
OpenSequences = Callable[[str, DataPosition], Generator[tuple[HostSequence, DataPosition]]]


class StreamPosition(NamedTuple):
    """The position of a stream in all of its sources.

    Attributes:
      drawn: number of sequences taken; the order of the sources continues from there.
      by_source: name of a source -> the position in it.
    """

    drawn: int
    by_source: Mapping[str, DataPosition]

    def to_json(self) -> dict[str, Any]:
        if list(self.by_source) == ["data"]:
            return self.by_source["data"].to_json()
        positions = {name: position.to_json() for name, position in self.by_source.items()}
        return {"drawn": self.drawn, "positions": positions}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> "StreamPosition":
        if "positions" not in state:
            return cls(0, {"data": DataPosition.from_json(state)})
        positions = {name: DataPosition.from_json(position) for name, position in state["positions"].items()}
        return cls(state["drawn"], positions)


def _batches(
    open_sequences: OpenSequences, mixture: Mixture, replica: int, batch_size: int, position: StreamPosition
) -> Generator[tuple[HostBatch, StreamPosition]]:
    """Yield the batches from a position on without end, each with the position after it.

    Replica i stands i places further in the order of sources than replica 0: what all replicas read at a time is then
    a stretch of that order too, and has every source in its share.
    """
    drawn, by_source = position.drawn, dict(position.by_source)
    with ExitStack() as stack:
        sources = {name: stack.enter_context(closing(open_sequences(name, start))) for name, start in by_source.items()}
        while True:
            rows = []
            for _ in range(batch_size):
                name = mixture.source_at(replica + drawn)
                row, by_source[name] = next(sources[name])
                rows.append(row)
                drawn += 1
            batch = {key: np.stack([row[key] for row in rows]) for key in rows[0]}
            yield batch, StreamPosition(drawn, dict(by_source))


_closed_at_exit: "weakref.WeakSet[Stream]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End threads and worker processes while Grain can still do so; at the interpreter's end it cannot."""
    for stream in list(_closed_at_exit):
        stream.close()


class Stream(Iterator[HostBatch]):
    """A replica's endless batches, each {"input_ids", "labels"}, and "segment_ids" with a document mask: int32 (B, T).

    The state is the position after the batches delivered, whatever has been prefetched. It is small and can be written
    as JSON. A stream of the same configuration that is set to it yields bitwise the batches that this one would. After
    an error the next call meets the same one, or yields its batch if the cause is gone.

    Args:
      open_sequences: opens a source at a position.
      mixture: the order of the sources.
      batch_size: sequences of a batch.
      identity: "replica", "num_replicas" and "source", the facts of the data; a state is of use where these agree.
    """

    def __init__(self, open_sequences: OpenSequences, mixture: Mixture, batch_size: int, identity: dict[str, Any]):
        replica, num_replicas = identity["replica"], identity["num_replicas"]
        self._identity = identity
        self._make = functools.partial(_batches, open_sequences, mixture, replica, batch_size)
        self._position = StreamPosition(0, dict.fromkeys(mixture.shares, start_position(replica, num_replicas)))
        self._prefetched: grain.DatasetIterator[tuple[HostBatch, StreamPosition]] | None = None
        self._is_closed = False
        _closed_at_exit.add(self)

    def start(self) -> None:
        """Begin to make batches ahead of time; without it, the first one that is asked for does."""
        from noloco_jax.data.prefetch import prefetched  # Grain takes a second to import.

        self._check_open()
        if self._prefetched is None:
            self._prefetched = prefetched(functools.partial(self._make, self._position), _PREFETCHED_BATCHES)
        self._prefetched.start_prefetch()

    def __next__(self) -> HostBatch:
        try:
            return self._next()
        except WorkerLostError as error:
            tell(f"warning: {error}: reading begins anew after the last batch")
            return self._next()

    def _next(self) -> HostBatch:
        self.start()
        assert self._prefetched is not None
        try:
            batch, self._position = next(self._prefetched)
        except Exception:
            self._stop()  # the next call begins anew from the position
            raise
        return batch

    @property
    def source(self) -> dict[str, Any]:
        """Facts that tell its data and their tokens from others."""
        return self._identity["source"]

    def get_state(self) -> dict[str, Any]:
        return self._identity | self._position.to_json()

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a `get_state` of the same replica, or from a `redistribute`d one.

        Raises:
          UserError: for the state of another replica, number of replicas or data set.
        """
        if state["num_replicas"] != self._identity["num_replicas"]:
            raise UserError(
                f"num_replicas={self._identity['num_replicas']}, but the saved data position is one of "
                f"{state['num_replicas']} replicas: redistribute the positions, or restore the number"
            )
        if state["replica"] != self._identity["replica"]:
            raise UserError(
                f"the data position of replica {state['replica']} was given to replica {self._identity['replica']}: "
                "give each replica its own"
            )
        saved, mine = state["source"], self._identity["source"]
        for name in mine | saved:
            if name not in saved and name.endswith(_NOT_ALWAYS_SAVED):
                continue
            if name not in mine and name.endswith(CONTENT_FACTS):
                continue
            is_text = mine.get("kind") == saved.get("kind") == "text"
            if is_text and name == "shuffle_buffer" and min(saved[name], mine[name]) > 1:
                continue  # its documents are shuffled whole, whatever the size
            if saved.get(name) != mine.get(name):
                raise UserError(
                    f"the saved data position is of data with {name} {saved.get(name)!r}, this run's has "
                    f"{mine.get(name)!r}: restore the former data and configuration, or start afresh"
                )
        self._check_open()
        self._stop()
        self._position = StreamPosition.from_json(state)

    def close(self) -> None:
        """End the thread and the worker processes. The stream yields nothing afterwards."""
        self._is_closed = True
        self._stop()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError("the stream is closed")

    def _stop(self) -> None:
        if self._prefetched is not None:
            self._prefetched.close()
            self._prefetched = None


class ReplicaStreams(Iterator[dict[int, HostBatch]]):
    """The streams of the replicas that one process reads, side by side: replica -> its next batch.

    Args:
      streams: replica -> stream.
    """

    def __init__(self, streams: Mapping[int, Stream]):
        self._streams = dict(streams)

    @property
    def source(self) -> dict[str, Any]:
        """Facts that tell their data from others, the same for all."""
        return next(iter(self._streams.values())).source

    def start(self) -> None:
        """Begin to make batches ahead of time, of all streams at once. An error is raised with the batch it spoils."""
        for stream in self._streams.values():
            stream.start()

    def __next__(self) -> dict[int, HostBatch]:
        self.start()  # all make batches while one is waited for
        return {replica: next(stream) for replica, stream in self._streams.items()}

    def get_state(self) -> dict[int, dict]:
        """Return replica -> the state of its stream."""
        return {replica: stream.get_state() for replica, stream in self._streams.items()}

    def set_state(self, states: Mapping[int, dict]) -> None:
        """Continue from the states of `get_state`; those of other replicas are left out."""
        for replica, stream in self._streams.items():
            stream.set_state(states[replica])

    def close(self) -> None:
        """End all threads and worker processes, each of which may be in the middle of a batch."""
        with ThreadPoolExecutor(max(len(self._streams), 1)) as threads:
            list(threads.map(Stream.close, self._streams.values()))  # waits, and raises what closing raises


def train_stream(
    config: "DataConfig",
    tokenizer: Tokenizer | None,
    *,
    replica: int,
    num_replicas: int,
    seed: int,
    vocab_size: int | None = None,
) -> Stream:
    """Open the training batches of one replica of `num_replicas`: epoch after epoch of its share of the documents.

    A replica of a larger number joined later, and reads all documents in an order of its own: see `positions.share`.

    The batches are a function of the arguments alone. In every epoch each document goes to exactly one replica, in an
    order drawn from `seed` and the epoch. Replicas with unequal shares begin the next epoch at different steps.

    A sequence is of one source. Of a mixture, each source has its share of the sequences in the order of `Mixture`,
    whatever the lengths of its documents, and comes to the end of its epochs at its own pace.

    With `config.num_workers` 0 a thread prefetches the batches; otherwise as many processes read and tokenize for this
    stream, at least one for each source. The batches are the same.

    Args:
      tokenizer: may be None for data that are tokens already, see `needs_tokenizer`.
      vocab_size: the model's, which the ids in Parquet files must fit; unchecked if None.

    Raises:
      UserError: for data that are missing or of another form, and for a replica that would get no document. The stream
        itself raises it where it meets a damaged file.
    """
    from noloco_jax.data.prefetch import ReplicaDocuments, sequences  # Grain takes a second to import.

    sources = open_sources(config, tokenizer, validation=False, seed=seed, vocab_size=vocab_size)
    if replica < 0:
        raise UserError(f"replica {replica} of {num_replicas}: replicas are numbered from 0")
    for source in sources.values():
        source.check_replicas(num_replicas)
    mixture = mixture_of(config)

    def open_sequences(name: str, position: DataPosition) -> Generator[tuple[HostSequence, DataPosition]]:
        documents = ReplicaDocuments(sources[name], replica, num_replicas)
        # The sequences do not depend on the number of workers.
        workers = max(1, round(config.num_workers * mixture.shares[name])) if config.num_workers else 0
        return sequences(documents, position, config.sequence_length, config.document_mask, workers)

    identity = {
        "replica": replica,
        "num_replicas": num_replicas,
        "source": _facts(config, tokenizer, sources, seed),
    }
    return Stream(open_sequences, mixture, config.batch_size, identity)


def data_facts(
    config: "DataConfig", tokenizer: Tokenizer | None, *, seed: int, vocab_size: int | None = None
) -> dict[str, Any]:
    """Return the facts that tell the training data of a configuration, and their tokens, from others."""
    return _facts(
        config, tokenizer, open_sources(config, tokenizer, validation=False, seed=seed, vocab_size=vocab_size), seed
    )


def _facts(
    config: "DataConfig", tokenizer: Tokenizer | None, sources: Mapping[str, Source], seed: int
) -> dict[str, Any]:
    return _fingerprint(sources) | _token_facts(config, tokenizer, sources) | {"seed": seed}


def _fingerprint(sources: Mapping[str, Source]) -> dict[str, Any]:
    """Return the facts on the files; those of a mixture with the source in front of the name."""
    if list(sources) == ["data"]:
        return dict(sources["data"].fingerprint)
    facts = {f"{group} {name}": fact for group, source in sources.items() for name, fact in source.fingerprint.items()}
    return {"kind": "mixture"} | facts


def _token_facts(config: "DataConfig", tokenizer: Tokenizer | None, sources: Mapping[str, Source]) -> dict[str, Any]:
    """Return what a position, an offset into a replica's tokens, depends on besides files and seed."""
    known: dict[str, Any] = {"shuffle_buffer": config.shuffle_buffer}
    if tokenizer is not None and any(source.num_columns == 1 for source in sources.values()):
        known |= {"tokenizer": tokenizer.fingerprint, "add_bos": config.add_bos, "add_eos": config.add_eos}
    return known
