"""Training batches: the mixture of sources, prefetching, and the position in the data.

Shapes: B sequences of T tokens.
"""

import atexit
import functools
import itertools
import weakref
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from fractions import Fraction
from typing import Any

from noloco_jax.data.documents import WorkerLostError
from noloco_jax.data.find_files import VERSIONS
from noloco_jax.data.packing import HostBatch, HostSequence, as_batch
from noloco_jax.data.positions import DataPosition, start_position
from noloco_jax.data.source import GOLDEN_STEP
from noloco_jax.errors import UserError

_PREFETCHED_BATCHES = 4
_SPAN = 2**64  # of the points by which a mixture's sources are drawn

# A source's name and a position -> its sequences from there on, each with the position after it.
OpenSequences = Callable[[str, DataPosition], Generator[tuple[HostSequence, DataPosition]]]


class Mixture:
    """A fixed order of sources in which each has its share of the places.

    Place k belongs to the source in whose part of [0, 1) the point k times the golden ratio modulo 1 lies. Each point
    falls into one of the largest gaps that those before it left (Knuth, The Art of Computer Programming, volume 3,
    section 6.4), so that any consecutive places, wherever they begin, have every source in its share but for a few.
    Nothing but k has to be remembered, and the weights may change at any place.
    """

    def __init__(self, weights: Mapping[str, float]):
        total = sum(map(Fraction, weights.values()))
        self.shares = {name: float(Fraction(weight) / total) for name, weight in weights.items()}
        self._names = tuple(weights)
        ends = itertools.accumulate(map(Fraction, weights.values()))
        self._ends = [int(_SPAN * end / total) for end in ends][:-1]

    def source_at(self, place: int) -> str:
        """Return the name of the source of the sequence at `place`, counted from 0."""
        return self._names[bisect_right(self._ends, place * GOLDEN_STEP % _SPAN)]


def _state(drawn: int, by_source: Mapping[str, DataPosition]) -> dict[str, Any]:
    """Return the state after `drawn` sequences, with which the order of the sources goes on, as JSON can hold it."""
    return {"drawn": drawn, "positions": {name: position.to_json() for name, position in by_source.items()}}


def _batches(
    open_sequences: OpenSequences, mixture: Mixture, replica: int, batch_size: int, state: Mapping[str, Any]
) -> Generator[tuple[HostBatch, dict[str, Any]]]:
    """Yield the batches from a state on without end, each with the state after it.

    Replica i stands i places further in the order of sources than replica 0: what all replicas read at a time is then
    a stretch of that order too, and has every source in its share.
    """
    drawn = state["drawn"]
    by_source = {name: DataPosition.from_json(position) for name, position in state["positions"].items()}
    with ExitStack() as stack:
        sources = {name: stack.enter_context(closing(open_sequences(name, start))) for name, start in by_source.items()}
        while True:
            rows = []
            for _ in range(batch_size):
                name = mixture.source_at(replica + drawn)
                row, by_source[name] = next(sources[name])
                rows.append(row)
                drawn += 1
            yield as_batch(rows), _state(drawn, by_source)


_open_streams: "weakref.WeakSet[Stream]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End threads and Grain's iterators while Grain can still do so; at the interpreter's end it cannot."""
    for stream in list(_open_streams):
        stream.close()
        del stream._batches


class Stream(Iterator[HostBatch]):
    """A replica's endless batches, each {"input_ids", "labels"}, and "segment_ids" with a document mask: int32 (B, T).

    A thread of Grain's makes them ahead of time. The state is the position after the batches delivered, whatever has
    been prefetched. It is small and can be written as JSON. A stream of the same configuration that is set to it yields
    bitwise the batches that this one would. After an error the next call meets the same one, or yields its batch if the
    cause is gone.

    Args:
      open_sequences: opens a source at a position.
      mixture: the order of the sources.
      batch_size: sequences of a batch.
      identity: "replica", "num_replicas" and "source", the facts of the data; a state is of use where these agree.
    """

    def __init__(self, open_sequences: OpenSequences, mixture: Mixture, batch_size: int, identity: dict[str, Any]):
        from noloco_jax.data.prefetch import prefetched  # Grain takes a second to import

        replica, num_replicas = identity["replica"], identity["num_replicas"]
        self._identity = identity
        make = functools.partial(_batches, open_sequences, mixture, replica, batch_size)
        start = _state(0, dict.fromkeys(mixture.shares, start_position(replica, num_replicas)))
        self._batches = prefetched(make, start, _PREFETCHED_BATCHES)
        _open_streams.add(self)

    def start(self) -> None:
        """Begin to make batches ahead of time; without it, the first one that is asked for does."""
        self._batches.start_prefetch()

    def __next__(self) -> HostBatch:
        try:
            return self._next()
        except WorkerLostError:
            return self._next()

    def _next(self) -> HostBatch:
        self.start()
        try:
            return next(self._batches)
        except Exception:
            self._batches.set_state(self._batches.get_state())  # the next call begins anew after the last batch
            raise

    @property
    def source(self) -> dict[str, Any]:
        """Facts that identify its data and their tokens, see `RunData.facts`."""
        return self._identity["source"]

    def get_state(self) -> dict[str, Any]:
        return self._identity | self._batches.get_state()

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
        _check_same_data(state["source"], self._identity["source"])
        self._batches.set_state({name: state[name] for name in ("drawn", "positions")})

    def close(self) -> None:
        """End the thread. The stream yields nothing afterwards."""
        self._batches.close()


def _check_same_data(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Raise `UserError` where the facts of a saved position's data differ from these."""
    for name in {**mine, **saved}:
        if name.endswith(VERSIONS) and not (name in saved and name in mine):
            continue  # the data moved between a disk and a server
        if saved.get(name) != mine.get(name):
            raise UserError(
                f"the saved data position is of data with {name} {saved.get(name)!r}, this run's has "
                f"{mine.get(name)!r}: restore the former data and configuration, or start afresh"
            )


class ReplicaStreams(Iterator[dict[int, HostBatch]]):
    """The streams of the replicas that one process reads, side by side: replica -> its next batch.

    Args:
      streams: replica -> stream.
      close_workers: ends the worker processes that the streams share.
    """

    def __init__(self, streams: Mapping[int, Stream], close_workers: Callable[[], None] = lambda: None):
        self.by_replica, self._close_workers = dict(streams), close_workers

    @property
    def source(self) -> dict[str, Any]:
        """Facts that identify the data, the same for all replicas, see `RunData.facts`."""
        return next(iter(self.by_replica.values())).source

    def start(self) -> None:
        """Begin to make batches ahead of time, of all streams at once. An error is raised with the batch it spoils."""
        for stream in self.by_replica.values():
            stream.start()

    def __next__(self) -> dict[int, HostBatch]:
        self.start()  # all make batches while one is waited for
        return {replica: next(stream) for replica, stream in self.by_replica.items()}

    def get_state(self) -> dict[int, dict]:
        """Return replica -> the state of its stream."""
        return {replica: stream.get_state() for replica, stream in self.by_replica.items()}

    def set_state(self, states: Mapping[int, dict]) -> None:
        """Continue from the states of `get_state`; those of other replicas are left out."""
        for replica, stream in self.by_replica.items():
            stream.set_state(states[replica])

    def close(self) -> None:
        """End all threads and worker processes, each of which may be in the middle of a batch."""
        with ThreadPoolExecutor(max(len(self.by_replica), 1)) as threads:
            list(threads.map(Stream.close, self.by_replica.values()))  # waits, and raises what closing raises
        self._close_workers()
