"""Mesh of devices of a run, and checks that the run fits it."""

from collections.abc import Mapping

import numpy as np
from jax.sharding import AxisType, Mesh

from noloco_jax.config import MeshConfig, ModelConfig
from noloco_jax.errors import Mistakes, UserError
from noloco_jax.spmd.sharding import check_fragments

AXES = ("replica", "stage", "fsdp", "tensor")


def mesh_shape(mesh: MeshConfig, num_replicas: int, num_devices: int, delay: int = 0) -> dict[str, int]:
    """Resolve the number of devices along every axis.

    -1 takes all remaining devices; for `replica`, the largest number of them that divides the replicas.

    Args:
      mesh: the sizes that are given.
      num_replicas: of the run.
      num_devices: devices of all processes.
      delay: of the run's corrections, whose exchanges have other devices.

    Raises:
      UserError: if the mesh does not fit the devices.
    """
    shape = {axis: getattr(mesh, axis) for axis in AXES}
    if num_devices == 1:
        shape["stage"] = 1  # one device runs the stages one after another
    fixed = int(np.prod([size for size in shape.values() if size != -1]))
    if fixed > num_devices:
        sizes = ", ".join(f"mesh.{axis}={size}" for axis, size in shape.items() if size != -1)
        others = ", besides those that exchange for outer.delay" if delay else ""
        raise UserError(
            f"{sizes} need {fixed} devices, there are {num_devices}{others}: shrink the mesh or add devices"
        )
    left = num_devices // fixed
    for axis, size in shape.items():
        if size == -1 and axis == "replica":
            shape[axis] = max(d for d in range(1, left + 1) if num_replicas % d == 0)
        elif size == -1:
            shape[axis] = left
    return shape


def check_layout(
    model: ModelConfig, batch_size: int, num_microbatches: int, fragments: int, shape: Mapping[str, int]
) -> None:
    """Raise `UserError` if devices of a mesh of this shape cannot share out a replica's weights, batch and fragments.

    Args:
      model: the model.
      batch_size: sequences of a replica's batch.
      num_microbatches: its parts.
      fragments: of the outer steps.
      shape: mesh axis -> devices.
    """
    mistakes = Mistakes()
    axes = {"hidden_size": "fsdp", "num_heads": "tensor", "num_kv_heads": "tensor", "intermediate_size": "tensor"}
    for name, axis in axes.items() if model.is_built_in else ():
        if (size := getattr(model, name)) % shape[axis]:
            mistakes.note(f"model.{name}={size} is not a multiple of mesh.{axis}={shape[axis]}: change one of them")
    with mistakes.noted():
        check_fragments(model, fragments, shape)
    microbatch = batch_size // num_microbatches
    if microbatch % shape["fsdp"]:
        mistakes.note(
            f"micro-batches of {microbatch} sequences (data.batch_size={batch_size} over num_microbatches="
            f"{num_microbatches}) are not a multiple of mesh.fsdp={shape['fsdp']}: change one"
        )
    mistakes.raise_all()


def make_mesh(sizes: MeshConfig, num_replicas: int, devices: list, delay: int = 0) -> Mesh:
    """Make a run's mesh over the first devices that it needs; see `mesh_shape` for the arguments.

    Raises:
      UserError: if it does not fit, or leaves a process without a device.
    """
    shape = mesh_shape(sizes, num_replicas, len(devices), delay)
    mesh = mesh_of(shape, devices)
    idle = {device.process_index for device in devices} - {device.process_index for device in mesh.devices.flat}
    if idle:
        taken = ", ".join(f"mesh.{axis}={size}" for axis, size in shape.items())
        raise UserError(
            f"num_replicas={num_replicas} with {taken} takes {mesh.size} of {len(devices)} devices, and leaves "
            f"{len(idle)} of the processes (such as {min(idle)}) without any: raise mesh.fsdp, choose num_replicas so "
            "that they share out all devices, or start fewer processes"
        )
    return mesh


def mesh_of(shape: dict[str, int] | MeshConfig, devices: list) -> Mesh:
    """Make a mesh of resolved sizes over the first devices; the devices of one replica are adjacent."""
    sizes = [shape[axis] if isinstance(shape, dict) else getattr(shape, axis) for axis in AXES]
    used = np.asarray(devices[: int(np.prod(sizes))]).reshape(sizes)
    # With explicit axes, the default of JAX, every operation of the model would have to state its sharding (jax 0.10).
    return Mesh(used, AXES, axis_types=(AxisType.Auto,) * len(AXES))
