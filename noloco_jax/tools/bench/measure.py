"""Measurement of one variant on the devices of its process: compilation, steps, memory, messages and data.

Steps are dispatched as the trainer dispatches them.
"""

import contextlib
import itertools
import platform
import time
from collections.abc import Iterable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
import numpy as np

from noloco_jax.cluster.host import use_cpu_cores, use_gpu_memory
from noloco_jax.config import TrainConfig, from_dict
from noloco_jax.data import RunData, check_vocabulary, load_tokenizer
from noloco_jax.errors import UserError
from noloco_jax.metrics.memory import compiled_peak, measured_peak, program_memory
from noloco_jax.metrics.peaks import mfu, model_flops_per_token, peak_of
from noloco_jax.optim import prng
from noloco_jax.optim.methods import METHODS
from noloco_jax.spmd.batches import GlobalBatches, replicas_read_here
from noloco_jax.spmd.compile import compile_programs
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.programs import Programs, build_programs
from noloco_jax.tools.bench.command import FAILED, REFUSED, Result
from noloco_jax.train.bytes_sent import bytes_sent_of, num_pairings

# A trace names the operations of a CUDA graph after the graph; no sequence of kernels is long enough to become one.
_NO_CUDA_GRAPHS = {"xla_gpu_graph_min_graph_size": 2**30}
_STEPS = ("inner_step", "outer_step")
_UNTIMED_ROUNDS = 8  # batches of each replica that may have been prepared before the clock starts
_WARMUP = 3  # inner steps before the first that is timed
_OUTER_STEPS = 5  # timed
_TRACED_STEPS = 3
_DIFFERENT_BATCHES = 4
_DOCUMENTS = 4  # that begin in a sequence, roughly, with a document mask


def work(sender: Connection, config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Measure a configuration, as plain values, in this process; send the result, or `error` and `status`."""
    use_gpu_memory()
    run = from_dict(config)
    use_cpu_cores(run.mesh, run.num_replicas, run.delay)
    try:
        result = measure(run, **options)
    except UserError as error:
        result = {"error": str(error), "status": REFUSED}
    except (jax.errors.JaxRuntimeError, MemoryError) as error:  # the device's memory, first of all
        result = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", "status": FAILED}
    sender.send(result)


def measure(
    config: TrainConfig,
    *,
    steps: int,
    data_seconds: float = 0.0,
    compile_only: bool = False,
    profile: Path | None = None,
) -> Result:
    """Measure a run's programs; return plain values, by names that hold their unit.

    Compilations are timed without a cache. Figures that do not apply are None or missing: those of outer steps for
    methods without them, MFU on devices without a published peak, those of the data where they are not there
    (`data_missing` says why).

    Args:
      config: the run.
      steps: inner steps to time.
      data_seconds: seconds to read the data for; 0: not at all.
      compile_only: only compile; allocate and run nothing.
      profile: folder for a trace, or None.

    Raises:
      UserError: if the run does not fit the devices.
    """
    jax.config.update("jax_enable_compilation_cache", False)
    devices = jax.devices()
    programs = build_programs(config, make_mesh(config.mesh, config.num_replicas, devices))
    programs = compile_programs(programs, offload=config.outer.offload, only=_STEPS)
    memory, messages = program_memory(programs), bytes_sent_of(config, programs.mesh.shape)
    result: Result = {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "device": devices[0].device_kind,
        "mesh": dict(programs.mesh.shape),
        "compile_seconds": programs.compile_seconds,
        "pairings": num_pairings(config) or None,
        "bytes_sent": messages.inner_step if METHODS[config.method].averages_gradients else messages.outer_step,
        "bytes_sent_inner_step": messages.inner_step or None,
        "program_memory_bytes": memory,
        "peak_memory_bytes": compiled_peak(memory),
        "peak_memory_from": "the compiled programs",
    }
    if not compile_only:
        result |= _data_figures(config, data_seconds) | _step_figures(config, programs, steps, profile)
    return result


def _data_figures(config: TrainConfig, seconds: float) -> Result:
    try:
        return {"data_tokens_per_second": data_rate(config, seconds) if seconds else None, "data_missing": ""}
    except UserError as error:
        return {"data_tokens_per_second": None, "data_missing": str(error)}


def _step_figures(config: TrainConfig, programs: Programs, steps: int, profile: Path | None) -> Result:
    run = TimedRun(config, programs)
    devices = programs.mesh.devices.flatten().tolist()
    inner = quartiles(inner_times(run, steps))
    tokens_per_second = config.tokens_per_step / inner["median"]
    flops_per_token = model_flops_per_token(config.model, config.data.sequence_length)
    peak = peak_of(devices[0].device_kind, config.model.dtype)
    result: Result = {
        "step_seconds": inner,
        "tokens_per_second": tokens_per_second,
        "model_flops_per_token": flops_per_token,
        "model_flops_per_second": tokens_per_second * flops_per_token,
        "mfu": peak and mfu(tokens_per_second, flops_per_token, len(devices) * peak.flops_per_second),
        "peak_from": peak and peak.source,
        "outer_step_seconds": None,
        "outer_share": None,
        "profile": profile and str(profile),
    }
    schedule = config.schedule
    if schedule is not None:
        outer = quartiles(outer_times(run))
        in_outer_steps = schedule.total(config.num_steps) * outer["median"]
        share = in_outer_steps / (in_outer_steps + config.num_steps * inner["median"])
        result |= {"outer_step_seconds": outer, "outer_share": share}
    if (measured := measured_peak(devices)) is not None:
        result |= {"peak_memory_bytes": measured, "peak_memory_from": "the devices' allocators"}
    if profile is not None:
        if devices[0].platform == "gpu":
            run.use(without_cuda_graphs(config, programs))
        trace(run, profile, with_outer=schedule is not None)
    return result


def without_cuda_graphs(config: TrainConfig, programs: Programs) -> Programs:
    """Compile the steps of a run again, so that a trace of a GPU names their operations."""
    programs, offload = build_programs(config, programs.mesh), config.outer.offload
    return compile_programs(programs, offload=offload, only=_STEPS, options=_NO_CUDA_GRAPHS)


def data_rate(config: TrainConfig, seconds: float) -> float:
    """Return tokens/s of the run's own data pipeline, all replicas' streams taken in turn without training.

    Raises:
      UserError: if the data or the tokenizer are not there.
    """
    data = RunData(config.data, seed=config.seed, vocab_size=config.model.vocab_size)
    tokenizer = None
    if data.needs_tokenizer:
        tokenizer = load_tokenizer(config.data.tokenizer)
        check_vocabulary(tokenizer, config.model.vocab_size)
    number = config.num_replicas
    with contextlib.closing(data.streams(tokenizer, {k: k for k in range(number)}, number)) as streams:

        def read(max_rounds: float) -> tuple[int, float]:
            """Return the batches read of each replica, and the seconds that took."""
            rounds, started = 0, time.perf_counter()
            while rounds < max_rounds and (rounds == 0 or time.perf_counter() - started < seconds):
                next(streams)
                rounds += 1
            return rounds, time.perf_counter() - started

        read(_UNTIMED_ROUNDS)
        rounds, took = read(float("inf"))
    return rounds * config.tokens_per_step / took


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
    """Return the median, the lower and the upper quartile."""
    lower, median, upper = np.percentile(seconds, [25, 50, 75]).tolist()
    return {"median": median, "lower_quartile": lower, "upper_quartile": upper}
