"""Slow weights and outer momentum in host memory between outer steps."""

import dataclasses
from typing import Any

import jax

from noloco_jax.spmd.programs import Programs, TrainState

PyTree = Any


def offload(programs: Programs) -> Programs:
    """The same programs, whose outer step takes its state from pinned host memory and leaves it there.

    `state` then says so too. An inner step has no more on its device than plain Adam. The outer step deletes what it
    has read, as if donated. Apply it to compiled programs (`compile_ahead`), and `park` the first state.
    """
    outer_step, on_device = programs.outer_step, _shardings(programs)
    assert outer_step is not None
    on_host = jax.tree.map(lambda sharding: sharding.with_memory_kind("pinned_host"), on_device)

    def from_host(params: PyTree, outer: PyTree, step: Any) -> tuple[PyTree, PyTree]:
        fetched = jax.device_put(outer, on_device)
        for x in jax.tree.leaves(outer):
            x.delete()  # before its successor is written; device_put donates nothing to another kind of memory
        params, outer = outer_step(params, fetched, step)
        return params, jax.device_put(outer, on_host)

    resting = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), programs.state.outer, on_host
    )
    return dataclasses.replace(programs, outer_step=from_host, state=programs.state._replace(outer=resting))


def park(programs: Programs, state: TrainState) -> TrainState:
    """The state with its outer part where the programs leave it: on its devices or, after `offload`, on the host."""
    return state._replace(outer=jax.device_put(state.outer, _shardings(programs)))


def _shardings(programs: Programs) -> PyTree:
    return jax.tree.map(lambda x: x.sharding, programs.state.outer)
