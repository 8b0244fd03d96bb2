"""Outer steps of an island's training: local steps, and the corrections that are applied later.

An island may be several processes. The first one has the link with the other islands, so it alone knows what has
arrived and who waits for weights. It broadcasts what it decides before every inner step, and all processes run the
programs that follow from it, in one order.
"""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from noloco_jax.cluster.processes import OneProcess, Processes
from noloco_jax.islands.catch_up import CaughtUp
from noloco_jax.islands.network import Correction, NetworkThread
from noloco_jax.islands.node import Node
from noloco_jax.islands.payload import Message
from noloco_jax.islands.programs import LocalPrograms
from noloco_jax.spmd.first_process import from_first_process, to_first_process
from noloco_jax.spmd.inner import at_step
from noloco_jax.spmd.programs import TrainState

PyTree = Any
WARM_UP_STEPS = 50  # inner steps after catching up in which the rate rises, as moments may begin anew
_ASK_EVERY_SECONDS, _ASK_SECONDS = 10.0, 2.0  # interval of asking peers if they have finished; timeout of an answer
_IN_FLIGHT = 2  # inner steps on the device while a correction may arrive: more would delay it, fewer idle the device


class IslandSteps:
    """Outer steps of an island.

    Args:
      link: the link with the other islands; None in all of the island's processes but the first.
      local: compiled programs of local steps and corrections.
      place: a peer's weights, which the first process has -> the state on its devices; what was not sent begins anew.
      tokens_of_round: maps a step to the tokens of the fragment round that ends there.
      keeps_pace: True if an inner step may stand for several steps of the schedule, see `pace.py`.
      processes: the island's processes.

    Attributes:
      seconds_exposed: seconds so far that training stood still for exchanges: copies from and to the devices, pauses
        for slower islands, and `settle`.
      seconds_paused: seconds of pauses for slower islands.
      is_removed: True once the island has ended its last round as a member, as of the last `apply_arrived`.
    """

    def __init__(
        self,
        link: NetworkThread | None,
        local: LocalPrograms,
        place: Callable[[CaughtUp], TrainState],
        tokens_of_round: Callable[[int], int],
        *,
        keeps_pace: bool = False,
        processes: Processes | None = None,
    ):
        self.link, self.processes = link, processes or OneProcess()
        self._local, self._place = local, place
        self._tokens_of_round, self._keeps_pace = tokens_of_round, keeps_pace
        self.seconds_exposed = self.seconds_paused = 0.0
        self.is_removed = False
        self._worth = 0.0  # inner steps since the last outer step, each as the share of the rate that it was taken with
        self._scheduled = 0  # the steps of the schedule that they stand for
        self._arrived: list[Correction | CaughtUp] = []  # of the last broadcast, in the first process
        self._cold = 0  # inner steps left with a lower rate
        self._before: PyTree = None  # weights before the inner step, while the rate is lower
        self._marks: deque[jax.Array] = deque()  # a value of the weights before each of the last inner steps

    def apply_arrived(self, state: TrainState, step: int) -> tuple[TrainState, int]:
        """Apply what has arrived; return the state and its inner steps, other ones where it is a peer's.

        Copies of the state go to peers and callers that wait for them.
        """
        decided = self.processes.broadcast(lambda: self._decide(state))
        arrivals, wanted, self.is_removed = decided
        state, step = self._apply(arrivals, state, step)
        if wanted:
            self._give(state, step, wanted)
        return state, step

    def advance(self, state: TrainState, step: int, max_stride: int) -> tuple[TrainState, int]:
        """Prepare an inner step: return the state to take it from, and the steps of the schedule that it stands for.

        The learning rate will be that of the last step that it stands for.

        Args:
          state: the state after inner step `step`.
          step: the step of the schedule.
          max_stride: the largest stride.
        """
        self._worth += 1
        self._scheduled += 1
        stride = 1 if self.link is None else self.link.stride(max_stride)
        self._before = jax.tree.map(_copy, state.params) if self._cold else None
        if not self._keeps_pace:
            return state, 1
        stride = self.processes.broadcast(lambda: stride)
        self._scheduled += stride - 1
        return state._replace(inner=at_step(state.inner, step + stride)), stride

    def warm_up(self, state: TrainState) -> TrainState:
        """Shorten the inner step that was taken since `advance`, for some steps after catching up.

        Every optimizer scales its update by the rate at last, so that a part of the step is the step of a part of the
        rate. It takes a copy of the weights for as long. A shorter step weighs less in the exchange of its round: an
        island that warms up falls behind what all have learned, and is to follow the others rather than hold them back.
        """
        if self._before is None:
            return state
        share = np.float32(1 - self._cold / (WARM_UP_STEPS + 1))
        params = jax.tree.map(lambda before, after: _between(before, after, share), self._before, state.params)
        self._worth -= 1 - float(share)
        self._before, self._cold = None, self._cold - 1
        return state._replace(params=params)

    def outer_step(self, state: TrainState, step: int, count: int) -> TrainState:
        """Take `count` outer steps after inner step `step`, and start the exchange of their messages."""
        share = self._worth / self._scheduled if self._scheduled else 1.0
        self._worth, self._scheduled = 0.0, 0
        tokens = max(int(share * self._tokens_of_round(step)), 1)
        for _ in range(count):
            assert state.outer is not None
            number = int(state.outer.num_outer_steps)
            params, outer, sent, norm = self._local.step(state.params, state.outer)
            state = state._replace(params=params, outer=outer)
            arrays = self._copies([*jax.tree.leaves(sent), norm])
            if self.link is not None:
                *message, size = arrays
                self.link.round_ended(number, step, Message(number, message), float(size), tokens)
        return state

    def serve(self, state: TrainState, step: int) -> None:
        """Give copies of the state to peers and tools that wait for them."""
        link = self.link
        if wanted := self.processes.broadcast(lambda: list(link.copies.wanted) if link is not None else []):
            self._give(state, step, wanted)

    def settle(self, state: TrainState, seconds: float) -> TrainState:
        """Wait for the last exchanges and apply them; a donor's state comes too late now."""
        assert state.outer is not None
        with self._exposed():
            if self.link is not None:
                self.link.settle(int(state.outer.num_outer_steps) - 1, seconds)
        return self.between_steps(state, is_last=True)[0]

    def between_steps(self, state: TrainState, *, is_last: bool = False) -> tuple[TrainState, dict[str, Any] | None]:
        """Return the state with everything applied, and the protocol's state to save with it.

        The latter is None if a peer's state is about to replace this one, which none does after the last step.
        """
        arrivals, saved = self.processes.broadcast(lambda: self._take_all(is_last))
        if saved is None:
            return state, None
        state, _ = self._apply(arrivals, state, 0)
        if self._before is not None:  # else `warm_up` would shorten the corrections, too
            self._before = jax.tree.map(_copy, state.params)
        return state, saved

    def serve_until(
        self,
        state: TrainState,
        step: int,
        seconds: float,
        is_stopping: Callable[[], bool],
        awaited: Callable[[Node], Sequence[str]],
    ) -> None:
        """Serve the weights until nobody fetches them and no peer is `awaited`; up to twice as long while one does."""
        started, asked = time.monotonic(), -math.inf

        def may_leave() -> bool:
            nonlocal asked
            assert self.link is not None
            names, now = awaited(self.link.node), time.monotonic()
            if names and now - asked >= _ASK_EVERY_SECONDS:  # what a peer told may have been lost
                asked = now
                self.link.ask(names, _ASK_SECONDS)
            is_over = now - started >= (2 * seconds if self.link.is_giving else seconds)
            return is_over or not (names or self.link.is_giving)

        while not is_stopping() and not self.processes.broadcast(may_leave):
            self.serve(state, step)
            time.sleep(0.1)

    def caught_up(self, item: CaughtUp) -> tuple[TrainState, int]:
        """Place a received state on the devices; return it and its number of inner steps."""
        self._worth, self._scheduled = 0.0, 0
        self._cold = WARM_UP_STEPS
        self._marks.clear()
        return self._place(item), item.step

    def _decide(self, state: TrainState) -> Sequence[Any]:
        """Pause for slower islands.

        Returns:
          What has arrived, the arrays of the state that others wait for, and whether the island was removed.
        """
        assert self.link is not None
        if pause := self.link.pace.pause():
            jax.block_until_ready(state.params)
            with self._exposed():
                time.sleep(pause)
            self.seconds_paused += pause
        elif isinstance(first := jax.tree.leaves(state.params)[0], jax.Array) and self.link.is_exchanging:
            # A correction enters behind the steps that are queued on the device: keep these few.
            # Of this process's own part of an array: a program of all processes would wait for the others.
            self._marks.append(_mark(first.addressable_data(0)))
            while len(self._marks) > _IN_FLIGHT:
                jax.block_until_ready(self._marks.popleft())
        return self._announced(self.link.take()), list(self.link.copies.wanted), self.link.is_removed

    def _take_all(self, is_last: bool) -> Sequence[Any]:
        """Return everything that has arrived, and the protocol's state; None in its place if this state is replaced."""
        assert self.link is not None
        items, saved = self.link.take_all(is_last)
        return self._announced(items), saved

    def _announced(self, items: list[Correction | CaughtUp]) -> list[list[Any]]:
        """Keep what has arrived for `_apply`; return how to announce it.

        A correction is announced by its round, a state by its round and its inner steps.
        """
        self._arrived = items
        return [[item.round, item.step] if isinstance(item, CaughtUp) else [item.round] for item in items]

    def _apply(self, arrivals: Sequence[Sequence[Any]], state: TrainState, step: int) -> tuple[TrainState, int]:
        """Apply what the first process has announced, and all processes place."""
        items, self._arrived = self._arrived or [None] * len(arrivals), []
        for (round, *position), item in zip(arrivals, items, strict=True):
            with self._exposed():
                if position:
                    caught_up = item if isinstance(item, CaughtUp) else CaughtUp(round, position[0], {})
                    state, step = self.caught_up(caught_up)
                else:
                    assert item is None or isinstance(item, Correction)
                    state = self._corrected(state, round, item.arrays.result() if item is not None else ())
        return state, step

    def _corrected(self, state: TrainState, round: int, arrays: Sequence[np.ndarray]) -> TrainState:
        likes, structure = jax.tree.flatten(self._local.correction)
        correction = structure.unflatten(from_first_process(arrays, likes))
        params, outer = self._local.apply(state.params, state.outer, correction, np.int32(round))
        return state._replace(params=params, outer=outer)

    def _give(self, state: TrainState, step: int, numbers: Sequence[int]) -> None:
        if state.outer is None:
            return
        leaves = jax.tree.leaves(state)
        copies = self._copies([leaves[number] for number in numbers])
        if self.link is not None:
            round = int(state.outer.num_outer_steps) - 1
            self.link.copies.give(dict(zip(numbers, copies, strict=True)), round, step)

    def _copies(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        """Copy all arrays to the first process's host, once they are computed; nobody will change the copies."""
        jax.block_until_ready(arrays)
        with self._exposed():
            return to_first_process(arrays)

    @contextlib.contextmanager
    def _exposed(self) -> Iterator[None]:
        """Count the seconds of the body as exposed."""
        started = time.perf_counter()
        yield
        self.seconds_exposed += time.perf_counter() - started


@jax.jit
def _mark(x: jax.Array) -> jax.Array:
    """Return a value that is there once `x` is."""
    return x.ravel()[0]


def _copy(x: Any) -> Any:
    return jnp.array(x, copy=True) if isinstance(x, jax.Array) else np.array(x)


def _between(before: Any, after: Any, share: np.float32) -> Any:
    """Return the point that far on the way between two arrays, in their dtype."""
    if not jnp.issubdtype(after.dtype, jnp.floating):
        return after
    start = before.astype(np.promote_types(np.float32, after.dtype))
    return (start + share * (after - start)).astype(after.dtype)
