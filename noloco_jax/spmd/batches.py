"""Batches of this process's replicas, as global arrays on the mesh."""

from collections.abc import Mapping
from typing import Any, Protocol

import jax
import numpy as np

from noloco_jax.spmd.gradients import Batch
from noloco_jax.spmd.programs import Programs
from noloco_jax.spmd.shared_batch import PartPlacer

HostBatches = Mapping[int, Mapping[str, np.ndarray]]  # replica -> `input_ids` and `labels` int32 (B, T)


class BatchSource(Protocol):
    """Iterator over batches of the replicas that this process reads, with the stream positions after the last one."""

    def __next__(self) -> HostBatches: ...
    def get_state(self) -> dict[int, dict]: ...


def place_batch(parts: HostBatches, batch: Batch) -> Batch:
    """Put the replicas' batches on their devices; a replica that spans processes gets its rows from each of them.

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
    """Iterator over global batches. If replicas span processes, every process must take each batch.

    Args:
      source: batches of the replicas that this process reads, see `replicas_read_here`.
      programs: programs of the run.
    """

    def __init__(self, source: BatchSource, programs: Programs):
        self._source = source
        self._programs = programs
        self._place_parts = None if programs.share_batch is None else PartPlacer(programs.parts, tuple(programs.batch))

    def __iter__(self) -> "GlobalBatches":
        return self

    def __next__(self) -> Batch:
        read = next(self._source)
        if self._programs.share_batch is None or self._place_parts is None:
            return place_batch(read, self._programs.batch)
        return self._programs.share_batch(self._place_parts(read))

    def get_state(self) -> dict[int, dict]:
        """Return replica -> position of its stream after the batches taken so far, for the replicas read here."""
        return self._source.get_state()
