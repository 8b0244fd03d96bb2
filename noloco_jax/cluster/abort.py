"""JAX ends a process that has lost another by abort(), in a thread of its own: here with a line and exit status 1."""

import ctypes
import os
import signal

_LINE = "error: JAX ended this process, for the reason above: the same command goes on from the last checkpoint{}\n"
_handlers: list[object] = []  # which C calls, so that none may be collected


def end_with_status_on_abort(place: str) -> None:
    """Makes an abort(), from now on, end this process with exit status 1, as what may work when it is tried again.

    A process dies of the signal otherwise, which reads as a crash. Python's own handlers run between two of its
    instructions, which an aborting process does not live to see, and JAX can tell Python of no lost process: it calls
    `missed_heartbeat_callback` with a status that has no form in Python (jaxlib 0.10 and 0.12).

    Args:
      place: what the line ends with, such as the process's number and host.
    """
    line = _LINE.format(place).encode()

    def end(_: int) -> None:
        os.write(2, line)
        os._exit(1)

    _handlers.append(handler := ctypes.CFUNCTYPE(None, ctypes.c_int)(end))
    ctypes.CDLL(None).signal(signal.SIGABRT, handler)
