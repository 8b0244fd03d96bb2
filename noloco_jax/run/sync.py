"""What happens between inner steps: the seam between a run's training and its exchanges with other replicas.

The loop takes inner steps and asks a `Sync` for the rest. `CollectiveSync` has the outer step of one program, in which
partners wait for each other; `BackgroundSync` exchanges over the hosts while the devices train on; islands bring one of
their own (`islands.sync`).
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from noloco_jax.config import TrainConfig
from noloco_jax.methods import method_of, schedule_of
from noloco_jax.outer.pairing import Round
from noloco_jax.run.messages import shares_moments
from noloco_jax.spmd.background import BackgroundPrograms, HostExchange
from noloco_jax.spmd.programs import Programs, TrainState


@dataclass(frozen=True)
class OuterSteps:
    """Outer steps that were taken, one after another.

    Attributes:
      first: number of the first, from 0.
      count: how many.
      seconds: in which this process was in them, or waited for what came of earlier ones.
      moved: how far replicas had moved before the last of them that was looked at, (N,); None where that is not known.
    """

    first: int
    count: int
    seconds: float
    moved: jax.Array | None

    @property
    def last(self) -> int:
        return self.first + self.count - 1

    def __add__(self, later: "OuterSteps | None") -> "OuterSteps":
        if later is None:
            return self
        return OuterSteps(self.first, self.count + later.count, self.seconds + later.seconds, later.moved)


class News(NamedTuple):
    """Something to tell apart from the steps: a line for people, and figures for a line of metrics of some kind."""

    line: str
    kind: str = ""
    figures: Mapping[str, Any] = MappingProxyType({})


class Sync(Protocol):
    """The exchanges of a run. It owns the outer state, and whatever is on its way between replicas."""

    def before_step(self, state: TrainState, step: int, most: int) -> tuple[TrainState, int, int]:
        """Apply what has arrived since inner step `step`.

        Args:
          state: after it.
          step: of the schedule.
          most: how many steps of the schedule the next inner step may stand for.

        Returns:
          The state, the step that it is after (another where it came from a peer), and the stride: how many steps of
          the schedule the next inner step stands for.
        """
        ...

    def after_step(self, state: TrainState, step: int, stride: int) -> tuple[TrainState, OuterSteps | None]:
        """Take the outer steps, and apply the corrections, that are due after inner step `step`."""
        ...

    def finish(self, state: TrainState, step: int) -> TrainState:
        """Complete what is under way after the last inner step."""
        ...

    def settle(self, state: TrainState) -> tuple[TrainState, dict[str, Any] | None]:
        """Bring the state to rest for a save.

        Returns:
          The state, and what a checkpoint keeps beside it; None where nothing is to be saved, as a peer's state is
          about to replace this one.
        """
        ...

    def leave(self, finished: bool) -> None:
        """Begin no further exchange, as a save follows with which the run stops, or is `finished`."""
        ...

    def groups(self, number: int) -> Round | None:
        """Return who meets in outer step `number`; None where that is told once their exchange is over, as `news`."""
        ...

    def news(self, seconds: float) -> Sequence[News]:
        """Return what is to be told since the last call; `seconds` is the run's time up to now."""
        ...

    def close(self, state: TrainState, finished: bool) -> None:
        """End with this state: everything is saved, and all steps are taken if `finished`."""
        ...


