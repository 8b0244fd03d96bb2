"""An error that only one process meets, in a file that only it reads, ends all processes of the run."""

import contextlib
import json
import os
import sys
import threading
import time
from typing import Any

from jax._src import distributed  # the key-value store that processes share has no public name

from noloco_jax.errors import tell

_ERRORS = "noloco_jax/errors"
_POLL_SECONDS = 1.0
_LEAVE_SECONDS = 10  # the time in which the others have to hear of an error
_SERVICE_SECONDS = 1.0  # process 0 holds the store, and its end would abort whoever has not left yet


class ErrorRelay:
    """Listener, from its making on, for the errors of other processes, which ends this one with the first of them.

    It goes through JAX's coordination service, in a thread of its own: no collective, and no process waits for another.

    Args:
      process_id: this process.
    """

    def __init__(self, process_id: int):
        self._client: Any = distributed.global_state.client
        self._process_id = process_id
        self._ending = threading.Lock()  # held by who ends this process, so that it reports one error
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._closed.set()
        self._thread.join()

    def ignore_others(self) -> None:
        """Keep other processes' errors from ending this one. Does not return if one of them does so already."""
        self._ending.acquire()

    def end_all(self, error: str, status: int) -> None:
        """End this process and all others with `error` and exit `status`; call `ignore_others` before."""
        with contextlib.suppress(Exception):  # the service may be gone
            self._client.key_value_set(f"{_ERRORS}/{self._process_id}", json.dumps([error, status]))
        self._end(error, status)

    def _listen(self) -> None:
        while not self._closed.wait(_POLL_SECONDS):
            try:
                errors = self._client.key_value_dir_get(_ERRORS)
            except Exception:  # the service is gone, and JAX reports what follows from that
                return
            if errors and self._ending.acquire(blocking=False):
                self._end(*json.loads(errors[0][1]))

    def _end(self, error: str, status: int) -> None:
        sys.stdout.flush()
        tell(f"error: {error}")
        with contextlib.suppress(Exception):  # a process does not come
            self._client.wait_at_barrier(_ERRORS, _LEAVE_SECONDS * 1000)
        if self._process_id == 0:
            time.sleep(_SERVICE_SECONDS)
        os._exit(status)
