"""Several processes: who they are, that they belong together, and how they start and end as one.

Before JAX's own service is started, the processes call the roll over a plain socket on the same address: a process that
does not come, or comes with other versions or another configuration, is then named within a bounded time, where JAX
alone would abort without a name.
"""

import contextlib
import importlib.metadata
import json
import os
import re
import socket
import sys
import time
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from noloco_jax.errors import UserError

_COMPARED = ("noloco-jax", "jax", "jaxlib")
_RETRY_SECONDS = 0.2


@dataclass(frozen=True)
class Place:
    """Where this process stands among those of the run.

    Attributes:
      coordinator: HOST:PORT on which process 0 listens.
      num_processes: of the run.
      process_id: this one, from 0.
      local_devices: indices of the GPUs of this machine that are this process's; None: all that it sees.
    """

    coordinator: str
    num_processes: int
    process_id: int
    local_devices: tuple[int, ...] | None = None


def define_flags(parser: ArgumentParser) -> None:
    """Adds the flags that say where a process stands, for machines whose environment does not."""
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens (several processes only)")
    parser.add_argument("--num_processes", type=int, metavar="N", help="processes of the run")
    parser.add_argument("--process_id", type=int, metavar="I", help="this process, from 0 to N - 1")
    parser.add_argument(
        "--start_timeout", type=float, default=300, metavar="SECONDS", help="how long to wait for the other processes"
    )


