"""The roll call of a run's processes: all are there, with the same versions and the same configuration.

It uses a plain socket, on the address on which JAX's own service listens afterwards. A process that does not come, or
differs, is then named within a bounded time, where JAX alone would abort without a name.
"""

import contextlib
import json
import socket
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from noloco_jax.errors import StartError, UserError

_RETRY_SECONDS = 0.2
_ANSWER_SECONDS = 10.0  # timeout of a message between two processes that are up
_MAX_NAMED = 16  # processes that a message names one by one


class ProcessInfo(NamedTuple):
    """Report of a process to process 0.

    Attributes:
      process_id: its number.
      host: the machine it runs on.
      must_match: name -> value (as JSON has it) that all processes have to share.
    """

    process_id: int
    host: str
    must_match: Mapping[str, Any]


class Verdict(NamedTuple):
    """Answer of process 0 to all that reported.

    Attributes:
      error: the reason to end; empty if there is none.
      retry: whether they only did not come together, so that starting them again may help.
    """

    error: str = ""
    retry: bool = False


def call_the_roll(coordinator: str, num_processes: int, info: ProcessInfo, timeout: float) -> None:
    """Return once every process has reported to process 0 and all match.

    Args:
      coordinator: HOST:PORT at which process 0 listens.
      num_processes: of the run.
      info: of this process.
      timeout: seconds, from now, within which all have to come.

    Raises:
      StartError: on every process that came, if one did not; it names process and hosts.
      UserError: on every process that came, if one differs, or is there twice; it names process and host.
    """
    host, _, port = coordinator.rpartition(":")
    info = info._replace(
        must_match=json.loads(json.dumps(info.must_match))
    )  # JSON changes tuples: compare the same form
    if info.process_id == 0:
        verdict = _collect(int(port), num_processes, info, timeout)
    else:
        verdict = _report(host.strip("[]"), int(port), info, timeout)
    if verdict.error:
        raise (StartError if verdict.retry else UserError)(verdict.error)


def _report(host: str, port: int, info: ProcessInfo, timeout: float) -> Verdict:
    """Report to process 0, as soon as it listens, and return its verdict."""
    reason: Exception | None = None
    deadline = time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > 0:
        try:
            with (
                socket.create_connection((host, port), timeout=left) as connection,
                connection.makefile("rb") as lines,
            ):
                # Process 0 may have started just now, and wait for somebody else all its time.
                connection.settimeout(timeout + _ANSWER_SECONDS)
                connection.sendall(json.dumps(info).encode() + b"\n")
                while (line := lines.readline()) == b"\n":  # see _still_there
                    connection.sendall(line)
                return Verdict(*json.loads(line))
        except (OSError, ValueError, TypeError) as error:  # not there yet, or another program's port
            reason = error
            time.sleep(_RETRY_SECONDS)
    absent = f"process 0 did not answer at {host}:{port} within {timeout:g} s ({reason})"
    return Verdict(f"{absent}: start it, or correct --coordinator", retry=True)


def _collect(port: int, num_processes: int, mine: ProcessInfo, timeout: float) -> Verdict:
    """Collect the others' reports and tell all of them the verdict."""
    dual = socket.has_dualstack_ipv6()
    try:
        listener = socket.create_server(
            ("", port),
            family=socket.AF_INET6 if dual else socket.AF_INET,
            backlog=num_processes,
            dualstack_ipv6=dual,
        )
    except OSError as error:
        busy = f"process 0 on {mine.host} cannot listen on port {port} ({error.strerror})"
        return Verdict(f"{busy}: give a free one", retry=True)
    deadline = time.monotonic() + timeout
    infos, waiting, connections, verdict = {0: mine}, {}, [], Verdict()
    with listener, contextlib.ExitStack() as stack:
        while not verdict.error and len(infos) < num_processes:
            listener.settimeout(max(deadline - time.monotonic(), 1e-3))
            try:
                connection = stack.enter_context(listener.accept()[0])
            except TimeoutError:
                verdict = Verdict(_missing(infos, num_processes, timeout), retry=True)
                break
            except OSError as error:
                full = f"process 0 on {mine.host} cannot take more than {len(connections)} processes ({error.strerror})"
                verdict = Verdict(f"{full}: raise its limit of open files, ulimit -n", retry=True)
                break
            try:
                connection.settimeout(_ANSWER_SECONDS)
                other = ProcessInfo(*json.loads(connection.makefile("rb").readline()))
                former = waiting.get(other.process_id)
                if former is not None and not _still_there(former):  # an evicted pod, say, and this is its replacement
                    former.close()
                    infos.pop(other.process_id, None)
                verdict = Verdict(_difference(mine, other) or _duplicate(infos, other))
            except (OSError, ValueError, TypeError, AttributeError):
                continue  # no process of ours, or one that went away: it will come again, or be missing
            connections.append(connection)
            infos[other.process_id], waiting[other.process_id] = other, connection
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps(verdict).encode() + b"\n")
        for connection in connections:
            # The other side closes first, so that no half-closed connection holds the port that JAX listens on next.
            with contextlib.suppress(OSError):
                connection.recv(1)
    return verdict


def _still_there(connection: socket.socket) -> bool:
    """Return True if a process that has reported still waits: then it answers an empty line with another."""
    with contextlib.suppress(OSError):
        connection.sendall(b"\n")
        return connection.recv(1) == b"\n"
    return False


def _missing(infos: Mapping[int, ProcessInfo], num_processes: int, timeout: float) -> str:
    absent = [str(i) for i in range(num_processes) if i not in infos]
    names = ", ".join(absent[:_MAX_NAMED]) + (" and more" if len(absent) > _MAX_NAMED else "")
    there = ", ".join(f"{i} on {infos[i].host}" for i in sorted(infos)[:_MAX_NAMED])
    return (
        f"process {names} of {num_processes} did not come within {timeout:g} s (there are {there}): start what is "
        "missing, or raise --start_timeout"
    )


def _difference(mine: ProcessInfo, other: ProcessInfo) -> str:
    for name in {**mine.must_match, **other.must_match}:
        here, there = (repr(info.must_match[name]) if name in info.must_match else "no value" for info in (mine, other))
        if here != there:
            return (
                f"process {other.process_id} on {other.host} has {name}={there}, process 0 on {mine.host} has {here}: "
                "make them the same"
            )
    return ""


def _duplicate(infos: Mapping[int, ProcessInfo], other: ProcessInfo) -> str:
    if other.process_id not in infos:
        return ""
    hosts = f"on {infos[other.process_id].host} and on {other.host}"
    return f"two processes, {hosts}, have --process_id={other.process_id}: number them from 0"
