"""Slow weights and outer momentum in host memory between outer steps."""

import dataclasses
from typing import Any

import jax

from noloco_jax.parallel.programs import Programs, TrainState

PyTree = Any


def offload(programs: Programs) -> Programs:
    """The same programs, whose outer step takes its state from pinned host memory and leaves it there.

    An inner step then has no more on its device than plain Adam. Apply it to compiled programs (`compile_ahead`), and
    `park` the first state.
    """
    outer_step, on_device = programs.outer_step, _shardings(programs)
    assert outer_step is not None

    def fetched(params: PyTree, outer: PyTree, step: Any) -> tuple[PyTree, PyTree]:
        params, outer = outer_step(params, jax.device_put(outer, on_device), step)
        return params, _to_host(outer, on_device)

    return dataclasses.replace(programs, outer_step=fetched)


def park(programs: Programs, state: TrainState) -> TrainState:
    """The state with its outer part in pinned host memory, as the programs of `offload` leave it."""
    return state._replace(outer=_to_host(state.outer, _shardings(programs)))


def _shardings(programs: Programs) -> PyTree:
    return jax.tree.map(lambda x: x.sharding, programs.state.outer)


def _to_host(outer: PyTree, on_device: PyTree) -> PyTree:
    return jax.device_put(outer, jax.tree.map(lambda s: s.with_memory_kind("pinned_host"), on_device))
