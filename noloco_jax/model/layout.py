"""Where activations and weights lie on the devices of a replica, told to the partitioner where it would guess badly."""

import jax
from jax.sharding import PartitionSpec as P


def lay(x: jax.Array, *axes: str | tuple[str, ...] | None) -> jax.Array:
    """`x` with each dimension over the mesh axes named for it: one, several as a tuple, or none.

    Only axes that the surrounding mesh leaves to the partitioner are used, as far as they divide their dimension;
    without any, as outside a mesh, this is `x`.
    """
    sizes = _axis_sizes()
    if not sizes:
        return x
    spec = []
    for dim, names in zip(x.shape, axes, strict=True):
        used, parts = [], 1
        for name in (names,) if isinstance(names, str) else names or ():
            if name in sizes and dim % (parts * sizes[name]) == 0:
                used.append(name)
                parts *= sizes[name]
        spec.append(tuple(used) or None)
    return jax.lax.with_sharding_constraint(x, P(*spec))


def num_parts(axis: str, dim: int) -> int:
    """The parts that `lay` makes of a dimension over one axis."""
    size = _axis_sizes().get(axis, 1)
    return size if dim % size == 0 else 1


def _axis_sizes() -> dict[str, int]:
    """Devices along the axes that are left to the partitioner, of those with several."""
    mesh = jax.sharding.get_abstract_mesh()
    return {axis: mesh.shape[axis] for axis in mesh.auto_axes if mesh.shape[axis] > 1}
