"""Suppression of library logs about saves: the caller reports the error, which is also raised, in one line."""

import logging
import sys
import traceback
from typing import Any

_LATE_WRITE = "Event loop is closed"  # tensorstore's error for a write that ends after another of its save has failed


def quiet_saves() -> None:
    """Keep Orbax from logging every save, and failed saves with the stack of every thread; one call is enough.

    Without this, asyncio would also log other failed writes of that save, each with a stack trace.
    """
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").addFilter(_is_no_write)
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _without_late_writes


def _is_no_write(record: logging.LogRecord) -> bool:
    """Return False for an error raised in Orbax in a task that is never awaited."""
    stack = traceback.walk_tb(record.exc_info[2] if record.exc_info else None)
    return not any(frame.f_globals.get("__name__", "").startswith("orbax.") for frame, _ in stack)


def _without_late_writes(unraisable: Any) -> None:
    if str(unraisable.exc_value) != _LATE_WRITE:
        sys.__unraisablehook__(unraisable)
