"""Log of inner and outer steps: metrics lines, the console's progress, warnings, totals and throughput."""

import collections
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from noloco_jax.checkpoint.record import Totals
from noloco_jax.errors import UserError
from noloco_jax.metrics.peaks import mfu, model_flops_per_token
from noloco_jax.spmd.inner import learning_rates
from noloco_jax.spmd.programs import StepMetrics, TrainState
from noloco_jax.train.context import RunContext
from noloco_jax.train.sync import OuterStepRecord


class _Step(NamedTuple):
    """A dispatched step, the number of schedule steps it stands for, and the run's totals including it.

    `sent` is as `Sync.bytes_sent` says.
    """

    step: int
    stride: int
    metrics: StepMetrics
    outer: OuterStepRecord | None
    totals: Totals
    sent: int | float | None


class StepLog:
    """Log of steps, written one step late, so that the device computes the next step while the host writes."""

    def __init__(self, run: RunContext, state: TrainState):
        self._run = run
        self._lr = learning_rates(run.config.inner, run.config.num_steps)
        self._flops_per_token = model_flops_per_token(run.config.model, run.config.data.sequence_length)
        self._throughput = Throughput()
        self._unlogged = _unlogged(run, state)
        self._sent: int | float | None = None  # of exchanges that were never logged, as `Sync.bytes_sent` says
        self._totals, self._start = run.totals, time.perf_counter() - run.totals.seconds
        self._previous: _Step | None = None

    @property
    def totals(self) -> Totals:
        """Return the run's totals including the last dispatched step, with the seconds up to now."""
        unlogged = 0 if self._unlogged is None else self._unlogged.count
        return replace(self._totals, seconds=time.perf_counter() - self._start, unlogged_outer_steps=unlogged)

    def remember(
        self,
        step: int,
        stride: int,
        metrics: StepMetrics,
        waited: float,
        outer_steps: OuterStepRecord | None,
        bytes_merging: int | float,
        bytes_sent: int | float | None,
    ) -> None:
        """Keep a dispatched step until `write_previous`; `bytes_sent` is as `Sync.bytes_sent` says."""
        bytes_outer = self._bytes_of(outer_steps) if bytes_sent is None else bytes_sent
        self._totals = self._totals.plus(
            tokens=self._run.config.tokens_per_step,
            bytes_sent_total=self._run.bytes_sent.inner_step + bytes_outer + bytes_merging,
            seconds_waiting_for_data=waited,
            seconds_in_outer_steps=outer_steps.seconds if outer_steps else 0.0,
        )
        self._previous = _Step(step, stride, metrics, outer_steps, self._totals, bytes_sent)

    def _bytes_of(self, outer_steps: OuterStepRecord | None) -> int | float:
        if outer_steps is None:
            return 0
        return outer_steps.count * self._run.bytes_sent.outer_step

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
        if is_logged or not np.isfinite(loss):
            norms = _by_replica(metrics.grad_norm).values()
            values = {"loss": loss, "lr": lr, "grad_norm": float(np.mean(list(norms))), "tokens_per_second": speed}
            if run.peak_flops_per_second is not None:
                values["mfu"] = mfu(speed, self._flops_per_token, run.peak_flops_per_second)
            more = {"loss_replicas": losses} if config.log_replicas else {}
            more |= self._figures_of(step)
            more |= replace(totals, seconds=time.perf_counter() - self._start).figures
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
        outer = (self._unlogged.count, self._unlogged.seconds) if is_logged and self._unlogged else (0, 0.0)
        run.progress.update(step, loss, lr, speed, *outer)
        if is_logged and self._unlogged:
            self._unlogged = self._sent = None

    def _figures_of(self, step: int) -> dict[str, Any]:
        """Return the bytes of the step, and the figures of the outer steps since they were last logged."""
        figures: dict[str, Any] = {}
        if self._run.bytes_sent.inner_step:
            figures["bytes_sent_inner_step"] = self._run.bytes_sent.inner_step
        if self._unlogged is not None:
            figures["outer_steps"] = self._unlogged.count
            figures["outer_step_seconds"] = self._unlogged.seconds
            figures["bytes_sent"] = self._bytes_of(self._unlogged) if self._sent is None else self._sent
            figures["round"] = self._unlogged.last + 1  # counted from 1, as everywhere in what a run says
        return figures


def _unlogged(run: RunContext, state: TrainState) -> OuterStepRecord | None:
    """Return the outer steps before this start that no line has yet; their durations are unknown."""
    count = run.totals.unlogged_outer_steps
    if not count or state.outer is None:
        return None
    return OuterStepRecord(int(state.outer.num_outer_steps) - count, count, 0.0)


def _by_replica(values: jax.Array) -> dict[int, float]:
    """Return replica -> value, for this process's replicas, of values (N,) with each on all devices of its replica."""
    found: dict[int, float] = {}
    for shard in values.addressable_shards:
        first = shard.index[0].start or 0
        found.update(enumerate(np.asarray(shard.data).tolist(), start=first))
    return dict(sorted(found.items()))


class Throughput:
    """Tokens per second over the last `window` steps.

    `reset()` restarts the clock after anything but a training step: a compilation, an evaluation, a checkpoint.
    """

    def __init__(self, window: int = 50, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._marks: collections.deque[tuple[float, int]] = collections.deque(maxlen=window + 1)
        self.reset()

    def reset(self) -> None:
        """Discard the steps so far; the next one is timed from now."""
        self._marks.clear()
        self._marks.append((self._clock(), 0))

    def step(self, tokens: int) -> None:
        """Count a finished step's tokens."""
        self._marks.append((self._clock(), self._marks[-1][1] + tokens))

    @property
    def tokens_per_second(self) -> float:
        """Return the throughput; 0 before the first step."""
        (start, before), (end, after) = self._marks[0], self._marks[-1]
        return (after - before) / (end - start) if end > start else 0.0


def wall_clock() -> str:
    """Return the current time in the format of the run's records: 2026-11-22T12:00:00+0000."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
