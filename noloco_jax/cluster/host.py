"""CPU devices and memory of the host and of GPUs that a process takes, settled before JAX starts.

Imports nothing heavy by itself, as the memory is settled before anything that starts threads.
"""

import ctypes
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noloco_jax.cores import usable_cores, usable_memory
from noloco_jax.errors import UserError, described

if TYPE_CHECKING:
    from noloco_jax.config import MeshConfig

_GPU_FRACTION = "0.92"  # the rest holds CUDA's own code and the buffers of NCCL
_GPU_FRACTION_NAMES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # JAX refuses both at once
# Parameters of glibc's mallopt, from its malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> None:
    """Make the allocator keep freed memory for the next step, where the CPU trains.

    XLA allocates the temporaries of every step anew, and glibc hands blocks of that size back to the kernel, which
    clears each page again: a tenth to a quarter of a step. Has no effect with a GPU or without glibc.

    Call it before numpy and jax are imported, as they start threads. A thread gets an arena of its own until their
    number is limited, a later thread takes over that of one that has ended, and only the first arena keeps blocks of
    any size.
    """
    platforms = os.environ.get("JAX_PLATFORMS", "")
    on_cpu = platforms.startswith("cpu") if platforms else not Path("/dev/nvidiactl").exists()
    if on_cpu and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_ARENA_MAX, 1)
        libc.mallopt(_MMAP_MAX, 0)
        libc.mallopt(_TRIM_THRESHOLD, -1)


def use_cpu_cores(mesh: "MeshConfig", num_replicas: int, delay: int = 0, num_processes: int = 1) -> None:
    """Set the number of CPU devices of this process, see `num_cpu_devices`, and of those that exchange with a delay.

    Replicas on devices of their own run side by side without sharing a thread pool. Has no effect on GPUs, nor where
    the environment sets the number of devices already, by JAX_NUM_CPU_DEVICES or XLA_FLAGS.
    """
    if "JAX_NUM_CPU_DEVICES" in os.environ or "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    import jax

    cores = len(usable_cores())
    count = num_cpu_devices(mesh, num_replicas, cores, num_processes)
    if delay and mesh.replica != 1 and (count > 1 or num_processes > 1):
        # Exchanges have CPU devices of their own (`spmd.background`): one for every GPU, or for every other CPU device.
        on_cpu = os.environ.get("JAX_PLATFORMS", "").startswith("cpu")
        gpus = [] if on_cpu else list(Path("/dev").glob("nvidia[0-9]*"))
        count = len(gpus) or 2 * count
    jax.config.update("jax_num_cpu_devices", count)


def num_cpu_devices(mesh: "MeshConfig", num_replicas: int, cores: int, num_processes: int = 1) -> int:
    """Return the number of CPU devices that a process makes for a mesh.

    Args:
      mesh: devices along each axis.
      num_replicas: of the run.
      cores: CPU cores that this process may use.
      num_processes: of the run; several make one device each, or share out what an explicit mesh asks for.

    Returns:
      As many as an explicit mesh asks for. An axis of -1 takes the cores that are left: along `replica`, the largest
      number that divides `num_replicas`.
    """
    from noloco_jax.spmd.mesh import AXES

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
    """Let this process fill its GPUs, and pin as much of the host's memory as it may use for offloaded state.

    JAX by itself stops at three quarters of a GPU, and at 64 GB of pinned memory. What the environment says of either
    stays. Has no effect on the CPU.
    """
    if not any(os.environ.get(name) for name in _GPU_FRACTION_NAMES):
        os.environ[_GPU_FRACTION_NAMES[0]] = _GPU_FRACTION
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(max(usable_memory() >> 30, 1)))


# Variables of JAX with which the trainer's programs do not run, their values, and the reason.
_UNSUITED = (
    ("JAX_NUMPY_DTYPE_PROMOTION", ("strict",), "the programs mix float32 and bfloat16"),
    ("JAX_ENABLE_X64", ("1", "true", "yes", "on"), "the programs compute in 32 bits at most"),
    *(
        (f"JAX_TRANSFER_GUARD{which}", ("disallow", "disallow_explicit"), "batches and metrics are transferred")
        for which in ("", "_HOST_TO_DEVICE", "_DEVICE_TO_HOST", "_DEVICE_TO_DEVICE")
    ),
)


def find_devices() -> list[Any]:
    """Return all devices of the run, which JAX makes at the first call.

    Raises:
      UserError: for a variable of the environment with which JAX finds none, or the programs cannot run; it is named.
    """
    import jax

    for name, values, reason in _UNSUITED:
        value = os.environ.get(name, "")
        if value.lower() in values:
            raise UserError(f"{name}={value} is set, and {reason}: unset it")
    _check_xla_flags()
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:
        platforms = os.environ.get("JAX_PLATFORMS")
        if not platforms or jax.distributed.is_initialized():  # then another process may be the reason
            raise
        reason = "JAX finds no such device" if isinstance(error, AssertionError) else described(error)
        raise UserError(
            f"JAX_PLATFORMS={platforms} cannot be used here ({reason}): correct it, unset it, or install JAX for these "
            "devices"
        ) from None


def _check_xla_flags() -> None:
    """Raise `UserError` for an unknown flag in XLA_FLAGS, for which XLA ends its process: here, one that only tries."""
    if os.environ.get("XLA_FLAGS"):
        program = "from jaxlib import xla_client; xla_client.make_cpu_client()"
        tried = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        if unknown := re.search(r"Unknown flags? in XLA_FLAGS: (.*)", tried.stderr):
            raise UserError(f"XLA_FLAGS has flags that XLA does not know: {unknown[1]}; correct or unset it")
