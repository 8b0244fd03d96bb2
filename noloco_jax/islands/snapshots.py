"""Snapshots of an island's weights for merging: taken between two inner steps, and sent during the training."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from noloco_jax.islands.frames import ArraySpec
from noloco_jax.islands.peer_errors import BusyError

ABOUT = "about"  # the action that describes the weights
PROGRESS = "progress"  # the first of the arrays
PROGRESS_SPEC = ArraySpec((2,), np.dtype(np.int64))  # the last round that was ended, the inner steps taken
_WAIT_SECONDS = 3600.0  # callers give up long before; an evaluation or a save may take long


class Snapshots:
    """Exchange point of weight copies between the calls that ask for them and the training, without blocking it.

    One copy is on its way at a time: it costs the host the memory of the weights, and the call takes the whole link.

    Args:
      specs: name -> spec of each array, in the order of `give`.
    """

    def __init__(self, specs: Mapping[str, ArraySpec]):
        self._specs = dict(specs)
        self._changed = threading.Condition()
        self._taken = threading.Lock()
        self._arrays: list[np.ndarray] | None = None
        self._closed = False
        self.wanted = False  # True while a caller waits for `give`
        self.served: set[str] = set()  # islands in whose names copies were taken whole

    def give(self, round: int, step: int, arrays: Sequence[np.ndarray]) -> None:
        """Hand over a copy of the weights after `step` inner steps, in round `round` + 1, which nobody will change.

        An axis of one replica in front of the arrays is dropped.
        """
        with self._changed:
            if self.wanted:
                weights = (x.reshape(spec.shape) for x, spec in zip(arrays, self._specs.values(), strict=True))
                self._arrays = [np.asarray((round, step), np.int64), *weights]
                self.wanted = False
                self._changed.notify_all()

    def state(self, caller: str, request: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the next copy, array by array: the handler of a call for a state.

        Raises `BusyError` where there will be none.
        """
        if not self._taken.acquire(blocking=False):
            raise BusyError("another merge is under way: try again")
        try:
            yield from zip((PROGRESS, *self._specs), self._next(), strict=True)
            self.served.add(caller)
        finally:
            self._taken.release()

    @property
    def is_serving(self) -> bool:
        """True while a caller waits for a copy or receives one."""
        return self._taken.locked()

    def close(self) -> None:
        """End all waiting calls, as the training is over."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _next(self) -> list[np.ndarray]:
        with self._changed:
            self.wanted = not self._closed
            self._changed.wait_for(lambda: self._arrays is not None or self._closed, _WAIT_SECONDS)
            arrays, self._arrays, self.wanted = self._arrays, None, False
        if arrays is None:
            raise BusyError("no weights can be copied now: it is about to stop, or one step takes long")
        return arrays
