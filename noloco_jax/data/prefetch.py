"""Elements ahead of time, by Grain's prefetching thread over an iterator whose `get_state` is the position."""

from collections.abc import Callable, Generator
from typing import Any

import grain
from grain.experimental import ThreadPrefetchIterDataset

State = dict[str, Any]
MakeElements = Callable[[State], Generator[tuple[Any, State]]]  # the elements from a state on, each with that after it


def prefetched(make: MakeElements, state: State, buffer_size: int) -> Any:
    """Return an iterator over the elements from `state` on, which a thread makes up to `buffer_size` ahead of time."""
    return iter(ThreadPrefetchIterDataset(_Dataset(make, state), prefetch_buffer_size=buffer_size))


class _Dataset(grain.IterDataset):
    def __init__(self, make: MakeElements, state: State):
        super().__init__()
        self._make, self._state = make, state

    def __iter__(self) -> "_Elements":
        return _Elements(self._make, self._state)


class _Elements(grain.DatasetIterator):
    """A generator of (element, state after it) as an iterator whose `get_state` is that of its last element."""

    def __init__(self, make: MakeElements, state: State):
        super().__init__()
        self._make, self._state = make, state
        self._elements: Generator[tuple[Any, State]] | None = None

    def __next__(self) -> Any:
        if self._elements is None:
            self._elements = self._make(self._state)
        element, self._state = next(self._elements)
        return element

    def get_state(self) -> State:
        return self._state

    def set_state(self, state: State) -> None:
        self.close()
        self._state = state

    def close(self) -> None:
        if self._elements is not None:
            self._elements.close()
            self._elements = None
