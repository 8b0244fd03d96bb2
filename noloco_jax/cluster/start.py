"""Start and end of several processes as one run."""

import contextlib
import ctypes
import importlib.metadata
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax._src import distributed  # the key-value store that processes share has no public name

from noloco_jax.cluster.process_rank import ProcessRank
from noloco_jax.cluster.processes import is_of_exchange
from noloco_jax.config import flatten
from noloco_jax.errors import INTERRUPTED, TransientError, UserError, report, tell

_MUST_MATCH = ("jax", "jaxlib", "flax", "optax")  # packages of which all processes need one version
_COMPARE_SECONDS = 60.0
_SERVICE_SECONDS = 1.0  # process 0 holds the store: its end aborts whoever has not left yet
_abort_handlers: list[object] = []  # called by C: kept from the garbage collector


@contextlib.contextmanager
def distributed_runtime(rank: ProcessRank | None, config: Mapping[str, Any], timeout: float) -> Iterator[int]:
    """Run the body as one of the run's processes, connected by `jax.distributed`; gives their number.

    An error in one process ends it at once, without JAX's farewell, in which it would wait for the others while they
    wait for it. The others end with exit status 1 at their next exchange with it, and after 100 seconds at the latest.
    So they do if a process is killed.

    Args:
      rank: of this process; None: it is alone.
      config: the resolved configuration, which has to be the same everywhere.
      timeout: seconds to wait for the others.
    """
    if rank is None:
        yield 1
        return
    here = f" (process {rank.process_id or 0} on {socket.gethostname()})"
    try:
        here = _connect(rank, timeout)
        _check_same({**{name: importlib.metadata.version(name) for name in _MUST_MATCH}, **flatten(config, "config.")})
        yield distributed.global_state.num_processes or 1
        jax.distributed.shutdown()
        if threading.current_thread() is threading.main_thread():
            # All is done. Launchers that saw another process end first send a SIGTERM, whose status they would report.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except SystemExit:
        raise
    except BaseException as error:
        sys.stdout.flush()
        status = _report(error, here)
        sys.stderr.flush()
        if distributed.global_state.process_id == 0:
            time.sleep(_SERVICE_SECONDS)
        os._exit(status)


def _report(error: BaseException, here: str) -> int:
    """Report the error that ends this process; return its exit status."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, UserError):
        tell(f"error: {error}{here}")
        return error.exit_status
    if is_of_exchange(error):
        tell(
            f"error: another process has ended, or is out of reach ({' '.join(str(error).split())[:300]}): the same "
            f"command resumes from the last checkpoint{here}"
        )
        return 1
    return report(error)


def _connect(rank: ProcessRank, timeout: float) -> str:
    """Connect all processes; return this one's number and host, in parentheses, for messages."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    end_with_status_on_abort(
        f"error: the processes of the run did not come together within {timeout:g} s: start all of them with the same "
        "--coordinator and --num_processes and a --process_id each, or raise --start_timeout"
    )
    try:
        jax.distributed.initialize(
            rank.coordinator,
            rank.num_processes,
            rank.process_id,
            local_device_ids=rank.local_device_ids,
            cluster_detection_method=None if rank.is_launched else "deactivate",
            initialization_timeout=max(int(timeout), 1),
            shutdown_timeout_seconds=1800,  # the first process draws and samples while the others wait
        )
    except ValueError as error:
        raise UserError(
            f"JAX does not find the rank of this process ({error}): give --coordinator, --num_processes and "
            "--process_id"
        ) from None
    except RuntimeError as error:
        raise TransientError(f"{' '.join(str(error).split())[:300]}: start all processes again") from None
    here = f" (process {distributed.global_state.process_id} on {socket.gethostname()})"
    end_with_status_on_abort(
        f"error: JAX ended this process, for the reason above: the same command resumes from the last checkpoint{here}"
    )
    return here


def _check_same(values: Mapping[str, Any]) -> None:
    """Raise `UserError`, on every process, if one has other values than process 0; it names the first that differs."""
    # Not `jax.process_index`, which would make the devices.
    client: Any = distributed.global_state.client
    process, milliseconds = distributed.global_state.process_id, int(1000 * _COMPARE_SECONDS)
    texts = {name: repr(value) for name, value in values.items()}
    client.key_value_set(f"noloco_jax/same/{process}", json.dumps([socket.gethostname(), texts]))
    client.wait_at_barrier("noloco_jax/values", milliseconds)
    if process == 0:
        told = client.key_value_dir_get("noloco_jax/same")
        by_process = {int(key.rpartition("/")[2]): json.loads(value) for key, value in told}
        client.key_value_set("noloco_jax/difference", json.dumps(_difference(by_process)))
    if difference := json.loads(client.blocking_key_value_get("noloco_jax/difference", milliseconds)):
        raise UserError(f"{difference}: make them the same")


def _difference(by_process: Mapping[int, tuple[str, Mapping[str, str]]]) -> str:
    """Return which process has another value than process 0, and of what; "" if none has."""
    first, mine = by_process[0]
    for process, (host, theirs) in sorted(by_process.items()):
        for name in {**mine, **theirs}:
            if mine.get(name) != theirs.get(name):
                return (
                    f"process {process} on {host} has {name}={theirs.get(name, 'no value')}, process 0 on {first} has "
                    f"{mine.get(name, 'no value')}"
                )
    return ""


def end_with_status_on_abort(line: str, status: int = 1) -> None:
    """Make an abort(), from now on, end this process with one line and an exit status; 1: a retry may succeed.

    A process dies of the signal otherwise, which reads as a crash. Python's own handlers run between two of its
    instructions, which an aborting process does not live to see, and JAX can tell Python of no lost process: it calls
    `missed_heartbeat_callback` with a status that has no form in Python (jaxlib 0.10 and 0.12).
    """
    content = f"{line}\n".encode()

    def end(_: int) -> None:
        os.write(2, content)
        os._exit(status)

    _abort_handlers.append(handler := ctypes.CFUNCTYPE(None, ctypes.c_int)(end))
    ctypes.CDLL(None).signal(signal.SIGABRT, handler)
