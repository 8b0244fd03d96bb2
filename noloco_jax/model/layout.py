"""Where activations and weights lie on the devices of a replica, told to the partitioner where it would guess badly."""

from collections.abc import Callable, Sequence

import jax
from jax.sharding import PartitionSpec as P


def lay(x: jax.Array, *axes: str | tuple[str, ...] | None) -> jax.Array:
    """`x` with each dimension over the mesh axes named for it: one, several as a tuple, or none.

    Only axes that the surrounding mesh leaves to the partitioner are used, as far as they divide their dimension;
    without any, as outside a mesh, this is `x`.
    """
    return jax.lax.with_sharding_constraint(x, _fitting(x.shape, axes)) if _axis_sizes() else x


def on_parts(fn: Callable[..., jax.Array], axes: Sequence[str | None], *arrays: jax.Array) -> jax.Array:
    """`fn(*arrays)` with every device at work on its own part of the arrays and of the result, which lie alike.

    For what the partitioner cannot cut: cuDNN's attention beside axes that the programs are written over by hand.
    `axes` as in `lay`; one that does not divide every array is left out.
    """
    auto_axes = jax.sharding.get_abstract_mesh().auto_axes
    if not auto_axes:
        return fn(*arrays)
    fits = [_fitting(x.shape, axes) for x in arrays]
    spec = P(*(names[0] if len(set(names)) == 1 else None for names in zip(*fits, strict=True)))
    mapped = jax.shard_map(fn, in_specs=spec, out_specs=spec, axis_names=set(auto_axes), check_vma=False)
    return mapped(*arrays)


def _fitting(shape: Sequence[int], axes: Sequence[str | tuple[str, ...] | None]) -> P:
    """The part of `axes` that divides a shape."""
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
    """Devices along an axis that is left to the partitioner; 1 without it."""
    return _axis_sizes().get(axis, 1)


def num_parts(axis: str, dim: int) -> int:
    """The parts that `lay` makes of a dimension over one axis."""
    return num_devices(axis) if dim % num_devices(axis) == 0 else 1


def _axis_sizes() -> dict[str, int]:
    """Devices along the axes that are left to the partitioner, of those with several."""
    mesh = jax.sharding.get_abstract_mesh()
    return {axis: mesh.shape[axis] for axis in mesh.auto_axes if mesh.shape[axis] > 1}
