"""The training loop: inner steps, outer steps, and what happens between them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from noloco_jax.cluster.processes import Processes
from noloco_jax.cluster.stop import Stop
from noloco_jax.config import TrainConfig
from noloco_jax.data import HostBatch
from noloco_jax.errors import UserError
from noloco_jax.meetings import Meetings, own_round
from noloco_jax.methods import meetings_of, method_of
from noloco_jax.run.checkpoint import Checkpointer
from noloco_jax.run.console import Progress
from noloco_jax.run.evaluate import evaluate
from noloco_jax.run.messages import bytes_sent
from noloco_jax.run.metrics import MetricWriter
from noloco_jax.run.throughput import Throughput
from noloco_jax.spmd.batches import GlobalBatches
from noloco_jax.spmd.inner import learning_rates
from noloco_jax.spmd.programs import Programs, StepMetrics, TrainState


class Hooks:
    """What others do in the course of a run: methods that do nothing, to be overridden."""

    def before_step(self, step: int) -> None:
        """Called with the number of every inner step, from 1, before it is dispatched."""


@dataclass(frozen=True)
class Run:
    """The parts of a run, all made and checked before its first step.

    Attributes:
      config: what to do.
      programs: compiled.
      batches: the training data of this process's replicas.
      validation: batches for evaluations, the same on every process.
      checkpoints: where the state is saved.
      metrics: where figures are written.
      progress: what the console shows.
      stop: whether the run has been told to stop.
      processes: those of the run.
      hooks: called in the course of it.
    """

    config: TrainConfig
    programs: Programs
    batches: GlobalBatches
    validation: Sequence[HostBatch]
    checkpoints: Checkpointer
    metrics: MetricWriter
    progress: Progress
    stop: Stop
    processes: Processes
    hooks: Hooks


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
      state: after the last step that was taken.
      evaluation: the last one of this process's time; empty if there was none.
      finished: whether all steps are taken and evaluated; False if it was told to stop before.
    """

    state: TrainState
    evaluation: dict[str, Any]
    finished: bool


@dataclass(frozen=True)
class _OuterSteps:
    """Outer steps that were taken: how many, from which round on, and the seconds that this process was in them."""

    first: int
    count: int
    seconds: float

    @property
    def last(self) -> int:
        return self.first + self.count - 1

    def __add__(self, later: "_OuterSteps | None") -> "_OuterSteps":
        if later is None:
            return self
        return _OuterSteps(self.first, self.count + later.count, self.seconds + later.seconds)


def is_evaluated(config: TrainConfig, step: int) -> bool:
    """Whether an evaluation belongs to `step`, of those that the run takes."""
    every = config.eval_every
    return step == config.num_steps or (0 < step < config.num_steps and every > 0 and step % every == 0)


def train_steps(run: Run, state: TrainState, start: int, *, evaluate_first: bool = False) -> Outcome:
    """Trains from step `start` + 1 to the last, or until the run is told to stop.

    A run that is told to stop saves and does nothing else, as its time may be short. Its next start makes up for the
    evaluation that belonged to the step: `evaluate_first`. Otherwise the evaluation precedes the save, so that a run
    that is killed in between does both again.
    """
    log = _StepLog(run)
    try:
        return _train_steps(run, state, start, log, evaluate_first)
    except UserError:
        log.write_previous()
        raise


def _train_steps(run: Run, state: TrainState, start: int, log: "_StepLog", evaluate_first: bool) -> Outcome:
    config = run.config
    evaluation = _evaluate(run, state, start) if evaluate_first else {}
    meetings = meetings_of(config)
    for step in range(start + 1, config.num_steps + 1):
        run.hooks.before_step(step)
        state, metrics = _inner_step(run, state, step)
        log.write_previous()
        outer_steps = None
        if meetings is not None:
            state = _correct_steps(run, state, meetings, step)
            state, outer_steps = _outer_steps(run, state, meetings.due(step))
        log.remember(step, metrics, outer_steps)
        if step == config.num_steps and run.programs.final_merge is not None:
            state = state._replace(params=run.programs.final_merge(state.params))

        is_last, is_stopping = step == config.num_steps, run.stop.at(step)
        is_evaluating = is_evaluated(config, step) and not is_stopping
        is_saving = is_last or is_stopping or step % config.checkpoint_every == 0
        if is_evaluating or is_saving:
            log.write_previous()
        if is_evaluating:
            evaluation = _evaluate(run, state, step)
        if is_saving:
            run.checkpoints.save(step, state, run.batches.get_state())
        if is_evaluating or is_saving:
            log.restart_clock()
        if is_stopping:
            return Outcome(state, evaluation, finished=False)
    return Outcome(state, evaluation, finished=True)


