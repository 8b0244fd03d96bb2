"""Stop a run on SIGTERM, SIGHUP or Ctrl-C: between two steps, with everything saved."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from noloco_jax.cluster.processes import Processes
from noloco_jax.errors import INTERRUPTED, RESTART, tell

_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGHUP: "SIGHUP", signal.SIGTERM: "SIGTERM"}


class Stop:
    """Handler of SIGTERM, SIGHUP and SIGINT while it is open, so that a loop can save and stop between two steps.

    It says at once what follows. A second Ctrl-C ends the process at once; further SIGTERMs change nothing, for a save
    may be under way. A SIGHUP, as of a connection that drops, is ignored where it was before, as under `nohup`. Of
    several processes, a SIGTERM to any makes all stop after the same step: JAX's coordination service catches it and
    spreads the word, so only a SIGHUP is caught here, and made a SIGTERM, and Ctrl-C ends a process as it always does.

    Args:
      processes: those that stop together.

    Attributes:
      current: the work after which the run stops, for people.
      reason: the message after the stop.
      exit_status: the status after the stop.
    """

    def __init__(self, processes: Processes) -> None:
        self.current = "the start"
        self._processes = processes
        self._received: int | None = None
        self._former: dict[int, signal._HANDLER] = {}
        self._former_fd = self._pipe = -1

    def __enter__(self) -> "Stop":
        handlers: dict[int, Callable[[int, FrameType | None], None]] = {signal.SIGHUP: _terminate}
        if self._processes.alone:
            handlers = dict.fromkeys((signal.SIGTERM, signal.SIGHUP, signal.SIGINT), self._receive)
            self._announce_at_once()
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            del handlers[signal.SIGHUP]
        for number, handler in handlers.items():
            self._former[number] = signal.signal(number, handler)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        if self._pipe >= 0:
            signal.set_wakeup_fd(self._former_fd)
            os.close(self._pipe)  # ends the thread

    def _announce_at_once(self) -> None:
        """Announce the stop from a thread: Python runs handlers only between two of its own instructions.

        The main thread may be inside a compilation, or wait for a step, for minutes.
        """
        reader, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        self._former_fd = signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)

        def announce() -> None:
            numbers = os.read(reader, 1)
            while numbers and numbers[0] not in self._former:
                numbers = os.read(reader, 1)
            if numbers:
                again = "; Ctrl-C again ends it now, without saving" if numbers[0] == signal.SIGINT else ""
                tell(f"{_NAMES[signal.Signals(numbers[0])]}: the run saves and stops after {self.current}{again}")
            with contextlib.suppress(OSError):
                while os.read(reader, 64):
                    pass
            os.close(reader)

        threading.Thread(target=announce, name="stop", daemon=True).start()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def is_due(self) -> bool:
        """Return True if the run stops here. Every process asks after every step, and all equally often."""
        return self._processes.agree_to_stop(self._received is not None)

    @property
    def reason(self) -> str:
        return f"stopped by {_NAMES.get(signal.Signals(self._received or signal.SIGTERM))}"

    @property
    def exit_status(self) -> int:
        return INTERRUPTED if self._received == signal.SIGINT else RESTART


def _terminate(number: int, frame: FrameType | None) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
