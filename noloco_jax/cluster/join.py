"""Several processes of one run: where this one stands, how they start and end as one, and how they gather values."""

import contextlib
import importlib.metadata
import json
import os
import re
import socket
import sys
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from noloco_jax.cluster.error_relay import Alarm
from noloco_jax.cluster.rollcall import Card, call_the_roll
from noloco_jax.errors import UserError

PyTree = Any

_COMPARED = ("jax", "jaxlib", "flax", "optax")


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

    A `UserError` in one process ends all of them, see `alarm`. Any other error ends it at once, without JAX's farewell,
    for which it would wait while the others wait for it; their next exchange with it then fails. Does nothing for a
    process that is alone.

    Args:
      place: this process's; None: it is alone.
      config: the resolved configuration, which has to be the same everywhere.
      timeout: seconds to wait for the others.
    """
    if place is None:
        yield
        return
    alarm = None
    try:
        call_the_roll(place.coordinator, place.num_processes, _card(place, config), timeout)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            place.coordinator,
            place.num_processes,
            place.process_id,
            local_device_ids=place.local_devices,
            cluster_detection_method="deactivate",
            initialization_timeout=60,
            shutdown_timeout_seconds=1800,  # the first process draws, samples and uploads while the others wait
        )
        alarm = Alarm(place.process_id)
        yield
        alarm.stop()
        jax.distributed.shutdown()
    except SystemExit:
        raise
    except BaseException as error:
        if alarm is not None:
            alarm.silence()
        sys.stdout.flush()
        status = 130 if isinstance(error, KeyboardInterrupt) else 1
        if isinstance(error, UserError):
            status = error.exit_status
            line = f"{error} (process {place.process_id} on {socket.gethostname()})"
            if alarm is not None:
                alarm.ring(line)
            print(f"error: {line}", file=sys.stderr)
        elif not isinstance(error, KeyboardInterrupt):
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(status)


def gather(value: PyTree) -> list[PyTree]:
    """What every process gave, in their order: small values for JSON. All processes have to call it, and wait."""
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(len(text)))
    # Rounded up, so that texts of almost the same length do not each compile a program.
    padded = np.zeros(-(-int(sizes.max()) // 4096) * 4096, np.uint8)
    padded[: len(text)] = text
    texts = multihost_utils.process_allgather(padded)
    return [json.loads(bytes(row[:size])) for row, size in zip(np.asarray(texts), sizes, strict=True)]


def _card(place: Place, config: Mapping[str, Any]) -> Card:
    versions = {name: importlib.metadata.version(name) for name in _COMPARED}
    same = {"--num_processes": place.num_processes, **versions, **_flat(config, "config.")}
    return Card(place.process_id, socket.gethostname(), same)


def _flat(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    flat = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat
