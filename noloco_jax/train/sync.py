"""Interface between a run's training loop and its exchanges with other replicas.

The loop takes inner steps and calls a `Sync` between them. `CollectiveSync` runs the outer step of one program, in
which partners wait for each other; `BackgroundSync` exchanges over the hosts while the devices continue training;
islands have their own (`islands.sync`).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from noloco_jax.config import TrainConfig
from noloco_jax.spmd.background import BackgroundPrograms, HostExchange
from noloco_jax.spmd.programs import Programs, TrainState


@dataclass(frozen=True)
class OuterStepRecord:
    """Consecutive outer steps that were taken.

    Attributes:
      first: number of the first, from 0.
      count: number of outer steps.
      seconds: estimated time of them and of corrections, from one measurement in `log_every` steps; 0 until the next.
    """

    first: int
    count: int
    seconds: float

    @property
    def last(self) -> int:
        return self.first + self.count - 1

    def __add__(self, later: "OuterStepRecord | None") -> "OuterStepRecord":
        if later is None:
            return self
        return OuterStepRecord(self.first, self.count + later.count, self.seconds + later.seconds)


class SyncEvent(NamedTuple):
    """An event outside of steps: a line for people, and figures for a metrics line of the given kind."""

    line: str
    kind: str = ""
    figures: Mapping[str, Any] = MappingProxyType({})


class Sync(Protocol):
    """Exchanges of a run. It owns the outer state and all messages in flight.

    Methods with a body are defaults, for exchanges that are complete before the next inner step.
    """

    def before_step(
        self, state: TrainState, step: int, max_stride: Callable[[int], int]
    ) -> tuple[TrainState, int, int]:
        """Apply what has arrived since inner step `step`.

        Args:
          state: state after that step.
          step: step of the schedule.
          max_stride: step -> the most steps of the schedule that the inner step after it may stand for.

        Returns:
          The state, its step (a different one if the state came from a peer), and the stride: the number of schedule
          steps that the next inner step stands for; 0 if the peer's state is that after the last step.
        """
        return state, step, 1

    def after_step(self, state: TrainState, step: int, stride: int) -> tuple[TrainState, OuterStepRecord | None]:
        """Take the outer steps, and apply the corrections, that are due after inner step `step`."""
        ...

    def finish(self, state: TrainState, step: int) -> TrainState:
        """Complete the exchanges in flight after the last inner step; no correction stays pending."""
        ...

    def settle(self, state: TrainState) -> tuple[TrainState, dict[str, Any] | None]:
        """Prepare the state for a save.

        Returns:
          The state, and the protocol state to checkpoint with it; None for the latter if nothing is to be saved, since
          a peer's state is about to replace this one.
        """
        return state, {}

    def wait(self) -> None:
        """Return once what is exchanged is here, whenever it is due; all processes then go on alike."""

    def leave(self, finished: bool) -> None:
        """Begin no further exchange, as a save follows with which the run stops, or is `finished`."""

    @property
    def end_reason(self) -> str | None:
        """The reason for which the run is to save and end here for good, before its last step; None: it goes on."""
        return None

    def bytes_sent(self) -> int | float | None:
        """Return the bytes of messages exchanged since the last call; None: every outer step exchanges its message."""
        return None

    def news(self, seconds: float) -> Sequence[SyncEvent]:
        """Return the events since the last call; `seconds` is the run's duration up to now."""
        return ()

    def close(self, state: TrainState, finished: bool) -> None:
        """End with this state: everything is saved, and all steps are taken if `finished`."""


class _Sampled:
    """Seconds of repeated work, estimated from one measurement in `every` steps, as measuring waits for the devices."""

    def __init__(self, every: int):
        self._every, self._last, self._unmeasured = every, -every, 0

    def run(
        self, step: int, state: TrainState, numbers: range, work: Callable[[TrainState, int], TrainState]
    ) -> tuple[TrainState, float]:
        """Do the work of each number; return the seconds of all work since the last measurement, or 0."""
        is_measured = step - self._last >= self._every
        self._unmeasured += len(numbers)
        if is_measured:
            jax.block_until_ready(state)
        started = time.perf_counter()
        for number in numbers:
            state = work(state, number)
        if not is_measured:
            return state, 0.0
        jax.block_until_ready(state)
        seconds = (time.perf_counter() - started) / len(numbers) * self._unmeasured
        self._last, self._unmeasured = step, 0
        return state, seconds


class CollectiveSync(Sync):
    """Outer steps of one program that holds all replicas: partners wait for each other."""

    def __init__(self, config: TrainConfig, programs: Programs):
        self._config, self._programs = config, programs
        self._schedule = config.schedule
        self._outer_timing, self._correction_timing = _Sampled(config.log_every), _Sampled(config.log_every)
        self._seconds_correcting = 0.0
        self._counts: tuple[int, int] | None = None

    def after_step(self, state: TrainState, step: int, stride: int) -> tuple[TrainState, OuterStepRecord | None]:
        if self._schedule is None:
            return state, None
        num_outer_steps, _ = self._counted(state)
        state = self._apply_corrections(state, step, num_outer_steps - self._schedule.on_the_way(step))
        return self._outer_steps(state, step, int(self._schedule.due(step)))

    def finish(self, state: TrainState, step: int) -> TrainState:
        if self._schedule is None:
            return state
        state = self._apply_corrections(state, step, self._counted(state)[0])
        if not self._config.outer.final_merge:
            return state
        return state._replace(params=self._programs.merge(state.params))

    def _counted(self, state: TrainState) -> tuple[int, int]:
        """Return the outer steps taken and the corrections applied; only the first call waits for the state's own."""
        if self._counts is None:
            assert state.outer is not None
            delayed = state.outer.delayed
            self._counts = int(state.outer.num_outer_steps), 0 if delayed is None else int(delayed.num_applied)
        return self._counts

    def _apply_corrections(self, state: TrainState, step: int, end: int) -> TrainState:
        """Apply the pending corrections of outer steps before `end`."""
        if self._programs.correct_step is None:
            return state
        num_outer_steps, first = self._counted(state)
        if first < end:
            state, seconds = self._correction_timing.run(step, state, range(first, end), self._apply_correction)
            self._counts, self._seconds_correcting = (num_outer_steps, end), self._seconds_correcting + seconds
        return state

    def _outer_steps(self, state: TrainState, step: int, count: int) -> tuple[TrainState, OuterStepRecord | None]:
        if count == 0:
            return state, None
        first, num_applied = self._counted(state)
        state, seconds = self._outer_timing.run(step, state, range(first, first + count), self._outer_step)
        self._counts = first + count, num_applied
        seconds, self._seconds_correcting = seconds + self._seconds_correcting, 0.0
        return state, OuterStepRecord(first, count, seconds)

    def _outer_step(self, state: TrainState, number: int) -> TrainState:
        assert self._programs.outer_step is not None
        params, outer = self._programs.outer_step(state.params, state.outer)
        return state._replace(params=params, outer=outer)

    def _apply_correction(self, state: TrainState, number: int) -> TrainState:
        """Apply the correction of outer step `number`, which that step has stored."""
        assert self._programs.correct_step is not None
        params, outer = self._programs.correct_step(state.params, state.outer)
        return state._replace(params=params, outer=outer)


class BackgroundSync(CollectiveSync):
    """Outer steps whose exchanges run over the hosts: no replica waits before a correction is due.

    Args:
      config: the run.
      programs: compiled programs.
      background: compiled background programs.
    """

    def __init__(self, config: TrainConfig, programs: Programs, background: BackgroundPrograms):
        super().__init__(config, programs)
        self._background = background
        self._exchange = HostExchange(background, programs.mesh)

    def settle(self, state: TrainState) -> tuple[TrainState, dict[str, Any] | None]:
        """Wait for all exchanges in flight, since a checkpoint contains the corrections that are not due yet."""
        for number in self._exchange.under_way:
            state = self._store(state, number)
        return state, {}

    def wait(self) -> None:
        self._exchange.wait()

    def close(self, state: TrainState, finished: bool) -> None:
        self._exchange.close()

    def _outer_step(self, state: TrainState, number: int) -> TrainState:
        params, outer, outgoing = self._background.local_step(state.params, state.outer)
        self._exchange.begin(outgoing, number)
        return state._replace(params=params, outer=outer)

    def _apply_correction(self, state: TrainState, number: int) -> TrainState:
        if number in self._exchange.under_way:  # else it was stored before a save
            state = self._store(state, number)
        return super()._apply_correction(state, number)

    def _store(self, state: TrainState, number: int) -> TrainState:
        arrived = self._exchange.take(number)
        params, outer = self._background.store(state.params, state.outer, arrived, np.int32(number))
        return state._replace(params=params, outer=outer)
