"""What a process may take of the memory of its GPUs, and of the host's for them. To be settled before JAX starts."""

import os

_FRACTION = "0.92"  # what is left holds CUDA's own code and the buffers of NCCL
_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # JAX takes one of them, never both


def use_gpu_memory() -> None:
    """Lets this process fill its GPUs, and pin as much of the host's memory as there is for what is offloaded.

    JAX by itself stops at three quarters of a GPU, and at 64 GB of pinned memory. What the environment says of either
    stays. Has no effect on the CPU.
    """
    if not any(os.environ.get(name) for name in _FRACTIONS):
        os.environ[_FRACTIONS[0]] = _FRACTION
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(max(physical >> 30, 1)))
