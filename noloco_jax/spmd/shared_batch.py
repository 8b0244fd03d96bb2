"""Broadcast of a replica's batch to all of its devices, if these belong to several processes and only one reads it.

Shapes: N replicas, R devices along `replica`, L = N / R; D devices of a replica; K arrays of a batch (inputs, labels,
perhaps segments), in the order of its names; B sequences of T tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from noloco_jax.spmd.gradients import Batch
from noloco_jax.spmd.sharding import BATCH_SPEC

_INSIDE = ("stage", "fsdp", "tensor")  # the mesh axes of one replica's devices
_PARTS_SPEC = P("replica", _INSIDE)  # spec of parts_NDKBT


def spans_processes(mesh: Mesh) -> bool:
    """Return True if the devices of some replica belong to several processes."""
    owners_RD = np.array([device.process_index for device in mesh.devices.flat]).reshape(mesh.shape["replica"], -1)
    return bool((owners_RD != owners_RD[:, :1]).any())


def replicas_read_here(mesh: Mesh, num_replicas: int) -> list[int]:
    """Return the replicas whose data this process reads: those whose first device it holds. Each has one reader."""
    first_devices = mesh.devices.reshape(mesh.shape["replica"], -1)[:, 0]
    slots = num_replicas // len(first_devices)
    here = [number for number, device in enumerate(first_devices) if device.process_index == jax.process_index()]
    return [number * slots + slot for number in here for slot in range(slots)]


def parts_of(batch: Mapping[str, jax.ShapeDtypeStruct], mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Return shape and sharding of the argument of `share_program`, for a batch of arrays (N, B, T)."""
    num_replicas, *shape = batch["input_ids"].shape
    parts = (num_replicas, mesh.size // mesh.shape["replica"], len(batch), *shape)
    return jax.ShapeDtypeStruct(parts, jnp.int32, sharding=NamedSharding(mesh, _PARTS_SPEC))


def share_program(mesh: Mesh, names: Sequence[str]) -> Callable[[jax.Array], Batch]:
    """Build a program that broadcasts each replica's batch from its first device to all of its devices.

    It takes parts_NDKBT: the batch on the first device of a replica, zeros on the others. The batch is their sum; a
    reduction is used because every backend has one, over any number of axes.
    """

    copies = tuple(axis for axis in ("stage", "tensor") if mesh.shape[axis] > 1)  # devices with the same rows

    def share(parts_L1KBT: jax.Array) -> Batch:
        rows_LKBT = parts_L1KBT[:, 0]
        if mesh.shape["fsdp"] > 1:
            rows_LKBT = jax.lax.psum_scatter(rows_LKBT, "fsdp", scatter_dimension=2, tiled=True)
        if copies:
            rows_LKBT = jax.lax.psum(rows_LKBT, copies)
        return {name: rows_LKBT[:, number] for number, name in enumerate(names)}

    specs = dict.fromkeys(names, BATCH_SPEC)
    # With check_vma, `shard_map` holds rows to differ along an axis of one device, over which nothing is summed (jax
    # 0.10.2), and refuses these specs.
    return jax.jit(jax.shard_map(share, mesh=mesh, in_specs=_PARTS_SPEC, out_specs=specs, check_vma=False))


class PartPlacer:
    """Placement of the batches that this process reads on their replicas' first devices, with zeros on its others.

    Args:
      parts: shape and sharding from `parts_of`.
      names: names of a batch's arrays.
    """

    def __init__(self, parts: jax.ShapeDtypeStruct, names: Sequence[str]):
        self._parts, self._names = parts, names
        indices: Any = parts.sharding.addressable_devices_indices_map(parts.shape)
        self._replicas = {}  # device -> the replicas whose batches it takes
        self._zeros = {}  # device -> what it holds otherwise, at every step
        for device, index in indices.items():
            if index[1].indices(parts.shape[1])[0] == 0:
                self._replicas[device] = range(*index[0].indices(parts.shape[0]))
            else:
                self._zeros[device] = jax.device_put(
                    np.zeros(parts.sharding.shard_shape(parts.shape), np.int32), device
                )

    def __call__(self, read: Mapping[int, Mapping[str, np.ndarray]]) -> jax.Array:
        """Build parts_NDKBT from replica -> its batch (B, T), for the replicas of `replicas_read_here`."""
        rows = {
            device: jax.device_put(
                np.stack([[[read[replica][name] for name in self._names]] for replica in replicas]), device
            )
            for device, replicas in self._replicas.items()
        }
        return jax.make_array_from_single_device_arrays(
            self._parts.shape, self._parts.sharding, [*rows.values(), *self._zeros.values()]
        )
