"""One sign of life while something takes long."""

import contextlib
import threading
from collections.abc import Callable, Iterator

from noloco_jax.errors import tell

SILENT_SECONDS = 10.0  # after which people wonder


@contextlib.contextmanager
def told_if_slow(line: str, report: Callable[[str], None] = tell) -> Iterator[None]:
    """Report a line, once, if the body takes more than `SILENT_SECONDS`."""
    timer = threading.Timer(SILENT_SECONDS, report, [line])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
