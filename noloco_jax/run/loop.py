"""The training loop: inner steps, outer steps, and what happens between them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from noloco_jax.cluster.processes import Processes
from noloco_jax.cluster.stop import Stop
from noloco_jax.config import TrainConfig
from noloco_jax.data import HostBatch
from noloco_jax.errors import UserError
from noloco_jax.meetings import Meetings
from noloco_jax.methods import meetings_of, method_of
from noloco_jax.run.checkpoint import Checkpointer
from noloco_jax.run.console import Progress
from noloco_jax.run.evaluate import evaluate, own_perplexity
from noloco_jax.run.exchanges import LAST_SECONDS, exchange_figures, exchange_line
from noloco_jax.run.flops import mfu, model_flops_per_token
from noloco_jax.run.messages import Messages, may_send_in_inner_steps, shares_moments
from noloco_jax.run.metrics import MetricWriter
from noloco_jax.run.proportion import Proportion
from noloco_jax.run.rise import Rise
from noloco_jax.run.throughput import Throughput
from noloco_jax.run.totals import Clock, Totals, wall_clock
from noloco_jax.spmd.batches import GlobalBatches
from noloco_jax.spmd.inner import learning_rates
from noloco_jax.spmd.programs import Programs, StepMetrics, TrainState

if TYPE_CHECKING:  # for whose imports a run of all replicas need not wait
    from noloco_jax.islands.steps import IslandSteps
    from noloco_jax.run.island_log import IslandLog


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
      island: the outer steps of a run that is one of several islands.
      island_log: what happens to that island.
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
    island: "IslandSteps | None" = None
    island_log: "IslandLog | None" = None


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
    """Outer steps that were taken: how many, from which round on, and the seconds that this process was in them.

    `moved` is how far replicas had moved before the last of them that was looked at, (N,); None where it is not known.
    """

    first: int
    count: int
    seconds: float
    moved: jax.Array | None

    @property
    def last(self) -> int:
        return self.first + self.count - 1

    def __add__(self, later: "_OuterSteps | None") -> "_OuterSteps":
        if later is None:
            return self
        return _OuterSteps(self.first, self.count + later.count, self.seconds + later.seconds, later.moved)


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
    config = run.config
    evaluation = _evaluate(run, state, start, log) if evaluate_first else {}
    meetings = meetings_of(config)
    step = start
    while step < config.num_steps:
        stride = 1  # steps of the schedule that an inner step stands for
        if run.island is not None:
            state, step = _hear_of_others(run, run.island, state, step, log)
            state, stride = run.island.advance(state, step, _steps_at_once(config, step))
        step += stride
        run.hooks.before_step(step)
        state, metrics, waited = _inner_step(run, state, step)
        log.write_previous()
        outer_steps = None
        if meetings is not None:
            state = _correct_steps(run, state, meetings, step)
            state, outer_steps = _outer_steps(run, state, step, meetings.total(step) - meetings.total(step - stride))
        bytes_merging = 0
        if step == config.num_steps and run.programs.final_merge is not None:
            state = state._replace(params=run.programs.final_merge(state.params))
            bytes_merging = run.messages.of_final_merge()
        log.remember(step, stride, metrics, waited, outer_steps, bytes_merging)

        is_last, is_stopping = step == config.num_steps, run.stop.at(step)
        if is_last and run.island is not None:
            state = run.island.settle(state, LAST_SECONDS)
            _tell_of_exchanges(run, run.island, step, log)
        is_evaluating = is_evaluated(config, step) and not is_stopping
        is_saving = is_last or is_stopping or step % config.checkpoint_every == 0
        if is_evaluating or is_saving:
            log.write_previous()
        if is_evaluating:
            evaluation = _evaluate(run, state, step, log)
        if run.island is not None and (is_last or is_stopping):
            run.island.station.leave(finished=not is_stopping)
        if is_saving:
            state = _save(run, state, step, log)
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


def _outer_steps(run: Run, state: TrainState, step: int, count: int) -> tuple[TrainState, _OuterSteps | None]:
    """Takes that many outer steps."""
    if count == 0:
        return state, None
    params, inner, outer = state
    assert outer is not None
    round = int(outer.round)
    moved = None if run.programs.moved is None else run.programs.moved(params, outer)
    jax.block_until_ready(params)
    started = time.perf_counter()
    if run.island is not None:
        state = run.island.take(state, step, count)
        if run.island_log is not None:
            for number in range(round, round + count):
                run.island_log.round(number, step, run.island.gave_way)
        return state, _OuterSteps(round, count, time.perf_counter() - started, moved)
    assert run.programs.outer_step is not None
    for number in range(round, round + count):
        params, outer = run.programs.outer_step(params, outer)
        if run.programs.share_moments is not None and shares_moments(run.config, number):
            inner = run.programs.share_moments(inner, np.int32(number))
    jax.block_until_ready((params, inner, outer))
    return TrainState(params, inner, outer), _OuterSteps(round, count, time.perf_counter() - started, moved)


def _correct_steps(run: Run, state: TrainState, meetings: Meetings, step: int) -> TrainState:
    """Enters the corrections that are due after inner step `step`."""
    if run.programs.correct_step is None:
        return state
    params, inner, outer = state
    assert outer is not None
    for _ in range(int(outer.round) - int(outer.rule.entered) - meetings.on_the_way(step)):
        params, outer = run.programs.correct_step(params, outer)
    return TrainState(params, inner, outer)


def _hear_of_others(
    run: Run, island: "IslandSteps", state: TrainState, step: int, log: "_StepLog"
) -> tuple[TrainState, int]:
    """Enters what has come from other islands; (state, the inner steps behind it), as it may be another's."""
    state, behind = island.enter(state, step)
    if behind != step:
        run.progress.note(f"after step {step}: goes on from another island's weights, after step {behind}")
    _tell_of_exchanges(run, island, step, log)
    return state, behind


