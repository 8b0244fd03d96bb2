"""Outer steps of an island's training: solo steps, and the corrections that are applied later."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from noloco_jax.config import ModelConfig
from noloco_jax.islands.agent import Agent, Correction, Healed
from noloco_jax.islands.frames import ArraySpec
from noloco_jax.islands.protocol.island import Journal
from noloco_jax.model.kind import param_shapes
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
      agent: the island's network side.
      solo: compiled programs of solo steps and corrections.
      place: a peer's state -> the state on its devices, with fresh moments where only the weights came.
      tokens_of_round: maps a step to the tokens of the fragment round that ends there.
      shares_moments: outer step -> True if its message carries the inner optimizer's moments.
      keeps_pace: True if an inner step stands for the steps of the schedule that the fastest island takes meanwhile,
        see `protocol/pace.py`.
      at_once: True if outer steps wait for their exchange, as replicas of one program do.

    Attributes:
      seconds_exposed: seconds so far that training stood still for exchanges: copies from and to the devices, pauses
        for slower islands, and `settle`.
      gave_way: seconds of pauses for slower islands, see `protocol/pace.py`.
    """

    def __init__(
        self,
        agent: Agent,
        solo: SoloPrograms,
        place: Callable[[Healed], TrainState],
        tokens_of_round: Callable[[int], int],
        shares_moments: Callable[[int], bool] = lambda round: False,
        *,
        keeps_pace: bool = False,
        at_once: bool = False,
    ):
        self.agent = agent
        self._solo, self._place = solo, place
        self._tokens_of_round, self._keeps_pace, self._at_once = tokens_of_round, keeps_pace, at_once
        self._shares_moments = shares_moments
        self.seconds_exposed = 0.0
        self.gave_way = 0.0
        self._taken = self._scheduled = 0  # since the last outer step: inner steps, and those that they stand for
        self._steps = 0  # inner steps in all
        self._cold = 0  # inner steps left with a lower rate
        self._before: PyTree = None  # weights before the inner step, while the rate is lower
        self._sent_at: dict[int, int] = {}  # round whose message carried moments -> inner steps in all before it

    def advance(self, state: TrainState, step: int, most: int) -> tuple[TrainState, int]:
        """Prepare an inner step: return the state to take it from, and the steps of the schedule that it stands for.

        The learning rate will be that of the last step that it stands for.

        Args:
          state: the state after inner step `step`.
          step: the step of the schedule.
          most: the largest stride.
        """
        self._steps += 1
        stride = self.agent.stride(most)
        self._before = jax.tree.map(_copy, state.params) if self._cold else None
        if not self._keeps_pace:
            return state, stride
        self._taken += 1
        self._scheduled += stride
        return state._replace(inner=at_step(state.inner, step + stride)), stride

    def warmed(self, state: TrainState) -> TrainState:
        """Shorten the inner step that was taken since `advance`, while the moments are fresh.

        Every optimizer scales its update by the rate at last, so that a part of the step is the step of a part of the
        rate. It takes a copy of the weights for as long.
        """
        if self._before is None:
            return state
        share = np.float32(1 - self._cold / (WARM_UP_STEPS + 1))
        params = jax.tree.map(lambda before, after: _between(before, after, share), self._before, state.params)
        self._before, self._cold = None, self._cold - 1
        return state._replace(params=params)

    def take(self, state: TrainState, step: int, count: int) -> TrainState:
        """Take `count` outer steps after inner step `step`, and start the exchange of their messages."""
        share = self._taken / self._scheduled if self._scheduled else 1.0
        self._taken = self._scheduled = 0
        tokens = max(int(share * self._tokens_of_round(step)), 1)
        for _ in range(count):
            params, inner, outer = state
            assert outer is not None
            round = int(outer.round)
            params, outer, kept, norm = self._solo.step(params, outer)
            norm = float(norm)  # waits for the step
            with self._exposed():
                leaves = jax.tree.leaves(kept)
                if self._solo.moments is not None and self._shares_moments(round):
                    leaves += jax.tree.leaves(self._solo.moments.send(inner, np.int32(round)))
                    self._sent_at[round] = self._steps
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
        pause = self.agent.pause()
        if pause or self.agent.is_exchanging:
            jax.block_until_ready(
                state.params
            )  # else a correction that arrives now would wait for a step that was queued early
            with self._exposed():
                time.sleep(pause)
            self.gave_way += pause
        for item in self.agent.take():
            state, step = self._entered(item, state, step)
        if self.agent.wants_state and state.outer is not None and int(state.outer.round) > 0:
            wanted, leaves = self.agent.wanted, jax.tree.leaves(state)
            copies = self._copies([leaves[number] for number in wanted])
            self.agent.give(int(state.outer.round) - 1, step, dict(zip(wanted, copies, strict=True)))
        self.serve(state, step)
        return state, step

    def serve(self, state: TrainState, step: int) -> None:
        """Give the weights to a peer or a tool that waits for them."""
        if self.agent.snapshots.wanted and state.outer is not None:
            self.agent.snapshots.give(int(state.outer.round) - 1, step, self._copies(state.params))

    def linger(
        self,
        state: TrainState,
        step: int,
        seconds: float,
        is_stopping: Callable[[], bool],
        report: Callable[[str], None],
    ) -> None:
        """Serve the weights after the last step until all islands have taken it.

        Args:
          state: the state after inner step `step`.
          step: the last step.
          seconds: the time limit.
          is_stopping: returns True to leave now.
          report: called with lines for people.
        """
        if seconds and (unfinished := self.agent.unfinished()):
            report(f"serves its weights until {', '.join(unfinished)} have finished, {seconds:g} s at most")
        ask_at = time.monotonic()
        deadline = ask_at + seconds
        while (now := time.monotonic()) < deadline and not is_stopping():
            self.serve(state, step)
            is_asking = now >= ask_at  # a goodbye may have been lost, or said before this island could hear it
            unfinished = self.agent.unfinished(_ASK_SECONDS if is_asking else 0.0)
            ask_at = now + _ASK_EVERY_SECONDS if is_asking else ask_at
            if not unfinished and not self.agent.snapshots.is_serving:
                break
            time.sleep(0.1)
        if unfinished := self.agent.unfinished():
            report(f"leaves; not known to have finished: {', '.join(unfinished)}")

    def settle(self, state: TrainState, seconds: float) -> TrainState:
        """Wait for pending exchanges and apply them, except a state that would replace this one."""
        assert state.outer is not None
        with self._exposed():
            self.agent.settle(int(state.outer.round) - 1, seconds)
        return self.at_rest(state)[0]

    def at_rest(self, state: TrainState) -> tuple[TrainState, Journal | None]:
        """Return the state with everything applied and the journal to save with it, None if it is to be replaced."""
        items, journal = self.agent.take_all()
        for item in items:
            if isinstance(item, Healed):
                self.agent.put_back(item)
                return state, None
            state, _ = self._entered(item, state, 0)
        return state, journal

    def healed(self, item: Healed) -> tuple[TrainState, int]:
        """Place a received state on the devices; return it and its number of inner steps."""
        self._taken = self._scheduled = 0
        self._cold = 0 if item.whole else WARM_UP_STEPS
        self._sent_at.clear()
        return self._place(item), item.step

    def _entered(self, item: Correction | Healed, state: TrainState, step: int) -> tuple[TrainState, int]:
        with self._exposed():
            if isinstance(item, Healed):
                return self.healed(item)
            params, inner, outer = state
            structure, arrays = jax.tree.structure(self._solo.correction), item.arrays.result()
            of_weights, of_moments = arrays[: structure.num_leaves], arrays[structure.num_leaves :]
            params, outer = self._solo.enter(params, outer, structure.unflatten(of_weights), np.int32(item.round))
            if of_moments and (moments := self._solo.moments) is not None:
                age = self._steps - self._sent_at.pop(item.round)
                correction = jax.tree.unflatten(jax.tree.structure(moments.sent), of_moments)
                inner = moments.enter(inner, correction, np.int32(item.round), np.int32(age))
            return TrainState(params, inner, outer), step

    def _copies(self, arrays: PyTree) -> list[np.ndarray]:
        """Copy all arrays to the host in order, once they are computed; nobody will change the copies."""
        jax.block_until_ready(arrays)
        with self._exposed():
            return [np.array(x) for x in jax.device_get(jax.tree.leaves(arrays))]

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
