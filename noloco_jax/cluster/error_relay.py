"""An error that one process alone meets, in a file that only it reads: all processes of the run end with its line."""

import contextlib
import os
import sys
import threading
import time
from typing import Any

from jax._src import distributed  # the key-value store that processes share has no public name

_ERRORS = "noloco_jax/errors"
_LISTEN_SECONDS = 1.0
_LEAVE_SECONDS = 10  # that the others have for hearing of an error
_SERVICE_SECONDS = 1.0  # process 0 holds the store, whose end would abort whoever has not left yet


class Alarm:
    """Listens, from its making on, for the errors of other processes, and ends this one with the first of them.

    It goes through JAX's coordination service, in a thread of its own: no collective, nobody waits for anybody.

    Args:
      process_id: this process.
    """

    def __init__(self, process_id: int):
        self._client: Any = distributed.global_state.client
        self._process_id = process_id
        self._ending = threading.Lock()  # held by who ends this process, so that it reports one error
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Listens no more."""
        self._stopped.set()
        self._thread.join()

    def silence(self) -> None:
        """Keeps other processes' errors from ending this one, unless one does so already: then it does not return."""
        self._ending.acquire()

    def ring(self, error: str) -> None:
        """Ends this process, which is to be silenced before, and all others: each prints `error`, exit status 2."""
        with contextlib.suppress(Exception):  # the service may be gone
            self._client.key_value_set(f"{_ERRORS}/{self._process_id}", error)
        self._end(error)

    def _listen(self) -> None:
        while not self._stopped.wait(_LISTEN_SECONDS):
            try:
                errors = self._client.key_value_dir_get(_ERRORS)
            except Exception:  # the service is gone: what follows from that is JAX's to say
                return
            if errors and self._ending.acquire(blocking=False):
                self._end(errors[0][1])

    def _end(self, error: str) -> None:
        sys.stdout.flush()
        print(f"error: {error}", file=sys.stderr, flush=True)
        with contextlib.suppress(Exception):  # somebody does not come
            self._client.wait_at_barrier(_ERRORS, _LEAVE_SECONDS * 1000)
        if self._process_id == 0:
            time.sleep(_SERVICE_SECONDS)
        os._exit(2)
