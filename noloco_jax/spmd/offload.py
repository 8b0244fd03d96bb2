"""Offload of the outer state to host memory between outer steps."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from noloco_jax.optim.rule import OuterState
from noloco_jax.spmd.programs import Programs, PyTree, TrainState, shardings_of


def offloaded(programs: Programs) -> Programs:
    """Return the programs with the outer state offloaded to pinned host memory between outer steps.

    An inner step then needs no more device memory than plain Adam. The outer step deletes the state it has read, as if
    it were donated, once it has started.
    """
    resting_outer = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding.with_memory_kind("pinned_host")),
        programs.state.outer,
    )

    def moved_to_rest(make: Callable[..., TrainState]) -> Callable[..., TrainState]:
        return lambda *arguments: between_steps.moved_to_rest(make(*arguments))

    between_steps = dataclasses.replace(programs, between_steps=programs.state._replace(outer=resting_outer))
    return dataclasses.replace(
        between_steps,
        outer_step=programs.outer_step and from_host_memory(programs.outer_step, between_steps),
        correct_step=programs.correct_step and from_host_memory(programs.correct_step, between_steps),
        init=moved_to_rest(programs.init),
        from_params=moved_to_rest(programs.from_params),
    )


def from_host_memory(program: Callable[..., Any], programs: Programs) -> Callable[..., Any]:
    """Wrap a program (params, outer, ...) -> (params, outer, ...) to take and return the outer state at rest."""
    on_device, between_steps = shardings_of(programs.state.outer), shardings_of(programs.between_steps.outer)
    if on_device == between_steps:
        return program

    def run(params: PyTree, outer: OuterState, *others: Any) -> tuple[Any, ...]:
        params, updated, *results = program(params, jax.device_put(outer, on_device), *others)
        # A program that cannot start, as for want of memory, has raised by now, and the only copy is still there.
        for x in jax.tree.leaves(outer):
            x.delete()  # frees it before its successor is written; device_put cannot donate across memory kinds
        return params, jax.device_put(updated, between_steps), *results

    return run
