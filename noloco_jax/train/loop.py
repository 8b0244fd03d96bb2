"""Training loop: inner steps, outer steps, evaluations and saves."""

import time
from functools import partial

import jax
import numpy as np

from noloco_jax.config import TrainConfig
from noloco_jax.errors import UserError
from noloco_jax.metrics.finite import is_finite
from noloco_jax.spmd.programs import StepMetrics, TrainState
from noloco_jax.train.context import Outcome, RunContext
from noloco_jax.train.step_log import StepLog, wall_clock


def train_steps(run: RunContext, state: TrainState, start: int) -> Outcome:
    """Train from step `start` + 1 to the last, or until the run is told to stop, and save.

    The evaluation of a step precedes its save, so that a run that is killed in between repeats both.

    Args:
      run: the parts of the run.
      state: state after step `start`.
      start: inner steps taken so far.
    """
    log = StepLog(run, state)
    try:
        return _train_steps(run, state, start, log)
    except UserError:
        log.write_previous()
        raise


def _train_steps(run: RunContext, state: TrainState, step: int, log: StepLog) -> Outcome:
    config, sync = run.config, run.sync
    while step < config.num_steps:
        state, step, stride = sync.before_step(state, step, partial(_steps_at_once, config))
        _report_events(run, step, log)
        step += stride
        run.stop.current = f"step {step}"
        taken = None
        if stride:
            state, metrics, waited = _inner_step(run, state, step)
            log.write_previous()
            state, outer_steps = sync.after_step(state, step, stride)
            taken = step, stride, metrics, waited, outer_steps
        is_last, is_due = step == config.num_steps, run.stop.is_due()
        is_stopping = not is_last and (is_due or sync.end_reason is not None)
        bytes_merging = 0
        if is_last:
            state = sync.finish(state, step)
            bytes_merging = run.bytes_sent.final_merge
        if taken is not None:
            log.remember(*taken, bytes_merging, sync.bytes_sent())
        _report_events(run, step, log)

        is_evaluating = is_last or (config.eval_every > 0 and step % config.eval_every == 0)
        is_saving = is_last or is_stopping or step % config.checkpoint_every == 0
        if is_evaluating or is_saving:
            log.write_previous()
        if is_evaluating:
            run.stop.current = f"the evaluation of step {step} and the next step"
            _evaluate(run, state, step, log)
        if is_last or is_stopping:
            sync.leave(is_last)
        if is_saving:
            state, sync_state = sync.settle(state)
            if sync_state is not None:
                _check_finite(state, step)
                run.checkpoints.save(step, state, run.batches.get_state(), log.totals, sync_state)
        if is_evaluating or is_saving:
            log.restart_clock()
        if is_stopping:
            return Outcome(state, step, finished=False)
    return Outcome(state, step, finished=True)


def _check_finite(state: TrainState, step: int) -> None:
    """Raise `UserError` rather than save what no run can continue from; a step has the loss of earlier weights.

    A state is finite when a run starts, see `phases.first_state`, so that the steps since then are to blame.
    """
    if not is_finite(state):
        raise UserError(
            f"the state after step {step} has values that are not finite, and is not saved: resume from the last "
            "checkpoint or start anew, with a lower --config.inner.lr or more --config.inner.warmup_steps"
        )


def _steps_at_once(config: TrainConfig, step: int) -> int:
    """Return the steps after `step` up to the next evaluation, save or end of the run."""
    due = [every - step % every for every in (config.eval_every, config.checkpoint_every) if every > 0]
    return min([config.num_steps - step, *due])


def _inner_step(run: RunContext, state: TrainState, step: int) -> tuple[TrainState, StepMetrics, float]:
    """Dispatch a step; also return the seconds spent waiting for its batch."""
    started = time.perf_counter()
    batch = next(run.batches)
    waited = time.perf_counter() - started
    params, inner, metrics = run.programs.inner_step(state.params, state.inner, batch, np.int32(step))
    return TrainState(params, inner, state.outer), metrics, waited


def _report_events(run: RunContext, step: int, log: StepLog) -> None:
    for news in run.sync.news(log.totals.seconds):
        if news.line:
            run.progress.note(news.line)
        if news.kind:
            run.metrics.write(step, news.kind, **news.figures)


def _evaluate(run: RunContext, state: TrainState, step: int, log: StepLog) -> None:
    run.sync.wait()  # an exchange under way is no part of the evaluation, and collectives have one order everywhere
    jax.block_until_ready(state.params)
    started = time.perf_counter()
    evaluation = run.evaluate(state.params)
    if jax.process_index() == 0:
        totals, own = log.totals, time.perf_counter() - started
        figures = {"tokens": totals.tokens, "seconds": totals.seconds, "evaluation_seconds": own}
        run.metrics.write(step, "eval", **evaluation, **figures, time=wall_clock())
    run.progress.evaluation(step, evaluation)
