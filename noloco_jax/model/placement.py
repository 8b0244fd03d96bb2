"""Sharding constraints inside a replica, for XLA's partitioner where it would choose badly by itself.

Axes of the lookup: B batch, T positions, V vocabulary, D hidden width.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P


def constrain(x: jax.Array, *axes: str | tuple[str, ...] | None) -> jax.Array:
    """Shard each dimension of `x` over the mesh axes that are named for it: one, several as a tuple, or None.

    Only axes that the surrounding mesh leaves to the partitioner are used, and only where they divide the dimension.
    Without such axes, as outside a mesh, this returns `x` itself.
    """
    return jax.lax.with_sharding_constraint(x, _fitting_spec(x.shape, axes)) if _axis_sizes() else x


def look_up(table_VD: jax.Array, ids_BT: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Return the rows of a table for token ids, (B, T, D) in a dtype; NaN for an id outside the table.

    XLA's partitioner aborts on a plain lookup in a table that both `tensor` and `fsdp` shard.
    """
    # The table stays: a device looks up its columns for the whole batch, then columns are exchanged for rows.
    table_VD, ids_BT = constrain(table_VD, None, ("tensor", "fsdp")), constrain(ids_BT, None, None)
    is_token_BT1 = ((ids_BT >= 0) & (ids_BT < table_VD.shape[0]))[..., None]
    # The gradient of a lookup is a sum over the places of each token, in the dtype of what it is looked up in.
    summed_in = jnp.promote_types(table_VD.dtype, jnp.float32)
    h_BTD = jnp.take(table_VD.astype(summed_in), ids_BT, axis=0, mode="clip").astype(dtype)
    h_BTD = jnp.where(is_token_BT1, h_BTD, jnp.nan)
    h_BTD = constrain(constrain(h_BTD, None, None, ("tensor", "fsdp")), "fsdp", None, "tensor")
    return constrain(h_BTD, "fsdp", None, None)


def map_shards(fn: Callable[..., jax.Array], *arguments: tuple[jax.Array, Sequence[str | None]]) -> jax.Array:
    """Compute `fn(*arrays)` as a `shard_map` over the axes that the surrounding mesh leaves to the partitioner.

    This is for functions that the partitioner cannot split, such as cuDNN's attention inside another `shard_map`.

    Args:
      fn: applied to the shards of a device; its result is one array.
      arguments: each array, whole, and the mesh axis of each of its dimensions. The result's are those of the first.
        An axis that does not divide each dimension that it is named for is left out.
    """
    arrays, axes = zip(*arguments, strict=True)
    auto_axes = jax.sharding.get_abstract_mesh().auto_axes
    if not auto_axes:
        return fn(*arrays)
    sizes = _axis_sizes()
    named = [(dim, name) for x, names in arguments for dim, name in zip(x.shape, names, strict=True) if name in sizes]
    unfit = {name for dim, name in named if dim % sizes[name]}
    specs = tuple(P(*(name if name in sizes and name not in unfit else None for name in names)) for names in axes)
    mapped = jax.shard_map(fn, in_specs=specs, out_specs=specs[0], axis_names=set(auto_axes), check_vma=False)
    return mapped(*arrays)


def _fitting_spec(shape: Sequence[int], axes: Sequence[str | tuple[str, ...] | None]) -> P:
    """The spec of those of `axes` that divide their dimension of a shape."""
    sizes = _axis_sizes()
    spec = []
    for dim, names in zip(shape, axes, strict=True):
        used, parts = [], 1
        for name in (names,) if isinstance(names, str) else names or ():
            if name in sizes and dim % (parts * sizes[name]) == 0:
                used.append(name)
                parts *= sizes[name]
        spec.append(tuple(used) or None)
    return P(*spec)


def num_devices(axis: str) -> int:
    """Number of devices along an axis that is left to the partitioner; 1 where the mesh has no such axis."""
    return _axis_sizes().get(axis, 1)


def num_shards(axis: str, dim: int) -> int:
    """Number of shards that `constrain` makes of a dimension of size `dim` over one axis."""
    return num_devices(axis) if dim % num_devices(axis) == 0 else 1


def _axis_sizes() -> dict[str, int]:
    """Number of devices along every axis that is left to the partitioner and has more than one."""
    mesh = jax.sharding.get_abstract_mesh()
    return {axis: mesh.shape[axis] for axis in mesh.auto_axes if mesh.shape[axis] > 1}
