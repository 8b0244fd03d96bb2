"""The one table of shardings: how every parameter, and what follows it, lies on the mesh."""

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

# The axes over which the programs are written by hand; `fsdp` and `tensor` are left to the partitioner.
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
    """Specs of parameters with a leading replica axis. An axis that does not divide its dimension is left out."""

    def spec(path: tuple, leaf: jax.Array) -> P:
        axes = ("replica", *parameter_spec(path))
        return P(*(_fitting(dim, names, mesh) for dim, names in zip(leaf.shape, axes, strict=True)))

    return jax.tree.map_with_path(spec, params)


def parameter_spec(path: tuple) -> P:
    """The row of `PARAMETER_SPECS` of a parameter, by its path in the parameters' tree."""
    return PARAMETER_SPECS["/".join(key.key for key in path)]


def hidden_dimension(path: tuple, shape: tuple[int, ...]) -> int:
    """The dimension of hidden states, which every parameter has: where `fsdp` shards it, or else the last.

    Args:
      path: of an array of one replica.
      shape: its shape.
    """
    spec = parameter_spec(path)
    return spec.index("fsdp") if "fsdp" in spec else len(shape) - 1


def fragments_of(count: int) -> Fragments:
    """The parameters in `count` fragments, along hidden states."""
    return Fragments(count, hidden_dimension, stage_origin)


def stage_origin(path: tuple, shape: tuple[int, ...]) -> list[Any]:
    """The index at which a stage's part of one replica's array begins, along every dimension.

    Args:
      path: of the parameter.
      shape: of the part.
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
    """The first of a dimension's axes, as many as divide it together."""
    if not isinstance(names, tuple):
        return names if names is None or dim % mesh.shape[names] == 0 else None
    sizes = np.cumprod([mesh.shape[name] for name in names])
    return names[: int(np.sum(dim % sizes == 0))] or None


def inner_specs(inner: optax.GradientTransformation, params: PyTree, specs: PyTree) -> PyTree:
    """Specs of the inner optimizer's state: what has a parameter's path and shape lies where the parameter does.

    Paths may begin with anything: an optimizer may hold a part of the parameters' tree, or several like it.
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
    """Specs of an outer optimizer's state: what has a parameter's shape lies where the parameter does.

    A code's windows are few, and lie on all the devices of a replica's stage.
    """
    placed: Any = optax.tree.map_params(outer, lambda _, spec: spec, state, specs, transform_non_params=lambda _: P())
    return placed._replace(windows=manual(placed.windows))


def manual(specs: PyTree) -> PyTree:
    """The part of the specs that `shard_map` is told: the manual axes."""

    def part(names: str | tuple[str, ...] | None) -> tuple[str, ...] | None:
        return tuple(name for name in _names(names) if name in MANUAL_AXES) or None

    return jax.tree.map(lambda spec: P(*map(part, spec)), specs)


def shardings(mesh: Mesh, specs: PyTree) -> PyTree:
    """Specs as shardings."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
