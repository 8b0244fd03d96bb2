"""Training loop: inner steps, outer steps, evaluations and saves."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from noloco_jax.checkpoint.store import Checkpointer
from noloco_jax.checkpoint.totals import Clock, Throughput, Totals, wall_clock
from noloco_jax.cluster.stop import Stop
from noloco_jax.config import TrainConfig
from noloco_jax.errors import UserError
from noloco_jax.methods import schedule_of
from noloco_jax.metrics.console import Progress
from noloco_jax.metrics.divergence import Proportion, Rise, is_finite
from noloco_jax.metrics.flops import mfu, model_flops_per_token
from noloco_jax.metrics.writer import MetricWriter
from noloco_jax.spmd.batches import GlobalBatches
from noloco_jax.spmd.inner import learning_rates
from noloco_jax.spmd.programs import Programs, StepMetrics, TrainState
from noloco_jax.train.messages import Messages
from noloco_jax.train.sync import OuterSteps, Sync


@dataclass(frozen=True)
class Run:
    """The parts of a run, all made and checked before its first step.

    Attributes:
      config: configuration of the run.
      programs: compiled programs.
      batches: training data of this process's replicas.
      evaluate: fast weights -> the figures of an evaluation.
      checkpoints: storage of the state.
      totals: totals of the run's earlier starts.
      messages: bytes that replicas send each other.
      peak_flops_per_second: peak rate of all devices together; None if unknown.
      metrics: writer of the figures.
      progress: console output.
      stop: request to stop the run.
      sync: exchanges with other replicas between inner steps.
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
    sync: Sync


@dataclass(frozen=True)
class Outcome:
    """Result of a run.

    Attributes:
      state: state after the last step taken.
      step: number of that step.
      evaluation: the last evaluation of this start; empty if there was none.
      finished: True if all steps are taken and evaluated, False if the run was told to stop or parts before.
    """

    state: TrainState
    step: int
    evaluation: dict[str, Any]
    finished: bool


def is_evaluated(config: TrainConfig, step: int) -> bool:
    """Return True if the run is evaluated after inner step `step`."""
    every = config.eval_every
    return step == config.num_steps or (0 < step < config.num_steps and every > 0 and step % every == 0)


def train_steps(run: Run, state: TrainState, start: int, *, evaluate_first: bool = False) -> Outcome:
    """Train from step `start` + 1 to the last, or until the run is told to stop.

    A run that is told to stop only saves, since its time may be short; its next start makes up for a skipped evaluation
    (`evaluate_first`). Otherwise the evaluation precedes the save, so that a run that is killed in between repeats
    both.

    Args:
      run: the parts of the run.
      state: state after step `start`.
      start: inner steps taken so far.
      evaluate_first: evaluate `state` before the first step.
    """
    log = _StepLog(run, _unlogged(run, state, start))
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
        state, step, stride = sync.before_step(state, step, partial(_steps_at_once, config))
        _report_news(run, step, log)
        step += stride
        run.stop.current = f"step {step}"
        state, metrics, waited = _inner_step(run, state, step)
        log.write_previous()
        state, outer_steps = sync.after_step(state, step, stride)
        is_last, is_due = step == config.num_steps, run.stop.is_due()
        is_stopping = is_due or (sync.end_reason is not None and not is_last)
        bytes_merging = 0
        if is_last:
            state = sync.finish(state, step)
            bytes_merging = run.messages.final_merge
        log.remember(step, stride, metrics, waited, outer_steps, bytes_merging, sync.bytes_sent())
        _report_news(run, step, log)

        is_evaluating = is_evaluated(config, step) and not is_stopping
        is_saving = is_last or is_stopping or step % config.checkpoint_every == 0
        if is_evaluating or is_saving:
            log.write_previous()
        if is_evaluating:
            run.stop.current = f"the evaluation of step {step} and the next step"
            evaluation = _evaluate(run, state, step, log)
        if is_last or is_stopping:
            sync.leave(is_last and not is_stopping)
        if is_saving:
            state, beside = sync.settle(state)
            if beside is not None:
                _check_finite(config, state, step)
                run.checkpoints.save(step, state, run.batches.get_state(), log.totals, beside)
        if is_evaluating or is_saving:
            log.restart_clock()
        if is_stopping:
            return Outcome(state, step, evaluation, finished=False)
    return Outcome(state, step, evaluation, finished=True)


