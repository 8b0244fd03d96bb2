"""Mesh of devices of a run, and checks that the run fits it."""

import numpy as np
from jax.sharding import AxisType, Mesh

from noloco_jax.config import MeshConfig, TrainConfig
from noloco_jax.errors import Mistakes, UserError
from noloco_jax.optim.methods import METHODS, has_delay
from noloco_jax.spmd.sharding import check_fragments

AXES = ("replica", "stage", "fsdp", "tensor")


def mesh_shape(config: TrainConfig, num_devices: int) -> dict[str, int]:
    """Resolve the number of devices along every axis.

    -1 takes all remaining devices; for `replica`, the largest number of them that divides the replicas.

    Args:
      config: the run.
      num_devices: devices of all processes.

    Raises:
      UserError: if the mesh does not fit the devices, the batch or the model.
    """
    shape = {axis: getattr(config.mesh, axis) for axis in AXES}
    if num_devices == 1:
        shape["stage"] = 1  # one device runs the stages one after another
    fixed = int(np.prod([size for size in shape.values() if size != -1]))
    if fixed > num_devices:
        sizes = ", ".join(f"mesh.{axis}={size}" for axis, size in shape.items() if size != -1)
        others = ", besides those that exchange for outer.delay" if has_delay(config) else ""
        raise UserError(
            f"{sizes} need {fixed} devices, there are {num_devices}{others}: shrink the mesh or add devices"
        )
    left = num_devices // fixed
    for axis, size in shape.items():
        if size == -1 and axis == "replica":
            shape[axis] = max(d for d in range(1, left + 1) if config.num_replicas % d == 0)
        elif size == -1:
            shape[axis] = left
    _check(config, shape)
    return shape


def _check(config: TrainConfig, shape: dict[str, int]) -> None:
    model, data, mistakes = config.model, config.data, Mistakes()
    axes = {"hidden_size": "fsdp", "num_heads": "tensor", "num_kv_heads": "tensor", "intermediate_size": "tensor"}
    for name, axis in axes.items() if model.is_built_in else ():
        if (size := getattr(model, name)) % shape[axis]:
            mistakes.note(f"model.{name}={size} is not a multiple of mesh.{axis}={shape[axis]}: change one of them")
    if METHODS[config.method].has_outer_steps:
        with mistakes.noted():
            check_fragments(model, config.outer.fragments, shape)
    microbatch = data.batch_size // config.num_microbatches
    if microbatch % shape["fsdp"]:
        mistakes.note(
            f"micro-batches of {microbatch} sequences (data.batch_size={data.batch_size} over num_microbatches="
            f"{config.num_microbatches}) are not a multiple of mesh.fsdp={shape['fsdp']}: change one"
        )
    mistakes.raise_all()


def make_mesh(config: TrainConfig, devices: list) -> Mesh:
    """Make the run's mesh over the first devices that it needs; see `mesh_shape`.

    Raises:
      UserError: if it does not fit, or leaves a process without a device.
    """
    shape = mesh_shape(config, len(devices))
    mesh = mesh_of(shape, devices)
    idle = {device.process_index for device in devices} - {device.process_index for device in mesh.devices.flat}
    if idle:
        sizes = ", ".join(f"mesh.{axis}={size}" for axis, size in shape.items())
        raise UserError(
            f"num_replicas={config.num_replicas} with {sizes} takes {mesh.size} of {len(devices)} devices, and leaves "
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
