"""Compiles a run's programs before its first step, so that no step's time holds a compilation."""

import dataclasses

import jax
import jax.numpy as jnp

from noloco_jax.parallel.programs import Programs


def compile_ahead(programs: Programs) -> Programs:
    """The same programs, all but `init` and `adopt` compiled for the shapes and shardings of the run.

    Their scalar arguments are to be given as numpy values: a compiled program takes no array from another device.
    """
    params, inner, outer = programs.state
    step = jax.ShapeDtypeStruct((), jnp.int32)

    def compiled(program, *arguments):
        return None if program is None else program.lower(*arguments).compile()

    return dataclasses.replace(
        programs,
        inner_step=compiled(programs.inner_step, params, inner, programs.batch, step),
        outer_step=compiled(programs.outer_step, params, outer, step),
        evaluate=compiled(programs.evaluate, params, programs.batch),
        merge=compiled(programs.merge, params),
        spread=compiled(programs.spread, params),
    )
