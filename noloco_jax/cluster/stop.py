"""Stop a run on SIGTERM, SIGHUP or Ctrl-C: between two steps, with everything saved."""

import os
import signal
from collections.abc import Callable
from types import FrameType

from noloco_jax.cluster.processes import Processes

RESTART = 75  # EX_TEMPFAIL: stopped by SIGTERM or SIGHUP with everything saved; the same command resumes
INTERRUPTED = 130  # the status that shells give after Ctrl-C


class Stop:
    """Handler of SIGTERM, SIGHUP and SIGINT while it is open, so that a loop can save and stop between two steps.

    A second Ctrl-C ends the process at once; further SIGTERMs change nothing, for a save may be under way. A SIGHUP, as
    of a connection that drops, is ignored where it was before, as under `nohup`. Of several processes, a SIGTERM to any
    makes all stop after the same step: JAX's coordination service catches it and spreads the word, so only a SIGHUP is
    caught here, and made a SIGTERM, and Ctrl-C ends a process as it always does.

    Args:
      processes: those that stop together.

    Attributes:
      reason: the message after the stop.
      exit_status: the status after the stop.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._received: int | None = None
        self._former: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> "Stop":
        handlers: dict[int, Callable[[int, FrameType | None], None]] = {signal.SIGHUP: _terminate}
        if self._processes.alone:
            handlers = dict.fromkeys((signal.SIGTERM, signal.SIGHUP, signal.SIGINT), self._receive)
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            del handlers[signal.SIGHUP]
        for number, handler in handlers.items():
            self._former[number] = signal.signal(number, handler)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def is_due(self) -> bool:
        """Return True if the run stops here. Every process asks after every step, and all equally often."""
        return self._processes.agree_to_stop(self._received is not None)

    @property
    def reason(self) -> str:
        names: dict[int | None, str] = {signal.SIGINT: "Ctrl-C", signal.SIGHUP: "SIGHUP"}
        return f"stopped by {names.get(self._received, 'SIGTERM')}"

    @property
    def exit_status(self) -> int:
        return INTERRUPTED if self._received == signal.SIGINT else RESTART


def _terminate(number: int, frame: FrameType | None) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
