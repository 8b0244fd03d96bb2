"""Outer steps of an island's training: solo steps, and the corrections that are applied later.

An island may be several processes. The first one has the agent, so it alone knows what has arrived and who waits for
weights. It broadcasts what it decides before every inner step, and all processes run the programs that follow from it,
in one order.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from noloco_jax.cluster.processes import OneProcess, Processes
from noloco_jax.config import ModelConfig
from noloco_jax.islands.agent import Agent, Correction, Healed
from noloco_jax.islands.frames import ArraySpec
from noloco_jax.model.kind import param_shapes
from noloco_jax.spmd.first_process import from_first_process, to_first_process
from noloco_jax.spmd.inner import at_step
from noloco_jax.spmd.programs import TrainState
from noloco_jax.spmd.solo import SoloPrograms

PyTree = Any
_ASK_EVERY_SECONDS, _ASK_SECONDS = 10.0, 2.0  # interval of asking peers if they have finished; timeout of an answer
WARM_UP_STEPS = 50  # inner steps after catching up with fresh moments, in which the rate rises
_AT_ONCE_SECONDS = 600.0  # limit of `at_once`, which is for comparisons with other runs


def weight_specs(model: ModelConfig) -> dict[str, ArraySpec]:
    """Return the specs of weights sent for merging: name -> spec, in the order of the parameters' leaves."""
    named = jax.tree.leaves_with_path(param_shapes(model))
    return {jax.tree_util.keystr(path): ArraySpec(tuple(x.shape), np.dtype(x.dtype)) for path, x in named}


