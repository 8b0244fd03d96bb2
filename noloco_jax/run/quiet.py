"""What libraries print of a save besides raising it is not shown: the error is told in one line by who waits for it."""

import logging
import sys
from typing import Any

_LATE_WRITE = "Event loop is closed"  # what tensorstore says of a write that ends after another of its save has failed


def quiet_saves() -> None:
    """Keeps orbax from logging every save, and a failed one with the stack of every thread; once is enough.

    Its other writes that failed beside that one would be told by asyncio, each with a stack of its own.
    """
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _without_late_writes


def _without_late_writes(unraisable: Any) -> None:
    if str(unraisable.exc_value) != _LATE_WRITE:
        sys.__unraisablehook__(unraisable)
