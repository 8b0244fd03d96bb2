"""CPU cores that this process may use, on Linux and where the kernel does not tell, as on macOS."""

import os
from collections.abc import Collection


def usable_cores() -> list[int]:
    """Return the numbers of the cores that this process may use, at least one; all of the machine's outside Linux."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def keep_on(pid: int, cores: Collection[int]) -> None:
    """Keep a process, before it has threads, on some cores; without effect outside Linux."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(pid, cores)
