"""Waits for conditions that other threads bring about."""

import time
from collections.abc import Callable


def in_time(holds: Callable[[], bool], patience: float = 60.0) -> bool:
    """Wait for a condition; other threads take long on a busy machine."""
    deadline = time.monotonic() + patience
    while not (held := holds()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return held
