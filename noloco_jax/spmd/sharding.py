"""Shardings on the mesh: of every parameter, and of every state array that is sharded like it."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from noloco_jax.config import ModelConfig
from noloco_jax.errors import UserError
from noloco_jax.model.architecture import Axes, param_axes, param_shapes
from noloco_jax.optim.fragments import Fragments
from noloco_jax.optim.outer_step import OuterOptimizer
from noloco_jax.optim.rule import OuterState

PyTree = Any

# Axes of the replicas inside programs: devices, and the slots of one device.
REPLICAS = ("replica", "slot")
SLOT = REPLICAS[1]
# Axes that are manual in `shard_map`: collectives over them are written by hand, so that a jaxpr has all bytes that
# leave a replica (`traffic`). `fsdp` and `tensor` are left to the partitioner, so that no model has to name them.
MANUAL_AXES = ("replica", "stage")

# Mesh axes of a weight's logical axes (`model.architecture`). Stacked layers and the vocabulary lie on the stages.
MESH_AXES = {
    "layer": "stage",
    "expert": None,
    "vocab": ("stage", "tensor"),
    "hidden": "fsdp",
    "heads": "tensor",
    "ffn": "tensor",
    None: None,
}
BATCH_SPEC = P("replica", "fsdp")  # (replica, sequence, position)
REPLICA_SPEC = P("replica")  # one value a replica


def param_specs(model: ModelConfig, params: PyTree, mesh: Mesh) -> PyTree:
    """Return specs of parameters with a leading replica axis; an axis that does not divide its dimension is omitted."""

    def spec(path: tuple, leaf: jax.Array) -> P:
        axes = ("replica", *parameter_spec(model, path))
        return P(*(_fitting(dim, names, mesh) for dim, names in zip(leaf.shape, axes, strict=True)))

    return jax.tree.map_with_path(spec, params)


def parameter_spec(model: ModelConfig, path: tuple) -> P:
    """Return the mesh axes of a parameter of one replica, by its path in the parameters' tree."""
    return P(*(MESH_AXES[axis] for axis in _axes(model, path)))


def hidden_dimension(model: ModelConfig, path: tuple, shape: tuple[int, ...]) -> int:
    """Return the hidden dimension of a parameter: the one with the axis "hidden", or else the last.

    Args:
      model: its model.
      path: path of the parameter.
      shape: its shape in one replica.
    """
    axes = _axes(model, path)
    return axes.index("hidden") if "hidden" in axes else len(shape) - 1


@functools.cache  # equal cuts are the same object, so that programs that depend on one compile once
def fragments_of(model: ModelConfig, count: int) -> Fragments:
    """Return a cut of the parameters into `count` fragments along their hidden dimensions."""
    return Fragments(count, functools.partial(hidden_dimension, model))


def check_fragments(model: ModelConfig, count: int, mesh_shape: Mapping[str, int]) -> None:
    """Check that a replica's parameters can be cut into `count` fragments, as they lie on a mesh of this shape.

    Raises:
      UserError: if the hidden dimension of one, or a device's part of it, is not a multiple of `count`.
    """
    for path, x in jax.tree.leaves_with_path(param_shapes(model)) if count > 1 else ():
        dimension = hidden_dimension(model, path, x.shape)
        size, axis = x.shape[dimension], parameter_spec(model, path)[dimension]
        parts = mesh_shape[axis] if isinstance(axis, str) and size % mesh_shape[axis] == 0 else 1
        if size // parts % count:
            each = f"{parts} parts of {size // parts}" if parts > 1 else str(size)
            raise UserError(
                f"outer.fragments={count} does not divide the weight {'.'.join(key.key for key in path)}, which is cut "
                f"along {each}: give a number of fragments that divides all weights"
            )


def _axes(model: ModelConfig, path: tuple) -> Axes:
    return param_axes(model)[tuple(key.key for key in path)]


def _names(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names or ()


def _fitting(dim: int, names: str | tuple[str, ...] | None, mesh: Mesh) -> str | tuple[str, ...] | None:
    """Return the longest prefix of a dimension's axes whose product divides it."""
    if not isinstance(names, tuple):
        return names if names is None or dim % mesh.shape[names] == 0 else None
    sizes = np.cumprod([mesh.shape[name] for name in names])
    return names[: int(np.sum(dim % sizes == 0))] or None


def inner_specs(inner: optax.GradientTransformation, params: PyTree, specs: PyTree) -> PyTree:
    """Return specs of the inner optimizer's state: a leaf with a parameter's path and shape is sharded like it.

    Paths may have any prefix: an optimizer may hold a part of the parameters' tree, or several such trees.
    """
    of_param = {
        path: (x.shape, spec)
        for (path, x), spec in zip(jax.tree.leaves_with_path(params), jax.tree.leaves(specs), strict=True)
    }

    def spec(path: tuple, leaf: jax.ShapeDtypeStruct) -> P:
        ends = (of_param.get(path[start:]) for start in range(len(path)))
        return next((spec for shape, spec in filter(None, ends) if shape == leaf.shape), REPLICA_SPEC)

    return jax.tree.map_with_path(spec, jax.eval_shape(jax.vmap(inner.init), params))


def outer_specs(outer: OuterOptimizer, state: Any, specs: PyTree) -> OuterState:
    """Return specs of an outer optimizer's state: subtrees like the parameters are sharded like them.

    A wire format's windows are few, and are replicated over the devices of a replica's stage.
    """
    placed: Any = optax.tree.map_params(outer, lambda _, spec: spec, state, specs, transform_non_params=lambda _: P())
    return placed._replace(windows=manual(placed.windows))


def manual(specs: PyTree) -> PyTree:
    """Restrict specs to the manual axes, as `shard_map` takes them."""

    def part(names: str | tuple[str, ...] | None) -> tuple[str, ...] | None:
        return tuple(name for name in _names(names) if name in MANUAL_AXES) or None

    return jax.tree.map(lambda spec: P(*map(part, spec)), specs)


def shardings(mesh: Mesh, specs: PyTree) -> PyTree:
    """Convert specs to shardings."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
