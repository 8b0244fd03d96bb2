"""The training loop: inner steps, outer steps, and what happens between them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from noloco_jax.cluster.processes import Processes
from noloco_jax.cluster.stop import Stop
from noloco_jax.config import TrainConfig
from noloco_jax.data import HostBatch
from noloco_jax.errors import UserError
from noloco_jax.methods import method_of
from noloco_jax.run.checkpoint import Checkpointer
from noloco_jax.run.console import Progress
from noloco_jax.run.evaluate import evaluate
from noloco_jax.run.flops import mfu, model_flops_per_token
from noloco_jax.run.messages import Messages, may_send_in_inner_steps
from noloco_jax.run.metrics import MetricWriter
from noloco_jax.run.throughput import Throughput
from noloco_jax.run.totals import Clock, Totals, wall_clock
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
      totals: what earlier starts of the run have come to.
      messages: what replicas send each other.
      peak_flops_per_second: of all devices together; None where that is not known.
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
    totals: Totals
    messages: Messages
    peak_flops_per_second: float | None
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
class _OuterStep:
    """An outer step that was taken: its round, and the seconds that this process was in it."""

    round: int
    seconds: float


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
    evaluation = _evaluate(run, state, start, log) if evaluate_first else {}
    round = 0 if state.outer is None else int(state.outer.round)
    for step in range(start + 1, config.num_steps + 1):
        run.hooks.before_step(step)
        state, metrics, waited = _inner_step(run, state, step)
        log.write_previous()
        outer_step = None
        if method_of(config).is_outer_step(config, step):
            state, outer_step = _outer_step(run, state, round)
            round += 1
        log.remember(step, metrics, waited, outer_step)

        is_last, is_stopping = step == config.num_steps, run.stop.at(step)
        is_evaluating = is_evaluated(config, step) and not is_stopping
        is_saving = is_last or is_stopping or step % config.checkpoint_every == 0
        if is_evaluating or is_saving:
            log.write_previous()
        if is_evaluating:
            evaluation = _evaluate(run, state, step, log)
        if is_saving:
            run.checkpoints.save(step, state, run.batches.get_state(), log.totals)
        if is_evaluating or is_saving:
            log.restart_clock()
        if is_stopping:
            return Outcome(state, evaluation, finished=False)
    return Outcome(state, evaluation, finished=True)


def _inner_step(run: Run, state: TrainState, step: int) -> tuple[TrainState, StepMetrics, float]:
    """Dispatches a step; also returns the seconds until its batch was there."""
    params, inner, outer = state
    started = time.perf_counter()
    batch = next(run.batches)
    waited = time.perf_counter() - started
    params, inner, metrics = run.programs.inner_step(params, inner, batch, np.int32(step))
    return TrainState(params, inner, outer), metrics, waited


def _outer_step(run: Run, state: TrainState, round: int) -> tuple[TrainState, _OuterStep]:
    assert run.programs.outer_step is not None
    params, inner, outer = state
    jax.block_until_ready(params)
    started = time.perf_counter()
    params, outer = jax.block_until_ready(run.programs.outer_step(params, outer))
    return TrainState(params, inner, outer), _OuterStep(round, time.perf_counter() - started)


def _evaluate(run: Run, state: TrainState, step: int, log: "_StepLog") -> dict[str, Any]:
    evaluation = evaluate(run.programs, state.params, run.validation)
    if jax.process_index() == 0:
        totals = log.totals
        run.metrics.write(step, "eval", **evaluation, tokens=totals.tokens, seconds=totals.seconds, time=wall_clock())
    run.progress.evaluation(step, evaluation)
    return evaluation


class _Step(NamedTuple):
    """A step that has been dispatched, and what the run has come to with it."""

    step: int
    metrics: StepMetrics
    outer: _OuterStep | None
    totals: Totals


class _StepLog:
    """Writes the figures of steps, each one step late, so that the device has the next to do while the host writes."""

    def __init__(self, run: Run):
        self._run = run
        self._lr = learning_rates(run.config)
        self._flops_per_token = model_flops_per_token(run.config)
        self._throughput = Throughput()
        self._totals, self._clock = run.totals, Clock(run.totals.seconds)
        self._previous: _Step | None = None

    @property
    def totals(self) -> Totals:
        """What the run has come to with the last step that was dispatched, and now."""
        return replace(self._totals, seconds=self._clock.seconds())

    def remember(self, step: int, metrics: StepMetrics, waited: float, outer_step: _OuterStep | None) -> None:
        """Keeps a step that has been dispatched."""
        messages = self._run.messages
        sent = messages.of_inner_step(step) + (messages.of_outer_step(outer_step.round) if outer_step else 0)
        self._totals = self._totals.plus(
            tokens=self._run.config.tokens_per_step,
            bytes_sent_total=sent,
            seconds_waiting_for_data=waited,
            seconds_in_outer_steps=outer_step.seconds if outer_step else 0.0,
        )
        self._previous = _Step(step, metrics, outer_step, self._totals)

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
        (step, metrics, outer_step, totals), self._previous = self._previous, None
        run, config = self._run, self._run.config
        losses = _by_replica(metrics.loss)
        loss = float(np.mean(list(losses.values())))
        self._throughput.step(config.tokens_per_step)
        speed, lr = self._throughput.tokens_per_second, float(self._lr[step - 1])
        if outer_step or step % config.log_every == 0 or step == config.num_steps or not np.isfinite(loss):
            norms = _by_replica(metrics.grad_norm).values()
            values = {"loss": loss, "lr": lr, "grad_norm": float(np.mean(list(norms))), "tokens_per_second": speed}
            if run.peak_flops_per_second is not None:
                values["mfu"] = mfu(speed, self._flops_per_token, run.peak_flops_per_second)
            more = {"loss_replicas": losses} if config.log_replicas else {}
            more |= self._figures_of(step, outer_step)
            more |= replace(totals, seconds=self._clock.seconds()).to_json()
            run.metrics.write(step, "train", **values, **more, time=wall_clock())
        if not np.isfinite(loss):
            raise UserError(
                f"the loss is {loss} at step {step}: lower inner.lr={config.inner.lr:g} or raise "
                f"inner.warmup_steps={config.inner.warmup_steps}, then start from the last checkpoint or afresh"
            )
        run.progress.update(step, loss, lr, speed)
        if outer_step:
            groups = method_of(config).groups(config, outer_step.round)
            run.progress.outer(step, outer_step.round, groups, outer_step.seconds)

    def _figures_of(self, step: int, outer_step: _OuterStep | None) -> dict[str, Any]:
        messages, figures = self._run.messages, {}
        if may_send_in_inner_steps(self._run.config):
            figures["bytes_sent_inner_step"] = messages.of_inner_step(step)
        if outer_step is not None:
            figures["outer_step_seconds"] = outer_step.seconds
            figures["bytes_sent"] = messages.of_outer_step(outer_step.round)
            figures["round"] = outer_step.round
        return figures


def _by_replica(values: jax.Array) -> dict[int, float]:
    """The values (N,) of this process's replicas, by their numbers; each is on all devices of its replica."""
    found: dict[int, float] = {}
    for shard in values.addressable_shards:
        first = shard.index[0].start or 0
        found.update(enumerate(np.asarray(shard.data).tolist(), start=first))
    return dict(sorted(found.items()))