def _inner_step(run: Run, state: TrainState, step: int) -> tuple[TrainState, StepMetrics]:
    params, inner, outer = state
    params, inner, metrics = run.programs.inner_step(params, inner, next(run.batches), np.int32(step))
    return TrainState(params, inner, outer), metrics


def _outer_steps(run: Run, state: TrainState, count: int) -> tuple[TrainState, _OuterSteps | None]:
    """Takes that many outer steps."""
    if count == 0:
        return state, None
    assert run.programs.outer_step is not None
    params, inner, outer = state
    assert outer is not None
    round = int(outer.round)
    jax.block_until_ready(params)
    started = time.perf_counter()
    for number in range(round, round + count):
        params, outer = run.programs.outer_step(params, outer)
        if run.programs.share_moments is not None and _shares_moments(run.config, number):
            inner = run.programs.share_moments(inner, np.int32(number))
    jax.block_until_ready((params, inner, outer))
    return TrainState(params, inner, outer), _OuterSteps(round, count, time.perf_counter() - started)


def _shares_moments(config: TrainConfig, number: int) -> bool:
    """Whether the inner optimizer's moments are averaged too in outer step `number`."""
    return own_round(number, config.outer.fragments) % config.outer.moments == 0


def _correct_steps(run: Run, state: TrainState, meetings: Meetings, step: int) -> TrainState:
    """Enters the corrections that are due after inner step `step`."""
    if run.programs.correct_step is None:
        return state
    params, inner, outer = state
    assert outer is not None
    for _ in range(int(outer.round) - int(outer.rule.entered) - meetings.on_the_way(step)):
        params, outer = run.programs.correct_step(params, outer)
    return TrainState(params, inner, outer)


def _evaluate(run: Run, state: TrainState, step: int) -> dict[str, Any]:
    evaluation = evaluate(run.programs, state.params, run.validation)
    if jax.process_index() == 0:
        run.metrics.write(step, "eval", **evaluation)
    run.progress.evaluation(step, evaluation)
    return evaluation


class _StepLog:
    """Writes the figures of steps, each one step late, so that the device has the next to do while the host writes."""

    def __init__(self, run: Run):
        self._run = run
        config = run.config
        self._lr = learning_rates(config)
        self._tokens = config.num_replicas * config.data.batch_size * config.data.sequence_length
        self._throughput = Throughput()
        meetings = meetings_of(config)
        self._tells_every_outer_step = meetings is None or meetings.shortest_gap >= config.log_every
        self._untold: _OuterSteps | None = None
        self._previous: tuple[int, StepMetrics, _OuterSteps | None] | None = None

    def remember(self, step: int, metrics: StepMetrics, outer_steps: _OuterSteps | None) -> None:
        """Keeps a step that has been dispatched."""
        self._previous = step, metrics, outer_steps

    def restart_clock(self) -> None:
        """Leaves what is no training out of the speed."""
        self._throughput.reset()

    def write_previous(self) -> None:
        """Waits for the step that is remembered, if there is one, and writes and shows its figures.

        Raises:
          UserError: if its loss is not finite.
        """
        if self._previous is None:
            return
        (step, metrics, outer_steps), self._previous = self._previous, None
        self._untold = outer_steps if self._untold is None else self._untold + outer_steps
        run, config = self._run, self._run.config
        loss = _mean_here(metrics.loss)
        self._throughput.step(self._tokens)
        speed, lr = self._throughput.tokens_per_second, float(self._lr[step - 1])
        is_told = step % config.log_every == 0 or (outer_steps is not None and self._tells_every_outer_step)
        if is_told or not np.isfinite(loss):
            values = {"loss": loss, "lr": lr, "grad_norm": _mean_here(metrics.grad_norm), "tokens_per_second": speed}
            run.metrics.write(step, "train", **values, **self._figures_of(self._untold))
        if not np.isfinite(loss):
            raise UserError(
                f"the loss is {loss} at step {step}: lower inner.lr={config.inner.lr:g} or raise "
                f"inner.warmup_steps={config.inner.warmup_steps}, then start from the last checkpoint or afresh"
            )
        run.progress.update(step, loss, lr, speed)
        if is_told and self._untold:
            groups = method_of(config).groups(config, self._untold.last)
            run.progress.outer(step, self._untold.count, self._untold.last, groups, self._untold.seconds)
            self._untold = None

    def _figures_of(self, outer_steps: _OuterSteps | None) -> dict[str, Any]:
        """Of the outer steps since the last line that told of them."""
        if outer_steps is None:
            return {}
        return {
            "outer_step_seconds": outer_steps.seconds,
            "bytes_sent": outer_steps.count * bytes_sent(self._run.config),
            "round": outer_steps.last,
        }


def _mean_here(values: jax.Array) -> float:
    """The mean over this process's replicas."""
    return float(np.mean([np.asarray(shard.data) for shard in values.addressable_shards]))
