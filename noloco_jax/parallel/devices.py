"""How many CPU devices a process makes of its cores. To be settled before JAX starts."""

import os

import jax

from noloco_jax.config import TrainConfig
from noloco_jax.parallel.mesh import AXES


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
