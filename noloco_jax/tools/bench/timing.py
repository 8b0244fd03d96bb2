"""Timing of inner and outer steps, dispatched as the trainer dispatches them, and a trace of a few."""

import itertools
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from noloco_jax.config import TrainConfig
from noloco_jax.optim import prng
from noloco_jax.spmd.batches import GlobalBatches, replicas_read_here
from noloco_jax.spmd.programs import Programs

_WARMUP = 3  # inner steps before the first that is timed
_OUTER_STEPS = 5  # timed
_TRACED_STEPS = 3
_DIFFERENT_BATCHES = 4
_DOCUMENTS = 4  # that begin in a sequence, roughly, with a document mask


class RandomStreams:
    """Batches of random tokens in place of replicas' documents: a few different ones of each, in turn."""

    def __init__(self, config: TrainConfig, replicas: Iterable[int]):
        shape = (config.data.batch_size, config.data.sequence_length)
        rngs = {replica: np.random.default_rng([config.seed, replica]) for replica in replicas}

        def batch(rng: np.random.Generator) -> dict[str, np.ndarray]:
            made = {name: rng.integers(0, config.model.vocab_size, shape, np.int32) for name in ("input_ids", "labels")}
            if config.data.document_mask:
                begins = rng.random(shape) < _DOCUMENTS / config.data.sequence_length
                made["segment_ids"] = 1 + np.cumsum(begins, axis=1, dtype=np.int32)
            return made

        self._batches = itertools.cycle(
            {replica: batch(rng) for replica, rng in rngs.items()} for _ in range(_DIFFERENT_BATCHES)
        )

    def __next__(self) -> dict[int, dict[str, np.ndarray]]:
        return next(self._batches)

    def get_state(self) -> dict[int, dict]:
        return {}  # random batches have no position


class TimedRun:
    """A run's state on its devices, taken on by inner and outer steps.

    Args:
      config: the run.
      programs: its programs, compiled.
    """

    def __init__(self, config: TrainConfig, programs: Programs):
        self._programs = programs
        replicas = replicas_read_here(programs.mesh, config.num_replicas)
        self._batches = GlobalBatches(RandomStreams(config, replicas), programs)
        self._params, self._inner, self._outer = programs.init(prng.key(config.seed))
        self._steps = 0

    def use(self, programs: Programs) -> None:
        """Take the following steps by these programs of the same run."""
        self._programs = programs

    def inner(self) -> Any:
        """Dispatch an inner step; return its metrics, which are ready when it is done."""
        self._steps += 1
        self._params, self._inner, metrics = self._programs.inner_step(
            self._params, self._inner, next(self._batches), np.int32(self._steps)
        )
        return metrics

    def outer(self, number: int) -> float:
        """Take outer step `number` (0, 1, ...), with nothing else in flight; return the seconds it took."""
        assert self._programs.outer_step is not None and self._outer is not None
        self._outer = self._outer._replace(
            num_outer_steps=jax.device_put(np.int32(number), self._outer.num_outer_steps.sharding)
        )
        jax.block_until_ready(self._params)
        started = time.perf_counter()
        self._params, self._outer = jax.block_until_ready(self._programs.outer_step(self._params, self._outer))
        return time.perf_counter() - started


def inner_times(run: TimedRun, steps: int) -> list[float]:
    """Return seconds from the end of each inner step to the end of the next, one dispatched ahead as in training."""
    metrics, ends = run.inner(), []
    for _ in range(_WARMUP + steps):
        following = run.inner()
        jax.block_until_ready(metrics)
        ends.append(time.perf_counter())
        metrics = following
    return np.diff(ends)[-steps:].tolist()


def outer_times(run: TimedRun) -> list[float]:
    """Return the seconds of some outer steps of different draws, each after an inner step.

    Every draw is taken once before it is timed: partners that exchange for the first time connect first.
    """
    seconds = []
    for draw in (*range(_OUTER_STEPS), *range(_OUTER_STEPS)):
        run.inner()
        seconds.append(run.outer(draw))
    return seconds[_OUTER_STEPS:]


def trace(run: TimedRun, folder: Path, *, with_outer: bool) -> None:
    """Write a profile of a few inner steps and one outer step for xprof, and for Perfetto."""
    with jax.profiler.trace(folder, create_perfetto_trace=True):
        for number in range(_TRACED_STEPS):
            with jax.profiler.StepTraceAnnotation("inner_step", step_num=number):
                metrics = run.inner()
        jax.block_until_ready(metrics)
        if with_outer:
            with jax.profiler.StepTraceAnnotation("outer_step", step_num=_TRACED_STEPS):
                run.outer(0)


def quartiles(seconds: list[float]) -> dict[str, float]:
    """Return the median and the quartiles beside it."""
    lower, median, upper = np.percentile(seconds, [25, 50, 75]).tolist()
    return {"median": median, "lower_quartile": lower, "upper_quartile": upper}
