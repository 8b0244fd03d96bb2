"""Compiles a run's programs before its first step, so that no step's time holds a compilation."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from noloco_jax.spmd.programs import Programs


def compile_ahead(programs: Programs, options: Mapping[str, Any] | None = None) -> Programs:
    """The same programs, all but `init` and `adopt` compiled for the shapes and shardings of the run.

    Their scalar arguments are to be given as numpy values: a compiled program takes no array from another device.

    Args:
      programs: what `build_programs` made.
      options: XLA's, by name.
    """
    params, inner, outer = programs.state
    step = jax.ShapeDtypeStruct((), jnp.int32)

    def compiled(program, *arguments):
        return program and program.lower(*arguments).compile(options and dict(options))

    return dataclasses.replace(
        programs,
        inner_step=compiled(programs.inner_step, params, inner, programs.batch, step),
        outer_step=compiled(programs.outer_step, params, outer, step),
        evaluate=compiled(programs.evaluate, params, programs.batch),
        merge=compiled(programs.merge, params),
        spread=compiled(programs.spread, params),
    )
