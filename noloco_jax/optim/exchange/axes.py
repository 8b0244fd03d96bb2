"""Axes of replicas: axes of a mesh, an axis of `vmap`, or several replicas on each device of mesh axes."""

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

PyTree = Any
AxisName = str | tuple[str, ...]


class ReplicaAxes(NamedTuple):
    """Replica axes that are bound in the current trace. Replica i = device · L + slot, with L slots a device.

    Attributes:
      device: mesh axes, in the order in which their devices are numbered; empty under `vmap` alone.
      slot: the `vmap` axis, or None.
    """

    device: tuple[str, ...]
    slot: str | None

    @classmethod
    def bound(cls, axis_name: AxisName) -> "ReplicaAxes":
        """Look up the axes of that name: mesh axes first, then at most one `vmap` axis.

        Raises:
          ValueError: if they are in another order, or those of the mesh in another than the mesh's.
          NameError: if an axis is not bound.
        """
        names = names_of(axis_name)
        for name in names:
            try:
                lax.axis_size(name)
            except NameError:
                raise NameError(
                    f"axis {name!r} of the replicas is not bound: an outer step runs inside jax.vmap(..., "
                    f"axis_name={name!r}) or jax.shard_map over a mesh axis {name!r}; or pass axis_name= with the name "
                    "of your axis"
                ) from None
        manual = jax.sharding.get_abstract_mesh().manual_axes
        device = tuple(name for name in names if name in manual)
        slots = tuple(name for name in names if name not in manual)
        if len(slots) > 1 or names != device + slots:
            raise ValueError(
                f"axis_name={axis_name!r}: replicas live on axes of a mesh and then on at most one vmap axis, and here "
                f"{', '.join(map(repr, slots))} are of vmap"
            )
        of_mesh = tuple(name for name in jax.sharding.get_abstract_mesh().axis_names if name in device)
        if device != of_mesh:
            raise ValueError(
                f"axis_name={axis_name!r} has another order than the mesh, whose axes messages follow: give "
                f"{of_mesh + slots}, and that order in the PartitionSpec"
            )
        return cls(device, slots[0] if slots else None)

    @property
    def num_devices(self) -> int:
        return lax.axis_size(self.device) if self.device else 1

    @property
    def num_slots(self) -> int:
        return lax.axis_size(self.slot) if self.slot else 1

    @property
    def num_replicas(self) -> int:
        return self.num_devices * self.num_slots

    def replica(self) -> jax.Array | int:
        """Return this replica's number."""
        device = lax.axis_index(self.device) if self.device else 0
        return device * self.num_slots + (lax.axis_index(self.slot) if self.slot else 0)


def num_parts() -> int:
    """Return the number of devices over which the partitioner may shard a replica's arrays (on its auto axes)."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[name] for name in mesh.axis_names if name not in mesh.manual_axes)


def by_parts(fn: Callable[[jax.Array], jax.Array], dim: int, out_dim: int) -> Callable[[jax.Array], jax.Array]:
    """Apply a function with a collective over replicas to each device's part of an array, split along dimension `dim`.

    The result is put together along `out_dim`. The partitioner would first gather the array inside every replica.
    """
    if num_parts() == 1:
        return fn
    mesh = jax.sharding.get_abstract_mesh()
    inside = tuple(name for name in mesh.axis_names if name not in mesh.manual_axes)
    in_specs, out_specs = P(*[None] * dim, inside), P(*[None] * out_dim, inside)
    return jax.shard_map(fn, in_specs=in_specs, out_specs=out_specs, axis_names=set(inside), check_vma=False)


def names_of(axis_name: AxisName) -> tuple[str, ...]:
    """Return the name or names as a tuple."""
    return (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)


def checked_axes(tree: PyTree, axis_name: AxisName, num_replicas: int) -> ReplicaAxes:
    """Look up the axes over which such trees are exchanged; raise `ValueError` if they hold more or fewer replicas."""
    axes = ReplicaAxes.bound(axis_name)
    if axes.num_replicas != num_replicas:
        raise ValueError(
            f"the pairing is of {num_replicas} replicas, axis {axis_name!r} holds {axes.num_replicas}: make the two "
            "equal"
        )
    warn_if_sharded(tree, axes)
    return axes


def warn_if_sharded(tree: PyTree, axes: ReplicaAxes) -> None:
    """Warn at compile time if the replicas of a plain `vmap` are sharded over several devices."""
    if axes.device or axes.slot is None:
        return

    def look(sharding: Any) -> None:
        if len(sharding.device_set) > 1 and not sharding.is_fully_replicated:
            warnings.warn(
                f"the replicas of vmap axis {axes.slot!r} lie on {len(sharding.device_set)} devices, and every "
                "outer step gathers all weights on all of them: run the step in jax.shard_map over a mesh axis of "
                f"replicas (for several a device with this vmap inside, axis_name=(MESH_AXIS, {axes.slot!r}))",
                stacklevel=2,
            )

    for leaf in jax.tree.leaves(tree)[:1]:
        jax.debug.inspect_array_sharding(leaf, callback=look)
