"""Batches of this process's replicas, as global arrays on the mesh."""

from collections.abc import Mapping
from typing import Any, Protocol

import jax
import numpy as np

from noloco_jax.spmd.gradients import Batch


class BatchSource(Protocol):
    """One replica's batches: the arrays of a `Batch`, int32 (B, T), and the position after the last one taken."""

    def __next__(self) -> dict[str, np.ndarray]: ...
    def get_state(self) -> dict: ...
    def set_state(self, state: dict) -> None: ...


def local_replicas(batch: Batch) -> list[int]:
    """The replicas of which this process holds at least a part, in ascending order.

    Args:
      batch: shapes and shardings, the replicas on the leading axis.
    """
    spec = batch["input_ids"]
    held = set()
    indices: Any = spec.sharding.addressable_devices_indices_map(spec.shape).values()
    for index in indices:
        held.update(range(*index[0].indices(spec.shape[0])))
    return sorted(held)


def place_batch(parts: Mapping[int, Mapping[str, np.ndarray]], batch: Batch) -> Batch:
    """Puts the replicas' batches on their devices; a replica that spans processes gets its rows from each of them.

    Args:
      parts: replica -> its whole batch, for every replica that this process holds a part of.
      batch: the global shapes and shardings.
    """

    def piece(name: str, index: Any) -> np.ndarray:
        replicas = range(*index[0].indices(batch[name].shape[0]))
        return np.stack([parts[i][name][index[1:]] for i in replicas])

    return {
        name: jax.make_array_from_callback(spec.shape, spec.sharding, lambda index, name=name: piece(name, index))
        for name, spec in batch.items()
    }


class GlobalBatches:
    """Iterates over global batches, from one stream a replica.

    Args:
      streams: replica -> stream, for every replica that this process holds a part of.
      batch: the global shapes and shardings.
    """

    def __init__(self, streams: Mapping[int, BatchSource], batch: Batch):
        self._streams = streams
        self._batch = batch

    def __iter__(self) -> "GlobalBatches":
        return self

    def __next__(self) -> Batch:
        return place_batch({i: next(stream) for i, stream in self._streams.items()}, self._batch)

    def get_state(self) -> dict[int, dict]:
        """Replica -> where its stream stands, after the batches taken so far."""
        return {i: stream.get_state() for i, stream in self._streams.items()}

    def set_state(self, states: Mapping[int, dict]) -> None:
        """Continues from the states of `get_state`."""
        for i, stream in self._streams.items():
            stream.set_state(states[i])