class CollectiveSync:
    """Outer steps of one program that holds all replicas: partners wait for each other."""

    def __init__(self, config: TrainConfig, programs: Programs):
        self._config, self._programs = config, programs
        self._schedule = schedule_of(config)

    def before_step(self, state: TrainState, step: int, most: int) -> tuple[TrainState, int, int]:
        return state, step, 1

    def after_step(self, state: TrainState, step: int, stride: int) -> tuple[TrainState, OuterSteps | None]:
        if self._schedule is None:
            return state, None
        return self._outer_steps(self._corrected(state, step), int(self._schedule.due(step)))

    def finish(self, state: TrainState, step: int) -> TrainState:
        if self._programs.final_merge is None:
            return state
        return state._replace(params=self._programs.final_merge(state.params))

    def settle(self, state: TrainState) -> tuple[TrainState, dict[str, Any] | None]:
        return state, {}

    def leave(self, finished: bool) -> None:
        pass

    def groups(self, number: int) -> Round | None:
        return method_of(self._config).groups(self._config, number)

    def news(self, seconds: float) -> Sequence[News]:
        return ()

    def close(self, state: TrainState, finished: bool) -> None:
        pass

    def _corrected(self, state: TrainState, step: int) -> TrainState:
        """Apply the corrections that are due after inner step `step`."""
        if self._programs.correct_step is None:
            return state
        assert self._schedule is not None and state.outer is not None
        entered = int(state.outer.rule.entered)
        for number in range(entered, int(state.outer.round) - self._schedule.on_the_way(step)):
            state = self._kept(state, number)
            params, outer = self._programs.correct_step(state.params, state.outer)
            state = state._replace(params=params, outer=outer)
        return state

    def _outer_steps(self, state: TrainState, count: int) -> tuple[TrainState, OuterSteps | None]:
        if count == 0:
            return state, None
        params, inner, outer = state
        assert outer is not None
        first = int(outer.round)
        moved = None if self._programs.moved is None else self._programs.moved(params, outer)
        jax.block_until_ready(params)
        started = time.perf_counter()
        for number in range(first, first + count):
            params, outer = self._outer_step(params, outer, number)
            if self._programs.share_moments is not None and shares_moments(self._config, number):
                inner = self._programs.share_moments(inner, np.int32(number))
        jax.block_until_ready((params, inner, outer))
        taken = OuterSteps(first, count, time.perf_counter() - started + self._seconds_waited(), moved)
        return TrainState(params, inner, outer), taken

    def _outer_step(self, params: Any, outer: Any, number: int) -> tuple[Any, Any]:
        assert self._programs.outer_step is not None
        return self._programs.outer_step(params, outer)

    def _kept(self, state: TrainState, number: int) -> TrainState:
        """Return the state with the correction of outer step `number` in it, where the outer step left it."""
        return state

    def _seconds_waited(self) -> float:
        """Return the seconds since the last call in which the training waited for corrections that were due."""
        return 0.0


class BackgroundSync(CollectiveSync):
    """Outer steps whose exchanges run over the hosts: nobody waits before a correction is due.

    Args:
      config: the run.
      programs: compiled.
      background: likewise.
    """

    def __init__(self, config: TrainConfig, programs: Programs, background: BackgroundPrograms):
        super().__init__(config, programs)
        self._background = background
        self._exchange = HostExchange(background, programs.mesh)
        self._waited = 0.0

    def settle(self, state: TrainState) -> tuple[TrainState, dict[str, Any] | None]:
        """Wait for all that is under way, as a checkpoint holds the corrections that are not due yet."""
        for number in self._exchange.under_way:
            state = self._kept(state, number)
        return state, {}

    def close(self, state: TrainState, finished: bool) -> None:
        self._exchange.close()

    def _outer_step(self, params: Any, outer: Any, number: int) -> tuple[Any, Any]:
        params, outer, outgoing = self._background.solo(params, outer)
        self._exchange.begin(outgoing, number)
        return params, outer

    def _kept(self, state: TrainState, number: int) -> TrainState:
        if number not in self._exchange.under_way:
            return state  # it was kept before a save
        jax.block_until_ready(state.params)  # the time until then is the training's own
        started = time.perf_counter()
        arrived = self._exchange.take(number)
        self._waited += time.perf_counter() - started
        params, outer = self._background.keep(state.params, state.outer, *arrived, np.int32(number))
        return state._replace(params=params, outer=outer)

    def _seconds_waited(self) -> float:
        waited, self._waited = self._waited, 0.0
        return waited
