"""Programs of an outer optimizer: each is one of its transitions, for all replicas of a mesh.

Outer steps with and without a delay are made here; `islands.programs` maps the same transitions over its one replica.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from noloco_jax.config import ModelConfig, OuterConfig
from noloco_jax.optim.exchange.axes import AxisName
from noloco_jax.optim.methods import Method
from noloco_jax.optim.outer_step import OuterOptimizer
from noloco_jax.optim.rule import Arrived, OuterState, Outgoing
from noloco_jax.spmd import sharding
from noloco_jax.spmd.sharding import REPLICAS, SLOT

PyTree = Any
NUMBER = jax.ShapeDtypeStruct((), jnp.int32)  # of an outer step


def build_outer(
    method: Method, outer: OuterConfig, model: ModelConfig, num_replicas: int, seed: int, axis_name: AxisName = REPLICAS
) -> OuterOptimizer | None:
    """Build the outer optimizer of a method, for replicas on these axes; None for methods without."""
    if not method.has_outer_steps:
        return None
    fragments = sharding.fragments_of(model, outer.fragments)
    return method.outer_optimizer(outer, num_replicas, seed, axis_name, fragments)


class _Part(NamedTuple):
    """Part of a transition's arguments or results: its specs on the mesh, and its `vmap` axes over slots."""

    specs: Any
    axes: Any


class OuterPrograms:
    """Programs of the transitions of `OuterOptimizer`, compiled at their first call.

    All take and return arrays of all replicas, and donate parameters and state.

    Args:
      outer: the outer optimizer.
      params: shapes, dtypes and shardings of the parameters, replicas in front.
      state: the same of the outer state.
      mesh: the devices.

    Attributes:
      optimizer: the outer optimizer.
      step: (params, state) -> (params, state): an outer step with its exchange.
      apply: (params, state) -> (params, state): the oldest stored correction.
      local_step: (params, state) -> (params, state, Outgoing): an outer step with the own message alone.
      store: (params, state, Arrived, number) -> (params, state): keep a correction for `apply`.
    """

    def __init__(self, outer: OuterOptimizer, params: PyTree, state: OuterState, mesh: Mesh):
        self.optimizer, self._params, self._state, self._mesh = outer, params, state, mesh
        specs, state_specs = (jax.tree.map(lambda x: x.sharding.spec, tree) for tree in (params, state))
        windows = state_specs.windows
        self._outgoing = _Part(Outgoing(specs, None if windows is None else specs, windows), 0)
        self._arrived, self._number = _Part(Arrived(specs, windows), 0), _Part(P(), None)
        held = _Part(specs, 0), _Part(state_specs, outer_axes(outer))

        def program(transition: Callable[..., Any], takes: tuple = (), gives: tuple = ()) -> Any:
            return self._program(transition, _joined(*held, *takes), _joined(*held, *gives), mesh, donate=(0, 1))

        self.step, self.apply = program(outer.step), program(outer.apply)
        self.local_step = program(outer.local_step, gives=(self._outgoing,))
        self.store = program(
            lambda params, state, arrived, number: (params, outer.steps.store(state, arrived, number)),
            takes=(self._arrived, self._number),
        )

    def exchange(self, hosts: Mesh) -> Any:
        """Return the program (Outgoing, number) -> Arrived: the exchange of an outer step, on a mesh of this shape."""
        takes = _joined(self._outgoing, self._number)
        return self._program(self.optimizer.steps.exchanged, takes, self._arrived, hosts)

    @cached_property
    def outgoing(self) -> Outgoing:
        """Return shapes and shardings of what `local_step` sends."""
        shapes = jax.eval_shape(self.local_step, self._params, self._state)[2]
        return on_mesh(shapes, self._outgoing.specs, self._mesh)

    @property
    def arrived(self) -> Arrived:
        """Return shapes and shardings of what `store` takes."""
        return Arrived(self.outgoing.message, self.outgoing.windows)

    def arguments(self, hosts: Mesh) -> dict[str, tuple[Any, ...]]:
        """Return shapes and shardings of the arguments of the programs of an exchange on `hosts`, by their names."""
        held = self._params, self._state
        return {
            "local_step": held,
            "exchange": (on_mesh(self.outgoing, self._outgoing.specs, hosts), NUMBER),
            "store": (*held, self.arrived, NUMBER),
        }

    def _program(
        self, transition: Callable[..., Any], takes: _Part, gives: _Part, mesh: Mesh, donate: tuple[int, ...] = ()
    ) -> Any:
        body = jax.vmap(transition, in_axes=takes.axes, out_axes=gives.axes, axis_name=SLOT)
        out_shardings = sharding.shardings(mesh, gives.specs)
        return over_mesh(mesh, body, takes.specs, gives.specs, out_shardings, donate)


def over_mesh(
    mesh: Mesh,
    body: Callable[..., Any],
    in_specs: Any,
    out_specs: Any,
    out_shardings: Any,
    donate: tuple[int, ...] = (),
) -> Any:
    """Run a function of one device's slots over the whole mesh; `fsdp` and `tensor` are left to the partitioner."""
    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=sharding.manual(in_specs),
        out_specs=sharding.manual(out_specs),
        axis_names=set(sharding.MANUAL_AXES),
        # A collective over a `vmap` axis inside `shard_map`, as over the slots, is not implemented with it (jax 0.10).
        check_vma=False,
    )
    return jax.jit(mapped, out_shardings=out_shardings, donate_argnums=donate)


def outer_axes(outer: OuterOptimizer) -> OuterState:
    """Return the `vmap` axes of the outer state: 0 for leaves with the parameters' shapes, None for the others."""
    state = jax.eval_shape(outer.init, jnp.zeros([]))  # one parameter stands for all: a prefix of every state
    axes: Any = optax.tree.map_params(outer, lambda _: 0, state, transform_non_params=lambda _: None)
    return axes


def on_mesh(shapes: PyTree, specs: PyTree, mesh: Mesh) -> PyTree:
    """Return shapes with the shardings of their specs on a mesh."""
    return jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)), shapes, specs
    )


def _joined(*parts: _Part) -> _Part:
    return _Part(*(tuple(values) for values in zip(*parts, strict=True)))