def find_place(flags: Namespace, environment: Mapping[str, str]) -> Place | None:
    """Where this process stands, by its flags, JAX_* variables, Kubernetes, Slurm or Open MPI; None if it is alone.

    Raises:
      UserError: if what is there is incomplete or contradicts itself.
    """
    coordinator, num_processes, process_id, local_devices = _detect(environment)
    coordinator = flags.coordinator or coordinator
    num_processes = num_processes if flags.num_processes is None else flags.num_processes
    process_id = process_id if flags.process_id is None else flags.process_id
    if num_processes == 1 or (num_processes is None and process_id is None and coordinator is None):
        return None
    given = {"--coordinator": coordinator, "--num_processes": num_processes, "--process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if coordinator is None or num_processes is None or process_id is None:
        there = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
        raise UserError(f"{there} without {' and '.join(missing)}: several processes need all three")
    if not 0 <= process_id < num_processes:
        raise UserError(f"--process_id={process_id} is not between 0 and --num_processes={num_processes} less one")
    if not re.fullmatch(r".+:\d+", coordinator):
        raise UserError(f"--coordinator={coordinator} is not HOST:PORT: give the address of process 0 and a free port")
    return Place(coordinator, num_processes, process_id, local_devices)


def _detect(environment: Mapping[str, str]) -> tuple[str | None, int | None, int | None, tuple[int, ...] | None]:
    """(coordinator, number of processes, this one, its GPUs), each None where the environment does not say."""

    def number(name: str) -> int | None:
        return int(environment[name]) if environment.get(name, "").isdigit() else None

    coordinator = environment.get("JAX_COORDINATOR_ADDRESS")
    if "JAX_NUM_PROCESSES" in environment:
        process_id = number("JAX_PROCESS_ID")
        return (
            coordinator,
            number("JAX_NUM_PROCESSES"),
            number("JOB_COMPLETION_INDEX") if process_id is None else process_id,
            None,
        )
    if "SLURM_STEP_NODELIST" in environment and number("SLURM_PROCID") is not None:
        count = number("SLURM_STEP_NUM_TASKS") or number("SLURM_NTASKS")
        address = coordinator or f"{_first_host(environment['SLURM_STEP_NODELIST'])}:{_port(environment)}"
        crowded = count is not None and count > (number("SLURM_STEP_NUM_NODES") or 1)
        return address, count, number("SLURM_PROCID"), _one_gpu(environment, number("SLURM_LOCALID"), crowded)
    if number("OMPI_COMM_WORLD_SIZE") is not None:
        crowded = (number("OMPI_COMM_WORLD_LOCAL_SIZE") or 1) > 1
        gpus = _one_gpu(environment, number("OMPI_COMM_WORLD_LOCAL_RANK"), crowded)
        uri = re.search(r"tcp6?://\[?([^,:\]]+)", environment.get("OMPI_MCA_orte_hnp_uri", ""))
        if coordinator is None and uri is not None:
            coordinator = f"{uri[1]}:{_port(environment)}"
        return coordinator, number("OMPI_COMM_WORLD_SIZE"), number("OMPI_COMM_WORLD_RANK"), gpus
    return coordinator, None, None, None


def _first_host(nodes: str) -> str:
    """The first of Slurm's list of nodes: "a[07-09,11],b" begins with a07."""
    match = re.match(r"([^,\[]+)(?:\[([^,\-\]]+))?", nodes)
    assert match is not None, nodes
    return match[1] + (match[2] or "")


def _port(environment: Mapping[str, str]) -> int:
    """A port above those that the system gives away, which jobs and their steps on one machine rarely share."""
    job = environment.get("SLURM_JOB_ID") or environment.get("OMPI_MCA_orte_hnp_uri", "").partition(".")[0]
    step = environment.get("SLURM_STEP_ID", "0")
    return 61440 + (int(job or 0) * 7 + (int(step) if step.isdigit() else 0)) % 4096


def _one_gpu(environment: Mapping[str, str], local_rank: int | None, crowded: bool) -> tuple[int, ...] | None:
    """Processes that share a machine take a GPU each, unless they were given different ones."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    apart = visible is not None and len(visible.split(",")) == 1
    return None if local_rank is None or not crowded or apart else (local_rank,)


@contextlib.contextmanager
def joined(place: Place | None, config: Mapping[str, Any], timeout: float) -> Iterator[None]:
    """Runs its body as one of the run's processes: all are there and agree, `jax.distributed` is up.

    An error in one process ends it at once, without JAX's farewell, for which it would wait while the others wait for
    it; their next exchange with it then fails. Does nothing for a process that is alone.

    Args:
      place: this process's; None: it is alone.
      config: the resolved configuration, which has to be the same everywhere.
      timeout: seconds to wait for the others.
    """
    if place is None:
        yield
        return
    try:
        call_the_roll(place, _card(place, config), timeout)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            place.coordinator,
            place.num_processes,
            place.process_id,
            local_device_ids=place.local_devices,
            cluster_detection_method="deactivate",
            initialization_timeout=60,
            shutdown_timeout_seconds=60,
        )
        yield
        jax.distributed.shutdown()
    except SystemExit:
        raise
    except BaseException as error:
        sys.stdout.flush()
        if isinstance(error, UserError):
            print(f"error: {error} (process {place.process_id} on {socket.gethostname()})", file=sys.stderr)
        elif not isinstance(error, KeyboardInterrupt):
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(2 if isinstance(error, UserError) else 130 if isinstance(error, KeyboardInterrupt) else 1)


def _card(place: Place, config: Mapping[str, Any]) -> dict[str, Any]:
    versions = {name: importlib.metadata.version(name) for name in _COMPARED}
    same = {"--num_processes": place.num_processes, **versions, **_flat(config, "config.")}
    return {"process_id": place.process_id, "host": socket.gethostname(), "same": same}


def _flat(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    flat = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def call_the_roll(place: Place, card: Mapping[str, Any], timeout: float) -> None:
    """Returns once every process has shown its card to process 0 and all are alike.

    Args:
      place: this process's.
      card: {"process_id", "host", "same": {name: value that all have to share}}.
      timeout: seconds, from now, within which all have to come.

    Raises:
      UserError: on every process that came, if one did not, or differs; it names process and host.
    """
    deadline = time.monotonic() + timeout
    host, _, port = place.coordinator.rpartition(":")
    if place.process_id:
        error = _answer((host.strip("[]"), int(port)), card, place, deadline, timeout)
    else:
        error = _gather(int(port), card, place, deadline, timeout)
    if error:
        raise UserError(error)


def _answer(address: tuple[str, int], card: Mapping[str, Any], place: Place, deadline: float, timeout: float) -> str:
    reason: Exception | None = None
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(address, timeout=left) as connection:
                # Process 0 may find out at its own deadline, a little after ours, that somebody is missing.
                connection.settimeout(left + 10)
                connection.sendall(json.dumps(card).encode() + b"\n")
                line = connection.makefile("rb").readline()
                return json.loads(line)
        except (OSError, ValueError) as error:  # not there yet, or another program's port
            reason = error
            time.sleep(_RETRY_SECONDS)
    return (
        f"process 0 of {place.num_processes} did not answer at {place.coordinator} within {timeout:g} s ({reason}): "
        "start it, or correct --coordinator"
    )


def _gather(port: int, card: Mapping[str, Any], place: Place, deadline: float, timeout: float) -> str:
    """Collects the others' cards and tells all of them the verdict, which is empty if nothing is wrong."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        listener = socket.create_server(("", port), family=family, dualstack_ipv6=dual)
    except OSError as error:
        return f"--coordinator={place.coordinator}: process 0 cannot listen there ({error.strerror}): give a free port"
    cards, connections, verdict = {0: card}, [], ""
    with listener, contextlib.ExitStack() as stack:
        while not verdict and len(cards) < place.num_processes:
            listener.settimeout(max(deadline - time.monotonic(), 1e-3))
            try:
                connection = stack.enter_context(listener.accept()[0])
                connection.settimeout(10)
                other = json.loads(connection.makefile("rb").readline())
                number = other["process_id"]
            except TimeoutError:
                verdict = _missing(cards, place, timeout)
                break
            except (OSError, ValueError, TypeError, KeyError):
                continue  # a port scan, or a process that went away: it will come again, or be missing
            connections.append(connection)
            verdict = _difference(card, other)
            if number in cards:
                hosts = f"on {cards[number]['host']} and on {other['host']}"
                verdict = f"two processes, {hosts}, have --process_id={number}: number them from 0"
            cards[number] = other
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps(verdict).encode() + b"\n")
        for connection in connections:
            # The other side closes first, so that no half-closed connection holds the port that JAX listens on next.
            with contextlib.suppress(OSError):
                connection.recv(1)
    return verdict


def _missing(cards: Mapping[int, Any], place: Place, timeout: float) -> str:
    absent = [str(i) for i in range(place.num_processes) if i not in cards]
    names = ", ".join(absent[:16]) + (" and more" if len(absent) > 16 else "")
    there = ", ".join(f"{i} on {cards[i]['host']}" for i in sorted(cards)[:16])
    return (
        f"process {names} of {place.num_processes} did not come within {timeout:g} s (there are {there}): start what is "
        "missing, or raise --start_timeout"
    )


def _difference(mine: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    for name in {**mine["same"], **other["same"]}:
        here, there = mine["same"].get(name, "nothing"), other["same"].get(name, "nothing")
        if here != there:
            return (
                f"process {other['process_id']} on {other['host']} has {name}={there!r}, process 0 on {mine['host']} has "
                f"{here!r}: make them the same"
            )
    return ""
