"""CPU cores and memory that this process may use, on Linux and on other systems."""

import os
from collections.abc import Collection
from pathlib import Path


def usable_cores() -> list[int]:
    """Return the numbers of the cores that this process may use, at least one; all of the machine's outside Linux."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def keep_on(pid: int, cores: Collection[int]) -> None:
    """Keep a process, before it has threads, on some cores; without effect outside Linux."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(pid, cores)


def usable_memory(root: Path = Path("/")) -> int:
    """Return the bytes of memory that this process may use: the machine's, or less where a control group says so.

    Args:
      root: where the kernel's file systems are mounted.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    try:
        groups = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:  # not on Linux
        groups = []
    for _, controllers, path in groups:
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        group = mount / path.strip("/")
        for folder in (group, *group.parents):  # inside a container the path may lie above what is mounted
            file = folder / name
            if file.is_file() and (text := file.read_text().strip()) != "max":
                limits.append(int(text))
            if folder == mount:
                break
    return min(limits)