class IslandSteps:
    """Outer steps of an island.

    Args:
      agent: the island's network side; None in all of the island's processes but the first.
      solo: compiled programs of solo steps and corrections.
      place: a peer's state, whose arrays the first process has -> the state on its devices, with fresh moments where
        only the weights came.
      tokens_of_round: maps a step to the tokens of the fragment round that ends there.
      keeps_pace: True if an inner step stands for the steps of the schedule that the fastest island takes meanwhile,
        see `protocol/pace.py`.
      processes: the island's processes.
      at_once: True if outer steps wait for their exchange, as replicas of one program do.

    Attributes:
      seconds_exposed: seconds so far that training stood still for exchanges: copies from and to the devices, pauses
        for slower islands, and `settle`.
      gave_way: seconds of pauses for slower islands, see `protocol/pace.py`.
      is_removed: True once the island has ended its last round as a member, as of the last `enter`.
    """

    def __init__(
        self,
        agent: Agent | None,
        solo: SoloPrograms,
        place: Callable[[Healed], TrainState],
        tokens_of_round: Callable[[int], int],
        *,
        keeps_pace: bool = False,
        processes: Processes | None = None,
        at_once: bool = False,
    ):
        self.agent, self.processes = agent, processes or OneProcess()
        self._solo, self._place = solo, place
        self._tokens_of_round, self._keeps_pace, self._at_once = tokens_of_round, keeps_pace, at_once
        self.seconds_exposed = 0.0
        self.gave_way = 0.0
        self.is_removed = False
        self._worth = 0.0  # inner steps since the last outer step, each as the share of the rate that it was taken with
        self._scheduled = 0  # the steps of the schedule that they stand for
        self._steps = 0  # inner steps in all
        self._arrived: list[Correction | Healed] = []  # of the last broadcast, in the first process
        self._cold = 0  # inner steps left with a lower rate
        self._before: PyTree = None  # weights before the inner step, while the rate is lower

    def advance(self, state: TrainState, step: int, most: int) -> tuple[TrainState, int]:
        """Prepare an inner step: return the state to take it from, and the steps of the schedule that it stands for.

        The learning rate will be that of the last step that it stands for.

        Args:
          state: the state after inner step `step`.
          step: the step of the schedule.
          most: the largest stride.
        """
        self._steps += 1
        self._worth += 1
        self._scheduled += 1
        stride = 1 if self.agent is None else self.agent.stride(most)
        self._before = jax.tree.map(_copy, state.params) if self._cold else None
        if not self._keeps_pace:
            return state, stride
        stride = self.processes.broadcast(lambda: stride)
        self._scheduled += stride - 1
        return state._replace(inner=at_step(state.inner, step + stride)), stride

    def warm_up(self, state: TrainState) -> TrainState:
        """Shorten the inner step that was taken since `advance`, while the moments are fresh.

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

    def take(self, state: TrainState, step: int, count: int) -> TrainState:
        """Take `count` outer steps after inner step `step`, and start the exchange of their messages."""
        share = self._worth / self._scheduled if self._scheduled else 1.0
        self._worth, self._scheduled = 0.0, 0
        tokens = max(int(share * self._tokens_of_round(step)), 1)
        for _ in range(count):
            params, inner, outer = state
            assert outer is not None
            round = int(outer.num_outer_steps)
            params, outer, kept, norm = self._solo.step(params, outer)
            norm = float(norm)  # waits for the step
            with self._exposed():
                leaves = jax.tree.leaves(kept)
                if self.agent is not None:
                    arrays = [np.asarray(x) for x in jax.device_get(leaves)]
                    self.agent.end_round(round, tokens, arrays, norm)
            state = TrainState(params, inner, outer)
            if self._at_once:
                state = self.settle(state, _AT_ONCE_SECONDS)
        return state

    def enter(self, state: TrainState, step: int) -> tuple[TrainState, int]:
        """Apply everything that has arrived, between two inner steps; return the state and its number of inner steps.

        Copies of the state and the weights go to peers and callers that wait for them.
        """
        decided = self.processes.broadcast(lambda: self._decide(state))
        arrivals, wanted, gives_weights, self.is_removed = decided
        state, step = self._apply(arrivals, state, step)
        if wanted is not None and state.outer is not None and int(state.outer.num_outer_steps) > 0:
            leaves = jax.tree.leaves(state)
            copies = self._copies([leaves[number] for number in wanted])
            if self.agent is not None:
                self.agent.give(int(state.outer.num_outer_steps) - 1, step, dict(zip(wanted, copies, strict=True)))
        if gives_weights:
            self._give_weights(state, step)
        return state, step

    def _decide(self, state: TrainState) -> Sequence[Any]:
        """Give way to slower islands; return what has arrived, the arrays of the state that peers wait for, whether
        somebody waits for the weights, and whether the island was removed.
        """
        assert self.agent is not None
        pause = self.agent.pause()
        if pause or self.agent.is_exchanging:
            # Else a correction that arrives now would wait for a step that was queued early.
            jax.block_until_ready(state.params)
            with self._exposed():
                time.sleep(pause)
            self.gave_way += pause
        arrivals = self._announced(self.agent.take())
        wanted = self.agent.wanted if self.agent.wants_state else None
        return arrivals, wanted, self.agent.snapshots.wanted, self.agent.is_removed

    def serve(self, state: TrainState, step: int) -> None:
        """Give the weights to a peer or a tool that waits for them."""
        agent = self.agent
        if self.processes.broadcast(lambda: agent is not None and agent.snapshots.wanted):
            self._give_weights(state, step)

    def _give_weights(self, state: TrainState, step: int) -> None:
        if state.outer is None:
            return
        copies = self._copies(state.params)
        if self.agent is not None:
            self.agent.snapshots.give(int(state.outer.num_outer_steps) - 1, step, copies)

    def linger(
        self,
        state: TrainState,
        step: int,
        seconds: float,
        is_stopping: Callable[[], bool],
        report: Callable[[str], None],
        relays: bool = False,
    ) -> None:
        """Serve the weights after the last step until all islands have taken it.

        Args:
          state: the state after inner step `step`.
          step: the last step.
          seconds: the time limit.
          is_stopping: returns True to leave now.
          report: called with lines for people.
          relays: stay until those that are reached through this island have left, too.
        """
        agent = self.agent
        if agent is not None and seconds and (unfinished := agent.unfinished()):
            report(f"serves its weights until {', '.join(unfinished)} have finished, {seconds:g} s at most")
        ask_at = time.monotonic()
        deadline = ask_at + seconds

        def is_done() -> bool:
            nonlocal ask_at
            assert agent is not None
            now = time.monotonic()
            is_asking = now >= ask_at  # a goodbye may have been lost, or said before this island could hear it
            unfinished = agent.unfinished(_ASK_SECONDS if is_asking else 0.0)
            ask_at = now + _ASK_EVERY_SECONDS if is_asking else ask_at
            is_needed = agent.snapshots.is_serving or (relays and agent.is_relaying)
            return not unfinished and not is_needed

        while self.processes.broadcast(lambda: time.monotonic() < deadline) and not is_stopping():
            self.serve(state, step)
            if self.processes.broadcast(is_done):
                break
            time.sleep(0.1)
        if agent is not None and (unfinished := agent.unfinished()):
            report(f"leaves; not known to have finished: {', '.join(unfinished)}")

    def settle(self, state: TrainState, seconds: float) -> TrainState:
        """Wait for pending exchanges and apply them, except a state that would replace this one."""
        assert state.outer is not None
        with self._exposed():
            if self.agent is not None:
                self.agent.settle(int(state.outer.num_outer_steps) - 1, seconds)
        return self.at_rest(state)[0]

    def at_rest(self, state: TrainState) -> tuple[TrainState, dict[str, Any] | None]:
        """Return the state with everything applied and the journal to save with it, None if it is to be replaced.

        The journal is in JSON, see `Journal.to_json`.
        """
        arrivals, journal = self.processes.broadcast(self._take_all)
        if journal is None:
            return state, None
        state, _ = self._apply(arrivals, state, 0)
        if self._before is not None:  # else `warmed` would shorten the corrections, too
            self._before = jax.tree.map(_copy, state.params)
        return state, journal

    def _take_all(self) -> Sequence[Any]:
        """Return everything that has arrived, and the journal; None in its place if this state is to be replaced."""
        assert self.agent is not None
        items, journal = self.agent.take_all()
        for item in items:
            if isinstance(item, Healed):
                self.agent.put_back(item)
                return [], None
        return self._announced(items), journal.to_json()

    def _announced(self, items: list[Correction | Healed]) -> list[list[Any]]:
        """Keep what has arrived for `_apply`; return how to announce it: a correction by its round, a state by its
        round, its inner steps, and whether it is whole.
        """
        self._arrived = items
        return [[item.round, item.step, item.whole] if isinstance(item, Healed) else [item.round] for item in items]

    def _apply(self, arrivals: Sequence[Sequence[Any]], state: TrainState, step: int) -> tuple[TrainState, int]:
        """Apply what the first process has announced, and all processes place."""
        items, self._arrived = self._arrived or [None] * len(arrivals), []
        for (round, *position), item in zip(arrivals, items, strict=True):
            with self._exposed():
                if isinstance(item, Healed):
                    state, step = self.healed(item)
                elif position:
                    state, step = self.healed(Healed(round, position[0], {}, position[1]))
                else:
                    state = self._corrected(state, round, item.arrays.result() if item is not None else ())
        return state, step

    def healed(self, item: Healed) -> tuple[TrainState, int]:
        """Place a received state on the devices; return it and its number of inner steps."""
        self._worth, self._scheduled = 0.0, 0
        self._cold = 0 if item.whole else WARM_UP_STEPS
        return self._place(item), item.step

    def _corrected(self, state: TrainState, round: int, arrays: Sequence[np.ndarray]) -> TrainState:
        params, inner, outer = state
        likes, structure = jax.tree.flatten(self._solo.correction)
        correction = structure.unflatten(from_first_process(arrays, likes))
        params, outer = self._solo.enter(params, outer, correction, np.int32(round))
        return TrainState(params, inner, outer)

    def _copies(self, arrays: PyTree) -> list[np.ndarray]:
        """Copy all arrays to the first process's host, once they are computed; nobody will change the copies."""
        jax.block_until_ready(arrays)
        with self._exposed():
            return to_first_process(jax.tree.leaves(arrays))

    @contextlib.contextmanager
    def _exposed(self) -> Iterator[None]:
        """Count the seconds of the body as exposed."""
        started = time.perf_counter()
        yield
        self.seconds_exposed += time.perf_counter() - started


def _copy(x: Any) -> Any:
    return jnp.array(x, copy=True) if isinstance(x, jax.Array) else np.array(x)


def _between(before: Any, after: Any, share: np.float32) -> Any:
    """Return the point that far on the way between two arrays, in their dtype."""
    if not jnp.issubdtype(after.dtype, jnp.floating):
        return after
    start = before.astype(np.promote_types(np.float32, after.dtype))
    return (start + share * (after - start)).astype(after.dtype)
