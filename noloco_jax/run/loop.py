"""The training loop: inner steps, outer steps, and what happens between them."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from noloco_jax.cluster.processes import Processes
from noloco_jax.cluster.stop import Stop
from noloco_jax.config import TrainConfig
from noloco_jax.errors import UserError
from noloco_jax.methods import schedule_of
from noloco_jax.run.checkpoint import Checkpointer
from noloco_jax.run.console import Progress
from noloco_jax.run.flops import mfu, model_flops_per_token
from noloco_jax.run.messages import Messages, may_send_in_inner_steps
from noloco_jax.run.metrics import MetricWriter
from noloco_jax.run.proportion import Proportion
from noloco_jax.run.rise import Rise
from noloco_jax.run.sync import OuterSteps, Sync
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
      evaluate: fast weights -> the figures of an evaluation.
      checkpoints: where the state is saved.
      totals: what earlier starts of the run have come to.
      messages: what replicas send each other.
      peak_flops_per_second: of all devices together; None where that is not known.
      metrics: where figures are written.
      progress: what the console shows.
      stop: whether the run has been told to stop.
      processes: those of the run.
      hooks: called in the course of it.
      sync: what happens between its inner steps.
    """

    config: TrainConfig
    programs: Programs
    batches: GlobalBatches
    evaluate: Callable[[Any], dict[str, Any]]
    checkpoints: Checkpointer
    totals: Totals
    messages: Messages
    peak_flops_per_second: float | None
    metrics: MetricWriter
    progress: Progress
    stop: Stop
    processes: Processes
    hooks: Hooks
    sync: Sync


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
    log = _StepLog(run, _untold(run, state, start))
    try:
        return _train_steps(run, state, start, log, evaluate_first)
    except UserError:
        log.write_previous()
        raise


def _train_steps(run: Run, state: TrainState, start: int, log: "_StepLog", evaluate_first: bool) -> Outcome:
    config, sync = run.config, run.sync
    evaluation = _evaluate(run, state, start, log) if evaluate_first else {}
    step = start
    while step < config.num_steps:
        state, step, stride = sync.before_step(state, step, _steps_at_once(config, step))
        _tell_news(run, step, log)
        step += stride
        run.hooks.before_step(step)
        state, metrics, waited = _inner_step(run, state, step)
        log.write_previous()
        state, outer_steps = sync.after_step(state, step, stride)
        is_last, is_stopping = step == config.num_steps, run.stop.at(step)
        bytes_merging = 0
        if is_last:
            state = sync.finish(state, step)
            bytes_merging = 0 if run.programs.final_merge is None else run.messages.of_final_merge()
        log.remember(step, stride, metrics, waited, outer_steps, bytes_merging)
        _tell_news(run, step, log)

        is_evaluating = is_evaluated(config, step) and not is_stopping
        is_saving = is_last or is_stopping or step % config.checkpoint_every == 0
        if is_evaluating or is_saving:
            log.write_previous()
        if is_evaluating:
            evaluation = _evaluate(run, state, step, log)
        if is_last or is_stopping:
            sync.leave(is_last and not is_stopping)
        if is_saving:
            state, beside = sync.settle(state)
            if beside is not None:
                run.checkpoints.save(step, state, run.batches.get_state(), log.totals, beside)
        if is_evaluating or is_saving:
            log.restart_clock()
        if is_stopping:
            return Outcome(state, evaluation, finished=False)
    return Outcome(state, evaluation, finished=True)


def _steps_at_once(config: TrainConfig, step: int) -> int:
    """How many steps may follow `step` before an evaluation or a save is due, or the run is over."""
    due = [every - step % every for every in (config.eval_every, config.checkpoint_every) if every > 0]
    return min([config.num_steps - step, *due])


def _inner_step(run: Run, state: TrainState, step: int) -> tuple[TrainState, StepMetrics, float]:
    """Dispatches a step; also returns the seconds until its batch was there."""
    params, inner, outer = state
    started = time.perf_counter()
    batch = next(run.batches)
    waited = time.perf_counter() - started
    params, inner, metrics = run.programs.inner_step(params, inner, batch, np.int32(step))
    return TrainState(params, inner, outer), metrics, waited


def _tell_news(run: Run, step: int, log: "_StepLog") -> None:
    for news in run.sync.news(log.totals.seconds):
        run.progress.note(news.line)
        if news.kind:
            run.metrics.write(step, news.kind, **news.figures)


def _evaluate(run: Run, state: TrainState, step: int, log: "_StepLog") -> dict[str, Any]:
    evaluation = run.evaluate(state.params)
    if jax.process_index() == 0:
        totals = log.totals
        run.metrics.write(step, "eval", **evaluation, tokens=totals.tokens, seconds=totals.seconds, time=wall_clock())
    run.progress.evaluation(step, evaluation)
    return evaluation


class _Step(NamedTuple):
    """A step that has been dispatched, the steps that it stands for, and what the run has come to with it."""

    step: int
    stride: int
    metrics: StepMetrics
    outer: OuterSteps | None
    totals: Totals


