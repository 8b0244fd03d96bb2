"""The memory that a process on the CPU takes from the kernel and gives back. Imports nothing heavy: it comes first."""

import ctypes
import os
import platform
from pathlib import Path

# Parameters of glibc's mallopt, from its malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> None:
    """Where the CPU trains, makes the allocator keep freed memory for the next step.

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
