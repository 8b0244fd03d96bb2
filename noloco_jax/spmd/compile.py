"""Compilation of a run's programs before its first step, so that no step's time includes a compilation."""

import dataclasses
import os
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache

from noloco_jax.cores import usable_cores
from noloco_jax.optim import prng
from noloco_jax.spmd.compile_once import Lowered, compile_all
from noloco_jax.spmd.offload import offloaded
from noloco_jax.spmd.programs import Programs

PROGRAMS = (*("share_batch", "inner_step", "outer_step", "correct_step", "evaluate", "merge", "spread"),)
_KEPT_BYTES = 2**32  # of the compilation cache, which then leaves out what was used least recently
_SHORTEST_KEPT = 0.1  # seconds that a program compiles if it is kept
FIRST_WEIGHTS = "init"  # the program that draws random initial weights


def compile_programs(
    programs: Programs,
    *,
    offload: bool = False,
    only: Collection[str] = PROGRAMS,
    options: Mapping[str, Any] | None = None,
) -> Programs:
    """Compile a run's programs for its shapes and shardings.

    Programs are lowered one after another. For CPUs they are compiled in parallel, one thread a core. For GPUs they are
    compiled one after another, since the compiler times kernels on the device. Processes that start together share the
    work, see `compile_once`.

    Scalar arguments of compiled programs must be numpy values, since they accept no array from another device.

    Args:
      programs: as `build_programs` makes them.
      offload: keep the outer state in host memory between outer steps, see `offloaded`.
      only: which of `PROGRAMS` and `FIRST_WEIGHTS` to compile; the others are compiled at their first call.
      options: XLA options by name, for all programs except `FIRST_WEIGHTS`, which has its own.
    """
    arguments, seconds = arguments_of(programs), dict[str, float]()

    def lowered() -> Iterator[Lowered]:
        for name in only:
            if (program := getattr(programs, name)) is not None:
                started = time.perf_counter()
                one = program.lower(*arguments[name])
                seconds[name] = time.perf_counter() - started
                yield Lowered(name, one, None if name == FIRST_WEIGHTS else options)

    done = compile_all(lowered(), num_at_once(programs))
    compiled = {name: one.program for name, one in done.items()}
    seconds = {name: seconds[name] + one.seconds for name, one in done.items()}
    programs = dataclasses.replace(programs, **compiled, compiled=compiled, compile_seconds=seconds)
    return offloaded(programs) if offload else programs


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
        FIRST_WEIGHTS: (jax.eval_shape(lambda: prng.key(0)),),
    }


def keep_programs() -> None:
    """Let JAX's compilation cache keep what this process compiles for later starts, in the user's cache directory.

    JAX_COMPILATION_CACHE_DIR names another folder. JAX_ENABLE_COMPILATION_CACHE=false keeps nothing.
    """
    if not _setting("jax_enable_compilation_cache") or _setting("jax_compilation_cache_dir") is not None:
        return
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    jax.config.update("jax_compilation_cache_dir", os.path.join(caches, "noloco_jax", "programs"))
    jax.config.update("jax_compilation_cache_max_size", _KEPT_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _SHORTEST_KEPT)
    compilation_cache.reset_cache()  # JAX reads the settings at its first compilation alone


def _setting(name: str) -> Any:
    return getattr(jax.config, name)  # JAX declares no such attribute


def num_at_once(programs: Programs) -> int:
    """Return the number of programs to compile at the same time."""
    on_cpu = programs.mesh.devices.flat[0].platform == "cpu"
    return len(usable_cores()) if on_cpu else 1
