"""Batches whose sequences come from several sources, each with its own position."""

from collections.abc import Mapping
from typing import Any

import grain
import numpy as np

from noloco_jax.data.mixture import Mixture
from noloco_jax.data.packing import HostBatch


class _MixedIterator(grain.DatasetIterator[HostBatch]):
    """Endless batches; the state has the sequences drawn so far and every source's position.

    Replica i stands i places further in the order of sources than replica 0: what all replicas read at a time is then
    a stretch of that order too, and has every source in its share.
    """

    def __init__(
        self,
        sequences: Mapping[str, grain.DatasetIterator[HostBatch]],
        mixture: Mixture,
        replica: int,
        batch_size: int,
    ):
        super().__init__()
        self._sequences, self._mixture = sequences, mixture
        self._replica, self._batch_size = replica, batch_size
        self._drawn = 0

    def __next__(self) -> HostBatch:
        before = self.get_state()
        try:
            batch = [self._next_sequence() for _ in range(self._batch_size)]
        except BaseException:
            self.set_state(before)  # so that the next call meets the same error again
            raise
        return {key: np.concatenate([sequence[key] for sequence in batch]) for key in batch[0]}

    def _next_sequence(self) -> HostBatch:
        sequence = next(self._sequences[self._mixture.source_at(self._replica + self._drawn)])
        self._drawn += 1
        return sequence

    def get_state(self) -> dict[str, Any]:
        positions = {name: sequences.get_state() for name, sequences in self._sequences.items()}
        return {"drawn": self._drawn, "positions": positions}

    def set_state(self, state: dict[str, Any]) -> None:
        self._drawn = state["drawn"]
        for name, sequences in self._sequences.items():
            sequences.set_state(state["positions"][name])

    def close(self) -> None:
        super().close()
        for sequences in self._sequences.values():
            sequences.close()


class MixedDataset(grain.IterDataset[HostBatch]):
    """A replica's endless batches of `batch_size` sequences from `sequences`, which yield one at a time."""

    def __init__(
        self,
        sequences: Mapping[str, grain.IterDataset[HostBatch]],
        mixture: Mixture,
        replica: int,
        batch_size: int,
    ):
        super().__init__()
        self._sequences, self._arguments = sequences, (mixture, replica, batch_size)

    def __iter__(self) -> grain.DatasetIterator[HostBatch]:
        return _MixedIterator({name: iter(each) for name, each in self._sequences.items()}, *self._arguments)
