"""Counts of the resources that this process holds, as Linux reports them."""

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path


def descriptors() -> int:
    """Open files and connections."""
    return len(os.listdir("/proc/self/fd"))


def resident() -> int:
    """Bytes of memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def settled(count: Callable[[], int]) -> int:
    """The least of what is counted within some time, in which a server closes what is closed.

    Connections whose call failed are in a circle with its error, which Python's collector opens when it sees fit.
    """
    gc.collect()
    least = count()
    for _ in range(20):
        time.sleep(0.02)
        least = min(least, count())
    return least


def in_time(holds: Callable[[], bool], patience: float = 60.0) -> bool:
    """Wait for a condition; other threads take long on a busy machine."""
    deadline = time.monotonic() + patience
    while not (held := holds()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return held