def _check_finite(config: TrainConfig, state: TrainState, step: int) -> None:
    """Raise `UserError` rather than save what no run can continue from; a step has the loss of earlier weights."""
    if not is_finite(state):
        raise UserError(
            f"the state after step {step} has values that are not finite, and is not saved: lower "
            f"inner.lr={config.inner.lr:g}, then resume from the last checkpoint or start anew"
        )


def _steps_at_once(config: TrainConfig, step: int) -> int:
    """Return the steps after `step` up to the next evaluation, save or end of the run."""
    due = [every - step % every for every in (config.eval_every, config.checkpoint_every) if every > 0]
    return min([config.num_steps - step, *due])


def _inner_step(run: Run, state: TrainState, step: int) -> tuple[TrainState, StepMetrics, float]:
    """Dispatch a step; also return the seconds spent waiting for its batch."""
    params, inner, outer = state
    started = time.perf_counter()
    batch = next(run.batches)
    waited = time.perf_counter() - started
    params, inner, metrics = run.programs.inner_step(params, inner, batch, np.int32(step))
    return TrainState(params, inner, outer), metrics, waited


def _report_news(run: Run, step: int, log: "_StepLog") -> None:
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
    """A dispatched step, the number of schedule steps it stands for, and the run's totals including it.

    `sent` is as `Sync.bytes_sent` says.
    """

    step: int
    stride: int
    metrics: StepMetrics
    outer: OuterSteps | None
    totals: Totals
    sent: int | float | None


