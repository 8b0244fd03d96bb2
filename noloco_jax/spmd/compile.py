"""A run's programs, compiled before its first step so that no step's time holds a compilation."""

import dataclasses
import time
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from noloco_jax.config import TrainConfig
from noloco_jax.spmd.offload import offloaded
from noloco_jax.spmd.programs import Programs, build_programs

PROGRAMS = (
    *("share_batch", "inner_step", "outer_step", "moved", "correct_step", "share_moments", "final_merge"),
    *("evaluate", "merge", "spread"),
)


def compile_programs(
    config: TrainConfig,
    mesh: Mesh,
    *,
    only: Collection[str] = PROGRAMS,
    options: Mapping[str, Any] | None = None,
    shares_batches: bool | None = None,
) -> Programs:
    """Builds a run's programs, compiles them for its shapes and shardings, and offloads its outer state if it says so.

    Scalar arguments of compiled programs are to be given as numpy values: they take no array from another device.

    Args:
      config: the run.
      mesh: its devices.
      only: which of `PROGRAMS` to compile; the others are compiled at their first call.
      options: XLA's, by name.
      shares_batches: see `build_programs`.
    """
    programs = build_programs(config, mesh, shares_batches=shares_batches)
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
    }
    compiled, seconds = {}, {}
    for name in only:
        program = getattr(programs, name)
        if program is not None:
            started = time.perf_counter()
            compiled[name] = program.lower(*arguments[name]).compile(options and dict(options))
            seconds[name] = time.perf_counter() - started
    programs = dataclasses.replace(programs, **compiled, compiled=compiled, compile_seconds=seconds)
    return offloaded(programs) if config.outer.offload else programs
