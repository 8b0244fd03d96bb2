"""Start and end of several processes as one run."""

import contextlib
import ctypes
import importlib.metadata
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from noloco_jax.cluster.error_relay import ErrorRelay
from noloco_jax.cluster.place import Place
from noloco_jax.cluster.processes import is_of_exchange
from noloco_jax.cluster.rollcall import ProcessInfo, call_the_roll
from noloco_jax.cluster.stop import INTERRUPTED
from noloco_jax.config import flatten
from noloco_jax.errors import UserError, tell

CONNECT_SECONDS = 60  # timeout of JAX for a process that was there at the roll call
_MUST_MATCH = ("jax", "jaxlib", "flax", "optax")  # packages of which all processes need one version
_ABORT_LINE = (
    "error: JAX ended this process, for the reason above: the same command resumes from the last checkpoint{}\n"
)
_abort_handlers: list[object] = []  # called by C: kept from the garbage collector


@contextlib.contextmanager
def joined(place: Place | None, config: Mapping[str, Any], timeout: float) -> Iterator[None]:
    """Run the body as one of the run's processes: all are there and agree, `jax.distributed` is up.

    A `UserError` in one process ends all of them with its exit status, see `ErrorRelay`. Any other error ends it at
    once, without JAX's farewell, in which it would wait for the others while they wait for it; their next exchange with
    it then fails. So does a process that is lost: the others end with exit status 1 at their next exchange with it, and
    after 100 seconds at the latest. Does nothing for a process that is alone.

    Args:
      place: this process's; None: it is alone.
      config: the resolved configuration, which has to be the same everywhere.
      timeout: seconds to wait for the others.
    """
    if place is None:
        yield
        return
    relay, here = None, f" (process {place.process_id} on {socket.gethostname()})"
    try:
        call_the_roll(place.coordinator, place.num_processes, _process_info(place, config), timeout)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        end_with_status_on_abort(here)  # from here on JAX aborts where a process is lost
        jax.distributed.initialize(
            place.coordinator,
            place.num_processes,
            place.process_id,
            local_device_ids=place.local_device_ids,
            cluster_detection_method="deactivate",
            initialization_timeout=CONNECT_SECONDS,
            shutdown_timeout_seconds=1800,  # the first process draws, samples and uploads while the others wait
        )
        relay = ErrorRelay(place.process_id)
        yield
        relay.close()
        jax.distributed.shutdown()
        if threading.current_thread() is threading.main_thread():
            # All is done. Launchers that saw another process end first send a SIGTERM, whose status they would report.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except SystemExit:
        raise
    except BaseException as error:
        if relay is not None:
            relay.ignore_others()
        sys.stdout.flush()
        status = INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        if isinstance(error, UserError):
            status = error.exit_status
            line = f"{error}{here}"
            if relay is not None:
                relay.end_all(line, status)
            tell(f"error: {line}")
        elif is_of_exchange(error):
            reason = " ".join(str(error).split())[:300]
            tell(
                f"error: another process has ended, or is out of reach ({reason}): the same command resumes from the "
                f"last checkpoint{here}"
            )
        elif not isinstance(error, KeyboardInterrupt):
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(status)


def _process_info(place: Place, config: Mapping[str, Any]) -> ProcessInfo:
    versions = {name: importlib.metadata.version(name) for name in _MUST_MATCH}
    must_match = {"--num_processes": place.num_processes, **versions, **flatten(config, "config.")}
    return ProcessInfo(place.process_id, socket.gethostname(), must_match)


def end_with_status_on_abort(place: str) -> None:
    """Make an abort(), from now on, end this process with one line and exit status 1, as a retry may succeed.

    A process dies of the signal otherwise, which reads as a crash. Python's own handlers run between two of its
    instructions, which an aborting process does not live to see, and JAX can tell Python of no lost process: it calls
    `missed_heartbeat_callback` with a status that has no form in Python (jaxlib 0.10 and 0.12).

    Args:
      place: what the line ends with, such as the process's number and host.
    """
    line = _ABORT_LINE.format(place).encode()

    def end(_: int) -> None:
        os.write(2, line)
        os._exit(1)

    _abort_handlers.append(handler := ctypes.CFUNCTYPE(None, ctypes.c_int)(end))
    ctypes.CDLL(None).signal(signal.SIGABRT, handler)
