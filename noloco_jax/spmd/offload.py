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
    resting_outer = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding.with_memory_kind("pinned_host")),
        programs.state.outer,
    )

    def at_rest(make: Callable[..., TrainState]) -> Callable[..., TrainState]:
        return lambda *arguments: resting.at_rest(make(*arguments))

    resting = dataclasses.replace(
        programs,
        resting=programs.state._replace(outer=resting_outer),
        moved=None,  # the outer step alone fetches the state
    )
    return dataclasses.replace(
        resting,
        outer_step=programs.outer_step and from_rest(programs.outer_step, resting),
        correct_step=programs.correct_step and from_rest(programs.correct_step, resting),
        init=at_rest(programs.init),
        from_params=at_rest(programs.from_params),
    )


def from_rest(program: Callable[..., Any], programs: Programs) -> Callable[..., Any]:
    """A program (params, outer, ...) -> (params, outer, ...), for an outer state that rests where that of `programs`
    does, before and after.
    """
    on_device, resting = shardings_of(programs.state.outer), shardings_of(programs.resting.outer)
    if on_device == resting:
        return program

    def run(params: PyTree, outer: OuterState, *others: Any) -> tuple[Any, ...]:
        fetched = jax.device_put(outer, on_device)
        for x in jax.tree.leaves(outer):
            x.delete()  # before its successor is written; device_put donates nothing to another kind of memory
        params, outer, *results = program(params, fetched, *others)
        return params, jax.device_put(outer, resting), *results

    return run
