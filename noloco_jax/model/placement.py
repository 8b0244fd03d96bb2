"""Sharding constraints inside a replica, for XLA's partitioner where it would choose badly by itself."""

from collections.abc import Callable, Sequence

import jax
from jax.sharding import PartitionSpec as P


def constrain(x: jax.Array, *axes: str | tuple[str, ...] | None) -> jax.Array:
    """Shards each dimension of `x` over the mesh axes that are named for it: one, several as a tuple, or None.

    Only axes that the surrounding mesh leaves to the partitioner are used, and only where they divide the dimension.
    Without such axes, as outside a mesh, this returns `x` itself.
    """
    return jax.lax.with_sharding_constraint(x, _fitting(x.shape, axes)) if _axis_sizes() else x


def map_shards(fn: Callable[..., jax.Array], axes: Sequence[str | None], *arrays: jax.Array) -> jax.Array:
    """Computes `fn(*arrays)` as a `shard_map` over the axes that the surrounding mesh leaves to the partitioner.

    This is for functions that the partitioner cannot split, such as cuDNN's attention inside another `shard_map`.

    Args:
      fn: applied to the shards of a device; its result is one array.
      axes: the mesh axis of each dimension, for all arrays and the result alike. An axis that does not divide its
        dimension of every array is left out.
      arrays: the arguments, whole.
    """
    auto_axes = jax.sharding.get_abstract_mesh().auto_axes
    if not auto_axes:
        return fn(*arrays)
    fits = [_fitting(x.shape, axes) for x in arrays]
    spec = P(*(names[0] if len(set(names)) == 1 else None for names in zip(*fits, strict=True)))
    mapped = jax.shard_map(fn, in_specs=spec, out_specs=spec, axis_names=set(auto_axes), check_vma=False)
    return mapped(*arrays)


def _fitting(shape: Sequence[int], axes: Sequence[str | tuple[str, ...] | None]) -> P:
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


def num_parts(axis: str, dim: int) -> int:
    """Number of shards that `constrain` makes of a dimension of size `dim` over one axis."""
    return num_devices(axis) if dim % num_devices(axis) == 0 else 1


def _axis_sizes() -> dict[str, int]:
    """Number of devices along every axis that is left to the partitioner and has more than one."""
    mesh = jax.sharding.get_abstract_mesh()
    return {axis: mesh.shape[axis] for axis in mesh.auto_axes if mesh.shape[axis] > 1}
