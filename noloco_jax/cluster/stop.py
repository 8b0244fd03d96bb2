"""How a run is told to stop: by SIGTERM, or by Ctrl-C, between two steps and with everything saved."""

import signal
from types import FrameType

from noloco_jax.cluster.processes import Processes

RESTART = 75  # EX_TEMPFAIL: stopped by SIGTERM with everything saved; the same command goes on
INTERRUPTED = 130  # what shells report of Ctrl-C


class Stop:
    """Catches SIGTERM and SIGINT while it is open, so that a loop can save and stop between two steps.

    A second Ctrl-C ends the process at once; further SIGTERMs change nothing, for a save may be under way. Of several
    processes, a SIGTERM to any makes all stop after the same step: JAX's coordination service catches it and spreads
    the word, so nothing is caught here, and Ctrl-C ends a process as it always does.

    Args:
      processes: those that stop together.

    Attributes:
      reason: what the run says when it has stopped.
      exit_status: what it then exits with.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._received: int | None = None
        self._former: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> "Stop":
        if self._processes.alone:
            for number in (signal.SIGTERM, signal.SIGINT):
                self._former[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def at(self, step: int) -> bool:
        """Whether to stop after `step`. To be asked after every step, by every process."""
        return self._processes.agree_to_stop(step, self._received is not None)

    @property
    def reason(self) -> str:
        return "stopped by Ctrl-C" if self._received == signal.SIGINT else "stopped by SIGTERM"

    @property
    def exit_status(self) -> int:
        return INTERRUPTED if self._received == signal.SIGINT else RESTART