def _tell_of_exchanges(run: Run, island: "IslandSteps", step: int, log: "_StepLog") -> None:
    """Writes and shows what has become of messages."""
    met, status = island.station.take_met()
    for one in met:
        size = run.messages.of_outer_step(one.round)
        run.progress.note(exchange_line(one, status, size))
        if run.island_log is not None:
            run.island_log.exchange(one, size if one.outcome in ("met", "late") else 0)
            figures = exchange_figures(one, status, island.seconds_exposed, run.island_log, log.totals.seconds)
            run.metrics.write(step, "exchange", **figures)


def _save(run: Run, state: TrainState, step: int, log: "_StepLog") -> TrainState:
    """Saves; an island first enters what has come, as its journal tells of it."""
    if run.island is None:
        run.checkpoints.save(step, state, run.batches.get_state(), log.totals)
        return state
    state, journal = run.island.at_rest(state)
    if journal is not None:  # else the state is about to be replaced by another island's
        run.checkpoints.save(step, state, run.batches.get_state(), log.totals, island=journal.to_json())
    return state


def _evaluate(run: Run, state: TrainState, step: int, log: "_StepLog") -> dict[str, Any]:
    if run.island_log is None:
        evaluation = evaluate(run.programs, state.params, run.validation)
    else:
        perplexity = own_perplexity(run.programs, state.params, run.validation)
        evaluation = {"island": run.island_log.name, "perplexity": perplexity}  # it has no other replica to merge with
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
    outer: _OuterSteps | None
    totals: Totals


class _StepLog:
    """Writes the figures of steps, each one step late, so that the device has the next to do while the host writes."""

    def __init__(self, run: Run, untold: _OuterSteps | None = None):
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
        outer_steps: _OuterSteps | None,
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

    def _bytes_of(self, outer_steps: _OuterSteps | None) -> int | float:
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
            if run.island is not None:  # which tells of its exchanges when they are over
                self._untold = None
                return
            groups = method_of(config).groups(config, self._untold.last)
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
    meetings = meetings_of(config)
    return meetings is None or meetings.fragments == 1 or meetings.shortest_gap >= config.log_every


def _untold(run: Run, state: TrainState, start: int) -> _OuterSteps | None:
    """The outer steps up to step `start` that no line of an earlier start of the run tells of, which had them in mind
    for its next line; their seconds are not known any more."""
    meetings = meetings_of(run.config)
    if meetings is None or state.outer is None or run.island is not None or _tells_every_outer_step(run.config):
        return None
    taken = int(state.outer.round)
    since_last_line = meetings.total(start) - meetings.total(start - start % run.config.log_every)
    first = taken - since_last_line
    if run.metrics.last_round is not None:  # a line more, where the run was to end at that step
        first = max(first, run.metrics.last_round + 1)
    return _OuterSteps(first, taken - first, 0.0, None) if first < taken else None


def _by_replica(values: jax.Array) -> dict[int, float]:
    """The values (N,) of this process's replicas, by their numbers; each is on all devices of its replica."""
    found: dict[int, float] = {}
    for shard in values.addressable_shards:
        first = shard.index[0].start or 0
        found.update(enumerate(np.asarray(shard.data).tolist(), start=first))
    return dict(sorted(found.items()))
