"""The outer state in host memory between outer steps."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from noloco_jax.outer.rule import OuterState
from noloco_jax.spmd.programs import Programs, PyTree, TrainState, shardings_of


def offloaded(programs: Programs) -> Programs:
    """The same programs with the outer state at rest in pinned host memory.

    An inner step then has no more on its device than plain Adam. The outer step deletes what it has read, as if
    donated.
    """
    on_device = shardings_of(programs.state.outer)
    resting_outer = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding.with_memory_kind("pinned_host")),
        programs.state.outer,
    )

    def from_host(program: Callable[..., Any] | None) -> Callable[..., Any] | None:
        if program is None:
            return None

        def run(params: PyTree, outer: OuterState) -> tuple[PyTree, OuterState]:
            fetched = jax.device_put(outer, on_device)
            for x in jax.tree.leaves(outer):
                x.delete()  # before its successor is written; device_put donates nothing to another kind of memory
            params, outer = program(params, fetched)
            return params, jax.device_put(outer, shardings_of(resting_outer))

        return run

    def at_rest(make: Callable[..., TrainState]) -> Callable[..., TrainState]:
        return lambda *arguments: resting.at_rest(make(*arguments))

    resting = dataclasses.replace(
        programs,
        resting=programs.state._replace(outer=resting_outer),
        outer_step=from_host(programs.outer_step),
        moved=None,  # the outer step alone fetches the state
        correct_step=from_host(programs.correct_step),
    )
    return dataclasses.replace(resting, init=at_rest(programs.init), from_params=at_rest(programs.from_params))
