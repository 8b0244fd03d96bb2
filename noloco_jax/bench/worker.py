"""The worker: the process of one variant, which measures it on its devices."""

import json
import platform
from pathlib import Path

import jax

from noloco_jax.bench.options import FAILED, REFUSED, Options, Result
from noloco_jax.bench.rates import data_rate, matrix_rate, matrix_side
from noloco_jax.bench.timing import TimedRun, inner_times, outer_times, quartiles, trace
from noloco_jax.cluster.host import use_cpu_cores, use_gpu_memory
from noloco_jax.config import TrainConfig
from noloco_jax.errors import UserError
from noloco_jax.files import write_whole
from noloco_jax.methods import method_of, schedule_of
from noloco_jax.metrics.flops import mfu, model_flops_per_token, newton_schulz_flops
from noloco_jax.metrics.memory import compiled_peak, measured_peak, program_memory
from noloco_jax.spmd.compile import compile_programs
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.programs import Programs, build_programs
from noloco_jax.train.messages import messages_of, num_pairings

# A trace names the operations of a CUDA graph after the graph; no sequence of kernels is long enough to become one.
_NO_CUDA_GRAPHS = {"xla_gpu_graph_min_graph_size": 2**30}
_STEPS = ("inner_step", "outer_step")


def work(config: TrainConfig, options: Options, path: Path) -> int:
    """Measure in this process; write the result, or the error, as JSON, and return the exit status."""
    use_gpu_memory()
    use_cpu_cores(config)
    try:
        result, status = measure(config, options), 0
    except UserError as error:
        result, status = {"error": str(error)}, REFUSED
    except (jax.errors.JaxRuntimeError, MemoryError) as error:  # the device's memory, first of all
        result, status = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}, FAILED
    write_whole(path, json.dumps(result))
    return status


def measure(config: TrainConfig, options: Options) -> Result:
    """Measure a run's programs; plain values, by names that hold their unit.

    Compilations are timed without a cache. Figures that do not apply are None: those of outer steps for methods without
    them, those of the data where they are not there (`data_missing` says why), all that has to run for `compile_only`.

    Raises:
      UserError: if the run does not fit the devices.
    """
    jax.config.update("jax_enable_compilation_cache", False)
    devices = jax.devices()
    programs = build_programs(config, make_mesh(config, devices))
    programs = compile_programs(config, programs, only=_STEPS)
    memory = program_memory(programs)
    peak = compiled_peak(memory)
    messages = messages_of(config, programs.mesh.shape)
    in_inner_steps = messages.inner_step
    result: Result = {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "device": devices[0].device_kind,
        "mesh": dict(programs.mesh.shape),
        "compile_seconds": programs.compile_seconds,
        "pairings": num_pairings(config) or None,
        "bytes_sent": in_inner_steps if method_of(config).averages_gradients else messages.outer_step,
        "bytes_sent_inner_step": in_inner_steps or None,
        "program_memory_bytes": memory,
        "compiled_peak_memory_bytes": peak,
        "peak_memory_bytes": peak,
        "peak_memory_from": "the compiled programs",
    }
    return result if options.compile_only else result | _run(config, programs, options)


def _run(config: TrainConfig, programs: Programs, options: Options) -> Result:
    result: Result = {"data_tokens_per_second": None, "data_missing": ""}
    if options.data_seconds:
        try:
            result["data_tokens_per_second"] = data_rate(config, options.data_seconds)
        except UserError as error:
            result["data_missing"] = str(error)
    result |= _steps(config, programs, options)  # its arrays are gone when the matrices come

    tokens = config.tokens_per_step
    tokens_per_second = tokens / result["step_seconds"]["median"]
    flops_per_token = model_flops_per_token(config)
    muon_flops = config.num_replicas * newton_schulz_flops(config.model) if config.inner.optimizer == "muon" else 0.0
    devices = programs.mesh.devices.flatten().tolist()
    rate = matrix_rate(devices, config.model.dtype)
    return result | {
        "tokens_per_second": tokens_per_second,
        "model_flops_per_token": flops_per_token,
        "newton_schulz_share": muon_flops / (tokens * flops_per_token),
        "model_flops_per_second": tokens_per_second * flops_per_token,
        "matrix_flops_per_second": rate,
        "matrix_side": matrix_side(devices[0].platform),
        "mfu": mfu(tokens_per_second, flops_per_token, rate),
    }


def _steps(config: TrainConfig, programs: Programs, options: Options) -> Result:
    run = TimedRun(config, programs)
    inner = quartiles(inner_times(run, options.steps))
    result: Result = {"step_seconds": inner, "outer_step_seconds": None, "outer_share": None, "profile": None}
    devices = programs.mesh.devices.flatten().tolist()
    peak_of_inner_steps = measured_peak(devices)
    if programs.outer_step is not None:
        outer = quartiles(outer_times(run))
        result["outer_step_seconds"] = outer
        schedule = schedule_of(config)
        assert schedule is not None
        in_outer_steps = schedule.total(config.num_steps) * outer["median"]
        result["outer_share"] = in_outer_steps / (in_outer_steps + config.num_steps * inner["median"])
    peak = measured_peak(devices)
    if peak is not None:
        result |= {"peak_memory_bytes": peak, "peak_memory_from": "the devices' allocators"}
        result["peak_memory_bytes_before_outer_steps"] = peak_of_inner_steps
    if options.profile is not None:
        if devices[0].platform == "gpu":
            programs = without_cuda_graphs(config, programs)
            run.use(programs)
        trace(run, options.profile, with_outer=programs.outer_step is not None)
        result["profile"] = str(options.profile)
    return result


def without_cuda_graphs(config: TrainConfig, programs: Programs) -> Programs:
    """Compile the steps of a run again, so that a trace of a GPU names their operations."""
    return compile_programs(config, build_programs(config, programs.mesh), only=_STEPS, options=_NO_CUDA_GRAPHS)
