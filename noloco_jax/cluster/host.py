"""What a process takes of its machine: CPU devices, and memory of the host and of GPUs. Settled before JAX starts."""

import os
from pathlib import Path

import jax

from noloco_jax.config import MeshConfig, TrainConfig
from noloco_jax.spmd.mesh import AXES

_GPU_FRACTION = "0.92"  # the rest holds CUDA's own code and the buffers of NCCL
_GPU_FRACTION_NAMES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # JAX refuses both at once


def use_cpu_cores(config: TrainConfig, num_processes: int = 1) -> None:
    """Sets the number of CPU devices of this process, see `num_cpu_devices`.

    Replicas on devices of their own run side by side without sharing a thread pool. Has no effect on GPUs, nor where
    XLA_FLAGS sets the number of devices already.
    """
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    cores = len(os.sched_getaffinity(0))
    count = num_cpu_devices(config.mesh, config.num_replicas, cores, num_processes)
    if config.outer.delay and (count > 1 or num_processes > 1):
        count = 2 * max(
            count, len(list(Path("/dev").glob("nvidia[0-9]*")))
        )  # `spmd.background` exchanges on half of them
    jax.config.update("jax_num_cpu_devices", count)


def num_cpu_devices(mesh: MeshConfig, num_replicas: int, cores: int, num_processes: int = 1) -> int:
    """The number of CPU devices that a process makes for a mesh.

    Args:
      mesh: devices along each axis.
      num_replicas: of the run.
      cores: CPU cores that this process may use.
      num_processes: of the run; several make one device each, or share out what an explicit mesh asks for.

    Returns:
      As many as an explicit mesh asks for. An axis of -1 takes the cores that are left: along `replica`, the largest
      number that divides `num_replicas`.
    """
    sizes = [getattr(mesh, axis) for axis in AXES]
    explicit = 1
    for size in sizes:
        explicit *= max(size, 1)
    if num_processes > 1:
        return -(-explicit // num_processes)
    if -1 not in sizes:
        return explicit
    left = max(cores // explicit, 1)
    if mesh.replica == -1:
        left = max(d for d in range(1, left + 1) if num_replicas % d == 0)
    return explicit * left


def use_gpu_memory() -> None:
    """Lets this process fill its GPUs, and pin as much of the host's memory as there is for offloaded state.

    JAX by itself stops at three quarters of a GPU, and at 64 GB of pinned memory. What the environment says of either
    stays. Has no effect on the CPU.
    """
    if not any(os.environ.get(name) for name in _GPU_FRACTION_NAMES):
        os.environ[_GPU_FRACTION_NAMES[0]] = _GPU_FRACTION
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(max(physical >> 30, 1)))
