"""Table of shardings on the mesh: every parameter, and every state array that is sharded like it."""

from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from noloco_jax.outer.fragments import Fragments
from noloco_jax.outer.rule import OuterState
from noloco_jax.outer.transform import OuterOptimizer

PyTree = Any

# Axes that are manual in `shard_map`; `fsdp` and `tensor` are left to the partitioner.
MANUAL_AXES = ("replica", "stage")

# Dimensions of one replica's parameter, behind the replicas' axis. Stacked layers and the vocabulary lie on the stages.
PARAMETER_SPECS = {
    "embed": P(("stage", "tensor"), "fsdp"),
    "blocks/attention_norm": P("stage", None),
    "blocks/q": P("stage", "fsdp", "tensor"),
    "blocks/k": P("stage", "fsdp", "tensor"),
    "blocks/v": P("stage", "fsdp", "tensor"),
    "blocks/o": P("stage", "tensor", "fsdp"),
    "blocks/mlp_norm": P("stage", None),
    "blocks/gate": P("stage", "fsdp", "tensor"),
    "blocks/up": P("stage", "fsdp", "tensor"),
    "blocks/down": P("stage", "tensor", "fsdp"),
    "norm": P(None),
    "head": P("fsdp", ("stage", "tensor")),
}
BATCH_SPEC = P("replica", "fsdp")  # (replica, sequence, position)
REPLICA_SPEC = P("replica")  # one value a replica


def param_specs(params: PyTree, mesh: Mesh) -> PyTree:
    """Return specs of parameters with a leading replica axis; an axis that does not divide its dimension is omitted."""

    def spec(path: tuple, leaf: jax.Array) -> P:
        axes = ("replica", *parameter_spec(path))
        return P(*(_fitting(dim, names, mesh) for dim, names in zip(leaf.shape, axes, strict=True)))

    return jax.tree.map_with_path(spec, params)


def parameter_spec(path: tuple) -> P:
    """Return the row of `PARAMETER_SPECS` of a parameter, by its path in the parameters' tree."""
    return PARAMETER_SPECS["/".join(key.key for key in path)]


def hidden_dimension(path: tuple, shape: tuple[int, ...]) -> int:
    """Return the hidden dimension of a parameter: the one that `fsdp` shards, or else the last.

    Args:
      path: path of the parameter.
      shape: its shape in one replica.
    """
    spec = parameter_spec(path)
    return spec.index("fsdp") if "fsdp" in spec else len(shape) - 1


def fragments_of(count: int) -> Fragments:
    """Return a cut of the parameters into `count` fragments along their hidden dimensions."""
    return Fragments(count, hidden_dimension, stage_origin)


def stage_origin(path: tuple, shape: tuple[int, ...]) -> list[Any]:
    """Return the start index of a stage's part of one replica's array, along every dimension.

    Args:
      path: path of the parameter.
      shape: shape of the part.
    """
    if "stage" not in jax.sharding.get_abstract_mesh().manual_axes:
        return [0] * len(shape)
    stage = jax.lax.axis_index("stage")
    return [
        stage * size if "stage" in _names(names) else 0 for size, names in zip(shape, parameter_spec(path), strict=True)
    ]


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


def outer_specs(outer: OuterOptimizer, state: OuterState, specs: PyTree) -> OuterState:
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
