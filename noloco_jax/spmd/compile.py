"""Compilation of a run's programs before its first step, so that no step's time includes a compilation.

JAX's persistent compilation cache must not hold programs of several CPU devices: loaded from it they end in NaN, in a
damaged heap, or wait for ever (jaxlib 0.10 and 0.12). It seems that XLA's CPU client no longer keeps the order of their
collectives, and two devices that run two of them in different orders take one message for the other.
"""

import contextlib
import dataclasses
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from noloco_jax import draws
from noloco_jax.config import TrainConfig
from noloco_jax.cores import usable_cores
from noloco_jax.spmd.offload import offloaded
from noloco_jax.spmd.programs import Programs

PROGRAMS = (*("share_batch", "inner_step", "outer_step", "correct_step", "evaluate", "merge", "spread"),)
FIRST_WEIGHTS = "init"  # the program that draws random initial weights


def compile_programs(
    config: TrainConfig,
    programs: Programs,
    *,
    only: Collection[str] = PROGRAMS,
    options: Mapping[str, Any] | None = None,
) -> Programs:
    """Compile a run's programs for its shapes and shardings, and offload its outer state if configured.

    Programs are lowered one after another. For CPUs they are compiled in parallel, one thread a core. For GPUs they are
    compiled one after another, since the compiler times kernels on the device.

    Scalar arguments of compiled programs must be numpy values, since they accept no array from another device.

    Args:
      config: the run.
      programs: as `build_programs` makes them.
      only: which of `PROGRAMS` and `FIRST_WEIGHTS` to compile; the others are compiled at their first call.
      options: XLA options by name, for all programs except `FIRST_WEIGHTS`, which has its own.
    """
    arguments = arguments_of(programs)
    compiling: dict[str, Future[tuple[jax.stages.Compiled, float]]] = {}
    with ThreadPoolExecutor(_num_threads(programs), "compile") as threads:
        for name in only:
            program = getattr(programs, name)
            if program is not None:
                started = time.perf_counter()
                lowered = program.lower(*arguments[name])
                lowering_seconds = time.perf_counter() - started
                its_options = None if name == FIRST_WEIGHTS else options
                compiling[name] = threads.submit(_compiled, lowered, lowering_seconds, its_options)
        done = {name: one.result() for name, one in compiling.items()}
    compiled = {name: program for name, (program, _) in done.items()}
    seconds = {name: seconds for name, (_, seconds) in done.items()}
    programs = dataclasses.replace(programs, **compiled, compiled=compiled, compile_seconds=seconds)
    return offloaded(programs) if config.outer.offload else programs


def arguments_of(programs: Programs) -> dict[str, tuple[Any, ...]]:
    """Return the shapes and shardings of each program's arguments, by its name."""
    params, inner, outer = programs.state
    return {
        "share_batch": (programs.parts,),
        "inner_step": (params, inner, programs.batch, jax.ShapeDtypeStruct((), jnp.int32)),
        "outer_step": (params, outer),
        "correct_step": (params, outer),
        "evaluate": (params, programs.batch),
        "merge": (params,),
        "spread": (params,),
        FIRST_WEIGHTS: (jax.eval_shape(lambda: draws.key(0)),),
    }


def may_be_cached(mesh: Mesh) -> bool:
    """Return False for a mesh whose programs must not be loaded from JAX's persistent compilation cache."""
    return mesh.size == 1 or mesh.devices.flat[0].platform != "cpu"


def leave_out_cache() -> bool:
    """Turn the persistent cache off for all that this process compiles from now on; return whether it was on."""
    was_on = _is_cache_on() and getattr(jax.config, "jax_compilation_cache_dir") is not None  # noqa: B009
    _set_cache(False)
    return was_on


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
    """Compile without the persistent cache in this context."""
    was_on = _is_cache_on()
    _set_cache(False)
    try:
        yield
    finally:
        _set_cache(was_on)


def _is_cache_on() -> bool:
    return getattr(jax.config, "jax_enable_compilation_cache")  # noqa: B009, as JAX declares no such attribute


def _set_cache(is_on: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", is_on)
    compilation_cache.reset_cache()  # JAX reads the setting only at its first compilation


def _compiled(
    lowered: jax.stages.Lowered, lowering_seconds: float, options: Mapping[str, Any] | None
) -> tuple[jax.stages.Compiled, float]:
    """Return the program and the seconds that lowering and compiling took."""
    started = time.perf_counter()
    program = lowered.compile(dict(options) if options else None)
    return program, lowering_seconds + time.perf_counter() - started


def _num_threads(programs: Programs) -> int:
    """Return the number of programs to compile at the same time."""
    on_cpu = programs.mesh.devices.flat[0].platform == "cpu"
    return len(usable_cores()) if on_cpu else 1