class _StepLog:
    """Log of steps, written one step late, so that the device computes the next step while the host writes."""

    def __init__(self, run: Run, unlogged: OuterSteps | None):
        self._run = run
        self._lr = learning_rates(run.config.inner, run.config.num_steps)
        self._flops_per_token = model_flops_per_token(run.config)
        self._throughput = Throughput()
        self._logs_every_outer_step = _logs_every_outer_step(run.config)
        self._unlogged = unlogged
        self._sent: int | float | None = None  # of exchanges that were never logged, as `Sync.bytes_sent` says
        self._proportion, self._rise = Proportion(), Rise()
        self._totals, self._clock = run.totals, Clock(run.totals.seconds)
        self._previous: _Step | None = None

    @property
    def totals(self) -> Totals:
        """Return the run's totals including the last dispatched step, with the seconds up to now."""
        return replace(self._totals, seconds=self._clock.seconds())

    def remember(
        self,
        step: int,
        stride: int,
        metrics: StepMetrics,
        waited: float,
        outer_steps: OuterSteps | None,
        bytes_merging: int | float,
        bytes_sent: int | float | None,
    ) -> None:
        """Keep a dispatched step until `write_previous`; `bytes_sent` is as `Sync.bytes_sent` says."""
        bytes_outer = self._bytes_of(outer_steps) if bytes_sent is None else bytes_sent
        self._totals = self._totals.plus(
            tokens=self._run.config.tokens_per_step,
            bytes_sent_total=self._run.messages.inner_step + bytes_outer + bytes_merging,
            seconds_waiting_for_data=waited,
            seconds_in_outer_steps=outer_steps.seconds if outer_steps else 0.0,
        )
        self._previous = _Step(step, stride, metrics, outer_steps, self._totals, bytes_sent)

    def _bytes_of(self, outer_steps: OuterSteps | None) -> int | float:
        if outer_steps is None:
            return 0
        return outer_steps.count * self._run.messages.outer_step

    def restart_clock(self) -> None:
        """Reset throughput timing, to exclude evaluations and saves."""
        self._throughput.reset()

    def write_previous(self) -> None:
        """Wait for the remembered step, if there is one, and write and show its figures.

        Raises:
          UserError: if its loss is not finite.
        """
        if self._previous is None:
            return
        (step, stride, metrics, outer_steps, totals, sent), self._previous = self._previous, None
        self._sent = sent if self._sent is None or sent is None else self._sent + sent
        self._unlogged = outer_steps if self._unlogged is None else self._unlogged + outer_steps
        run, config = self._run, self._run.config
        losses = _by_replica(metrics.loss)
        loss = float(np.mean(list(losses.values())))
        self._throughput.step(config.tokens_per_step)
        speed, lr = self._throughput.tokens_per_second, float(self._lr[step - 1])
        is_last = step == config.num_steps
        is_logged = step % config.log_every < stride or is_last
        is_logged |= outer_steps is not None and self._logs_every_outer_step
        if is_logged or not np.isfinite(loss):
            norms = _by_replica(metrics.grad_norm).values()
            values = {"loss": loss, "lr": lr, "grad_norm": float(np.mean(list(norms))), "tokens_per_second": speed}
            if run.peak_flops_per_second is not None:
                values["mfu"] = mfu(speed, self._flops_per_token, run.peak_flops_per_second)
            more = {"loss_replicas": losses} if config.log_replicas else {}
            more |= self._figures_of(step)
            more |= replace(totals, seconds=self._clock.seconds()).to_json()
            run.metrics.write(step, "train", **values, **more, time=wall_clock())
        if not np.isfinite(loss) and step == stride:
            raise UserError(
                f"the loss is {loss} at the first step, before any update: the initial weights or the batch are at "
                "fault, such as token ids outside the vocabulary or a model that overflows model.dtype="
                f"{config.model.dtype!r}"
            )
        if not np.isfinite(loss):
            raise UserError(
                f"the loss is {loss} at step {step}: lower inner.lr={config.inner.lr:g} or raise "
                f"inner.warmup_steps={config.inner.warmup_steps}, then resume from the last checkpoint or start anew"
            )
        run.progress.update(step, loss, lr, speed)
        if line := self._rise.told(step, loss):
            run.progress.note(line)
        if is_logged and self._unlogged:
            groups = run.sync.groups(self._unlogged.last)
            if groups is not None:
                run.progress.outer(step, self._unlogged.count, self._unlogged.last, groups, self._unlogged.seconds)
            if self._unlogged.moved is not None:
                for line in self._proportion.unusual(_by_replica(self._unlogged.moved)):
                    run.progress.note(line)
            self._unlogged = self._sent = None

    def _figures_of(self, step: int) -> dict[str, Any]:
        """Return the bytes of the step, and the figures of the outer steps since they were last logged."""
        figures: dict[str, Any] = {}
        if self._run.messages.inner_step:
            figures["bytes_sent_inner_step"] = self._run.messages.inner_step
        if self._unlogged is not None:
            figures["outer_steps"] = self._unlogged.count
            figures["outer_step_seconds"] = self._unlogged.seconds
            figures["bytes_sent"] = self._bytes_of(self._unlogged) if self._sent is None else self._sent
            figures["round"] = self._unlogged.last
        return figures


def _logs_every_outer_step(config: TrainConfig) -> bool:
    """Return True if each outer step is logged; frequent ones of fragments are logged together at `log_every`."""
    schedule = schedule_of(config)
    return schedule is None or schedule.fragments == 1 or schedule.gap >= config.log_every


def _unlogged(run: Run, state: TrainState, start: int) -> OuterSteps | None:
    """Return outer steps before `start` that were never logged; their durations are unknown."""
    schedule = schedule_of(run.config)
    if schedule is None or state.outer is None or run.sync.groups(0) is None or _logs_every_outer_step(run.config):
        return None
    taken = int(state.outer.num_outer_steps)
    if run.metrics.last_round is not None:
        first = run.metrics.last_round + 1
    else:
        first = max(taken - (schedule.total(start) - schedule.total(start - start % run.config.log_every)), 0)
    return OuterSteps(first, taken - first, 0.0, None) if first < taken else None


def _by_replica(values: jax.Array) -> dict[int, float]:
    """Return replica -> value, for this process's replicas, of values (N,) with each on all devices of its replica."""
    found: dict[int, float] = {}
    for shard in values.addressable_shards:
        first = shard.index[0].start or 0
        found.update(enumerate(np.asarray(shard.data).tolist(), start=first))
    return dict(sorted(found.items()))
