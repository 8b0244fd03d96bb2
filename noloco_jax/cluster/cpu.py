"""What a process makes of its CPU: devices of its cores, and how it keeps memory. To be settled before JAX starts."""

import ctypes
import os
import platform
from pathlib import Path

import jax

from noloco_jax.config.fields import TrainConfig
from noloco_jax.spmd.mesh import AXES

# Parameters of glibc's mallopt, from its malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> None:
    """Where the CPU trains, keeps memory that was freed for the next step.

    XLA allocates the temporaries of every step anew, and glibc hands blocks of that size back to the kernel, which
    clears each page again: a tenth of a step. Has no effect with a GPU, without glibc, or on threads that allocated
    before: to be called first.
    """
    platforms = os.environ.get("JAX_PLATFORMS", "")
    on_cpu = platforms.startswith("cpu") if platforms else not Path("/dev/nvidiactl").exists()
    if on_cpu and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_ARENA_MAX, 1)  # only the first arena holds blocks of any size
        libc.mallopt(_MMAP_MAX, 0)
        libc.mallopt(_TRIM_THRESHOLD, -1)


def use_cpu_cores(config: TrainConfig, num_processes: int = 1) -> None:
    """On the CPU, makes a device of every core that the run can use, and as many as an explicit mesh asks for.

    Several processes make one device each, or share out what an explicit mesh asks for.

    Replicas on devices of their own run side by side without sharing a thread pool. Has no effect on GPUs, nor where
    XLA_FLAGS sets the number of devices already.
    """
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    sizes = [getattr(config.mesh, axis) for axis in AXES]
    num_devices = 1
    for size in sizes:
        num_devices *= max(size, 1)
    if num_processes > 1:
        num_devices = -(-num_devices // num_processes)
    elif -1 in sizes:
        left = max(len(os.sched_getaffinity(0)) // num_devices, 1)
        if config.mesh.replica == -1:
            left = max(d for d in range(1, left + 1) if config.num_replicas % d == 0)
        num_devices *= left
    jax.config.update("jax_num_cpu_devices", num_devices)
