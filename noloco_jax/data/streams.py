"""The streams of the replicas that one process reads, side by side."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from noloco_jax.data.packing import HostBatch
from noloco_jax.data.stream import Stream


class ReplicaStreams(Iterator[dict[int, HostBatch]]):
    """Yields replica -> its next batch.

    Args:
      streams: replica -> stream.
    """

    def __init__(self, streams: Mapping[int, Stream]):
        self._streams = dict(streams)

    def start(self) -> None:
        """Begins to make batches ahead of time, of all streams at once. An error is raised with the batch it spoils."""
        for stream in self._streams.values():
            stream.start()

    def __next__(self) -> dict[int, HostBatch]:
        self.start()  # all go on while one is waited for
        return {replica: next(stream) for replica, stream in self._streams.items()}

    def get_state(self) -> dict[int, dict]:
        """Replica -> where its stream stands, after the batches taken so far."""
        return {replica: stream.get_state() for replica, stream in self._streams.items()}

    def set_state(self, states: Mapping[int, dict]) -> None:
        """Continues from the states of `get_state`; those of other replicas are left out."""
        for replica, stream in self._streams.items():
            stream.set_state(states[replica])

    def close(self) -> None:
        """Ends all threads and worker processes, each of which may be in the middle of a batch."""
        with ThreadPoolExecutor(max(len(self._streams), 1)) as threads:
            list(threads.map(Stream.close, self._streams.values()))  # waits, and raises what closing raises
