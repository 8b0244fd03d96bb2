"""Batches of this process's replicas, as global arrays on the mesh.

One process reads a replica's data, the one with the replica's first device: if each of its processes read them, storage
would be read several times. To processes with other devices of a replica, a program broadcasts its batch.

Shapes: N replicas, R devices along `replica`, L = N / R; D devices of a replica; K arrays of a batch (inputs, labels,
perhaps segments), in the order of its names; B sequences of T tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from noloco_jax.spmd.gradients import Batch
from noloco_jax.spmd.sharding import BATCH_SPEC

if TYPE_CHECKING:
    from noloco_jax.spmd.programs import Programs

HostBatches = Mapping[int, Mapping[str, np.ndarray]]  # replica -> `input_ids` and `labels` int32 (B, T)

_INSIDE = ("stage", "fsdp", "tensor")  # the mesh axes of one replica's devices
_PARTS_SPEC = P("replica", _INSIDE)  # spec of parts_NDKBT


class BatchSource(Protocol):
    """Iterator over batches of the replicas that this process reads, with the stream positions after the last one."""

    def __next__(self) -> HostBatches: ...
    def get_state(self) -> dict[int, dict]: ...


class GlobalBatches:
    """Iterator over global batches. If replicas span processes, every process must take each batch.

    Args:
      source: batches of the replicas that this process reads, see `replicas_read_here`.
      programs: programs of the run.
    """

    def __init__(self, source: BatchSource, programs: "Programs"):
        self._source = source
        self._programs = programs

    def __iter__(self) -> "GlobalBatches":
        return self

    def __next__(self) -> Batch:
        read, programs = next(self._source), self._programs
        if programs.share_batch is None:
            return place_batch(read, programs.batch)
        return programs.share_batch(place_parts(read, tuple(programs.batch), programs.parts))

    def get_state(self) -> dict[int, dict]:
        """Return replica -> position of its stream after the batches taken so far, for the replicas read here."""
        return self._source.get_state()


def place_batch(read: HostBatches, batch: Batch) -> Batch:
    """Put the replicas' batches on their devices; a replica that spans processes gets its rows from each of them.

    Args:
      read: replica -> its whole batch, for every replica that this process holds a part of.
      batch: the global shapes and shardings.
    """

    def piece(name: str, index: Any) -> np.ndarray:
        replicas = range(*index[0].indices(batch[name].shape[0]))
        return np.stack([read[i][name][index[1:]] for i in replicas])

    return {
        name: jax.make_array_from_callback(spec.shape, spec.sharding, lambda index, name=name: piece(name, index))
        for name, spec in batch.items()
    }


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


def place_parts(read: HostBatches, names: Sequence[str], parts: jax.ShapeDtypeStruct) -> jax.Array:
    """Put the batches that this process reads on their replicas' first devices, and zeros on its others.

    Args:
      read: replica -> its batch (B, T), for the replicas of `replicas_read_here`.
      names: names of a batch's arrays.
      parts: shape and sharding from `parts_of`.

    Returns:
      parts_NDKBT.
    """
    zeros = np.zeros(parts.sharding.shard_shape(parts.shape), np.int32)  # pyright: ignore[reportOptionalMemberAccess]

    def piece(index: Any) -> np.ndarray:
        if index[1].start:
            return zeros
        replicas = range(*index[0].indices(parts.shape[0]))
        return np.stack([[[read[replica][name] for name in names]] for replica in replicas])

    return jax.make_array_from_callback(parts.shape, parts.sharding, piece)


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
