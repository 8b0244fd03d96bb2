"""Suppression of library logs about saves: the caller reports the error, which is also raised, in one line."""

import logging
import sys
from typing import Any

_LATE_WRITE = "Event loop is closed"  # tensorstore's error for a write that ends after another of its save has failed


def quiet_saves() -> None:
    """Keep Orbax from logging every save, and failed saves with the stack of every thread; one call is enough.

    Without this, asyncio would also log every other failed write of that save, each with a stack trace.
    """
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _without_late_writes


def _without_late_writes(unraisable: Any) -> None:
    if str(unraisable.exc_value) != _LATE_WRITE:
        sys.__unraisablehook__(unraisable)