class _StepLog:
    """Writes the figures of steps, each one step late, so that the device has the next to do while the host writes."""

    def __init__(self, run: Run, untold: OuterSteps | None = None):
        self._run = run
        self._lr = learning_rates(run.config)
        self._flops_per_token = model_flops_per_token(run.config)
        self._throughput = Throughput()
        self._tells_every_outer_step = _tells_every_outer_step(run.config)
        self._untold = untold
        self._proportion, self._rise = Proportion(), Rise()
        self._totals, self._clock = run.totals, Clock(run.totals.seconds)
        self._previous: _Step | None = None

    @property
    def totals(self) -> Totals:
        """What the run has come to with the last step that was dispatched, and now."""
        return replace(self._totals, seconds=self._clock.seconds())

    def remember(
        self,
        step: int,
        stride: int,
        metrics: StepMetrics,
        waited: float,
        outer_steps: OuterSteps | None,
        bytes_merging: int | float = 0,
    ) -> None:
        """Keeps a step that has been dispatched."""
        self._totals = self._totals.plus(
            tokens=self._run.config.tokens_per_step,
            bytes_sent_total=self._run.messages.of_inner_step(step) + self._bytes_of(outer_steps) + bytes_merging,
            seconds_waiting_for_data=waited,
            seconds_in_outer_steps=outer_steps.seconds if outer_steps else 0.0,
        )
        self._previous = _Step(step, stride, metrics, outer_steps, self._totals)

    def _bytes_of(self, outer_steps: OuterSteps | None) -> int | float:
        if outer_steps is None:
            return 0
        return sum(map(self._run.messages.of_outer_step, range(outer_steps.first, outer_steps.last + 1)))

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
        (step, stride, metrics, outer_steps, totals), self._previous = self._previous, None
        self._untold = outer_steps if self._untold is None else self._untold + outer_steps
        run, config = self._run, self._run.config
        losses = _by_replica(metrics.loss)
        loss = float(np.mean(list(losses.values())))
        self._throughput.step(config.tokens_per_step)
        speed, lr = self._throughput.tokens_per_second, float(self._lr[step - 1])
        is_last = step == config.num_steps
        is_told = step % config.log_every < stride or is_last
        is_told |= outer_steps is not None and self._tells_every_outer_step
        if is_told or not np.isfinite(loss):
            norms = _by_replica(metrics.grad_norm).values()
            values = {"loss": loss, "lr": lr, "grad_norm": float(np.mean(list(norms))), "tokens_per_second": speed}
            if run.peak_flops_per_second is not None:
                values["mfu"] = mfu(speed, self._flops_per_token, run.peak_flops_per_second)
            more = {"loss_replicas": losses} if config.log_replicas else {}
            more |= self._figures_of(step)
            more |= replace(totals, seconds=self._clock.seconds()).to_json()
            run.metrics.write(step, "train", **values, **more, time=wall_clock())
        if not np.isfinite(loss):
            raise UserError(
                f"the loss is {loss} at step {step}: lower inner.lr={config.inner.lr:g} or raise "
                f"inner.warmup_steps={config.inner.warmup_steps}, then start from the last checkpoint or afresh"
            )
        run.progress.update(step, loss, lr, speed)
        if line := self._rise.told(step, loss):
            run.progress.note(line)
        if is_told and self._untold:
            groups = run.sync.groups(self._untold.last)
            if groups is not None:
                run.progress.outer(step, self._untold.count, self._untold.last, groups, self._untold.seconds)
            if self._untold.moved is not None:
                for line in self._proportion.unusual(_by_replica(self._untold.moved)):
                    run.progress.note(line)
            self._untold = None

    def _figures_of(self, step: int) -> dict[str, Any]:
        """Of the step, and of the outer steps since the last line that told of them."""
        figures: dict[str, Any] = {}
        if may_send_in_inner_steps(self._run.config):
            figures["bytes_sent_inner_step"] = self._run.messages.of_inner_step(step)
        if self._untold is not None:
            figures["outer_steps"] = self._untold.count
            figures["outer_step_seconds"] = self._untold.seconds
            figures["bytes_sent"] = self._bytes_of(self._untold)
            figures["round"] = self._untold.last
        return figures


def _tells_every_outer_step(config: TrainConfig) -> bool:
    """Whether there is a line of each. Those of fragments may follow every inner step: they are told together."""
    schedule = schedule_of(config)
    return schedule is None or schedule.fragments == 1 or schedule.gap >= config.log_every


def _untold(run: Run, state: TrainState, start: int) -> OuterSteps | None:
    """The outer steps up to step `start` that no line of an earlier start of the run tells of, which had them in mind
    for its next line; their seconds are not known any more."""
    schedule = schedule_of(run.config)
    if schedule is None or state.outer is None or run.sync.groups(0) is None or _tells_every_outer_step(run.config):
        return None
    taken = int(state.outer.round)
    since_last_line = schedule.total(start) - schedule.total(start - start % run.config.log_every)
    first = taken - since_last_line
    if run.metrics.last_round is not None:  # a line more, where the run was to end at that step
        first = max(first, run.metrics.last_round + 1)
    return OuterSteps(first, taken - first, 0.0, None) if first < taken else None


def _by_replica(values: jax.Array) -> dict[int, float]:
    """The values (N,) of this process's replicas, by their numbers; each is on all devices of its replica."""
    found: dict[int, float] = {}
    for shard in values.addressable_shards:
        first = shard.index[0].start or 0
        found.update(enumerate(np.asarray(shard.data).tolist(), start=first))
    return dict(sorted(found.items()))
