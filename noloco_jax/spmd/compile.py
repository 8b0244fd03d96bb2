"""A run's programs, compiled before its first step so that no step's time holds a compilation."""

import dataclasses
import os
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from noloco_jax import draws
from noloco_jax.config import TrainConfig
from noloco_jax.spmd.offload import offloaded
from noloco_jax.spmd.programs import Programs

PROGRAMS = (
    *("share_batch", "inner_step", "outer_step", "moved", "correct_step", "share_moments", "final_merge"),
    *("evaluate", "merge", "spread"),
)
FIRST_WEIGHTS = "init"  # of a run that starts from random ones


def compile_programs(
    config: TrainConfig,
    programs: Programs,
    *,
    only: Collection[str] = PROGRAMS,
    options: Mapping[str, Any] | None = None,
) -> Programs:
    """Compiles a run's programs for its shapes and shardings, and offloads its outer state if it says so.

    They are lowered one after another, and compiled side by side on the CPU: a thread a core. Compilers for a GPU time
    kernels there, so these take turns.

    Scalar arguments of compiled programs are to be given as numpy values: they take no array from another device.

    Args:
      config: the run.
      programs: as `build_programs` makes them.
      only: which of `PROGRAMS` and `FIRST_WEIGHTS` to compile; the others are compiled at their first call.
      options: XLA's, by name; of all programs but the first weights', which has its own.
    """
    params, inner, outer = programs.state
    arguments = {
        "share_batch": (programs.parts,),
        "inner_step": (params, inner, programs.batch, jax.ShapeDtypeStruct((), jnp.int32)),
        "outer_step": (params, outer),
        "moved": (params, outer),
        "correct_step": (params, outer),
        "share_moments": (inner, jax.ShapeDtypeStruct((), jnp.int32)),
        "final_merge": (params,),
        "evaluate": (params, programs.batch),
        "merge": (params,),
        "spread": (params,),
        FIRST_WEIGHTS: (jax.eval_shape(lambda: draws.key(0)),),
    }
    compiled, seconds = {}, {}

    def compile_one(name: str, lowered: jax.stages.Lowered, lowering_seconds: float) -> None:
        started = time.perf_counter()
        compiled[name] = lowered.compile(dict(options) if options and name != FIRST_WEIGHTS else None)
        seconds[name] = lowering_seconds + time.perf_counter() - started

    with ThreadPoolExecutor(_at_once(programs), "compile") as threads:
        compiling = []
        for name in only:
            program = getattr(programs, name)
            if program is not None:
                started = time.perf_counter()
                lowered = program.lower(*arguments[name])
                compiling.append(threads.submit(compile_one, name, lowered, time.perf_counter() - started))
        for one in compiling:
            one.result()
    compiled = {name: compiled[name] for name in only if name in compiled}
    programs = dataclasses.replace(programs, **compiled, compiled=compiled, compile_seconds=seconds)
    return offloaded(programs) if config.outer.offload else programs


def _at_once(programs: Programs) -> int:
    """How many programs are compiled at the same time."""
    on_cpu = programs.mesh.devices.flat[0].platform == "cpu"
    return max(len(os.sched_getaffinity(0)), 1) if on_cpu else 1
