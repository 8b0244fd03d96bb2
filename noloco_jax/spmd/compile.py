"""Compilation of a run's programs before its first step, so that no step's time includes a compilation."""

import dataclasses
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from noloco_jax import draws
from noloco_jax.config import TrainConfig
from noloco_jax.cores import usable_cores
from noloco_jax.spmd.offload import offloaded
from noloco_jax.spmd.programs import Programs

PROGRAMS = (
    *("share_batch", "inner_step", "outer_step", "moved", "correct_step", "share_moments", "enter_moments"),
    *("final_merge", "evaluate", "merge", "spread"),
)
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
    params, inner, outer = programs.state
    arguments = {
        "share_batch": (programs.parts,),
        "inner_step": (params, inner, programs.batch, jax.ShapeDtypeStruct((), jnp.int32)),
        "outer_step": (params, outer),
        "moved": (params, outer),
        "correct_step": (params, outer),
        "share_moments": (inner, jax.ShapeDtypeStruct((), jnp.int32)),
        "enter_moments": (inner, jax.ShapeDtypeStruct((), jnp.int32)),
        "final_merge": (params,),
        "evaluate": (params, programs.batch),
        "merge": (params,),
        "spread": (params,),
        FIRST_WEIGHTS: (jax.eval_shape(lambda: draws.key(0)),),
    }
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
