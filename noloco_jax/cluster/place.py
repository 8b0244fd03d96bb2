"""Rank and coordinator of a process in its run, from flags or from the environment that its launcher made."""

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from noloco_jax.cluster.local_gpus import gpus_of_machine, own_gpus
from noloco_jax.cluster.tpu_pods import Pod, tpu_pod_here
from noloco_jax.errors import UserError

_FIRST_PORT, _NUM_PORTS = 61440, 4096  # Linux assigns none of these ports by itself


@dataclass(frozen=True)
class Place:
    """Rank of this process in the run, and the coordinator.

    Attributes:
      coordinator: HOST:PORT on which process 0 listens.
      num_processes: of the run.
      process_id: this one, from 0.
      local_device_ids: indices, among the GPUs that this process sees, of its own; None: all that it sees.
    """

    coordinator: str
    num_processes: int
    process_id: int
    local_device_ids: tuple[int, ...] | None = None


def define_flags(parser: ArgumentParser) -> None:
    """Add the flags that give a process its place, for machines whose environment does not."""
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens (several processes only)")
    parser.add_argument("--num_processes", type=int, metavar="N", help="processes of the run")
    parser.add_argument("--process_id", type=int, metavar="I", help="this process, from 0 to N - 1")
    parser.add_argument(
        "--start_timeout", type=float, default=300, metavar="SECONDS", help="how long to wait for the other processes"
    )


def find_place(
    flags: Namespace,
    environment: Mapping[str, str],
    count_gpus: Callable[[], int] = gpus_of_machine,
    find_tpu_pod: Callable[[Mapping[str, str]], Pod | None] = tpu_pod_here,
) -> Place | None:
    """Find the place of this process; None if it is alone.

    It is told by flags, JAX_* variables, Kubernetes, Open MPI, Slurm or a Cloud TPU pod, in this order.

    Args:
      flags: as `define_flags` makes them; they go before the environment.
      environment: of this process.
      count_gpus: see `own_gpus`.
      find_tpu_pod: see `tpu_pods.find_pod`; called where nothing else tells.

    Raises:
      UserError: if what is there is incomplete or contradicts itself, or if the processes of this machine cannot
        share its GPUs evenly.
    """
    found = _from_environment(environment)
    if found == _Found() and flags.num_processes is None and (pod := find_tpu_pod(environment)) is not None:
        found = _Found(*pod)
    coordinator = flags.coordinator or environment.get("JAX_COORDINATOR_ADDRESS") or found.coordinator
    num_processes = found.num_processes if flags.num_processes is None else flags.num_processes
    process_id = found.process_id if flags.process_id is None else flags.process_id
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
    gpus = None
    if found.local_rank is not None and found.num_local is not None:
        gpus = own_gpus(environment, found.local_rank, found.num_local, count_gpus)
    return Place(coordinator, num_processes, process_id, gpus)


class _Found(NamedTuple):
    """Facts about a process in its environment; None where it has none.

    Attributes:
      coordinator, num_processes, process_id: as in `Place`.
      local_rank: this process among those of the run on this machine, from 0.
      num_local: how many those are.
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    local_rank: int | None = None
    num_local: int | None = None


def _from_environment(environment: Mapping[str, str]) -> _Found:
    if "JAX_NUM_PROCESSES" in environment:
        process_id = _number(environment, "JAX_PROCESS_ID")
        if process_id is None:
            process_id = _number(environment, "JOB_COMPLETION_INDEX")  # a pod of a Kubernetes Indexed Job
        return _Found(num_processes=_number(environment, "JAX_NUM_PROCESSES"), process_id=process_id)
    # Before Slurm: inside a Slurm job, mpirun starts its ranks below a Slurm task of its own on every node.
    if _number(environment, "OMPI_COMM_WORLD_SIZE") is not None:
        return _from_open_mpi(environment)
    if "SLURM_STEP_NODELIST" in environment and _number(environment, "SLURM_PROCID") is not None:
        return _from_slurm(environment)
    return _Found()


def _from_open_mpi(environment: Mapping[str, str]) -> _Found:
    coordinator = None
    # Such as 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911: the job, and the addresses of mpirun's machine.
    uri = re.match(r"(\d+)\..*?tcp6?://\[?([^,:\]]+)", environment.get("OMPI_MCA_orte_hnp_uri", ""))
    if uri is not None:
        coordinator = f"{uri[2]}:{_port(int(uri[1]) >> 12)}"  # the low 12 bits of a job's number are 0
    return _Found(
        coordinator,
        _number(environment, "OMPI_COMM_WORLD_SIZE"),
        _number(environment, "OMPI_COMM_WORLD_RANK"),
        _number(environment, "OMPI_COMM_WORLD_LOCAL_RANK"),
        _number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE"),
    )


def _from_slurm(environment: Mapping[str, str]) -> _Found:
    job, step = (_number(environment, name) or 0 for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return _Found(
        f"{_first_host(environment['SLURM_STEP_NODELIST'])}:{_port(job * 7 + step)}",
        _number(environment, "SLURM_STEP_NUM_TASKS") or _number(environment, "SLURM_NTASKS"),
        _number(environment, "SLURM_PROCID"),
        _number(environment, "SLURM_LOCALID"),
        _slurm_tasks_here(environment),
    )


def _slurm_tasks_here(environment: Mapping[str, str]) -> int | None:
    """The step's tasks on this node; of nodes with 4, 4 and 3 tasks, SLURM_STEP_TASKS_PER_NODE is "4(x2),3"."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", "")):
        counts += [int(count)] * int(times or 1)
    node = _number(environment, "SLURM_NODEID")  # among the nodes of the step
    if node is not None and node < len(counts):
        return counts[node]
    return _number(environment, "SLURM_NTASKS_PER_NODE")


def _first_host(nodes: str) -> str:
    """The first of Slurm's list of nodes: "a[07-09,11],b" begins with a07."""
    match = re.match(r"([^,\[]+)(?:\[([^,\-\]]+))?", nodes)
    assert match is not None, nodes
    return match[1] + (match[2] or "")


def _port(job: int) -> int:
    """A port for a job, which jobs on one machine rarely share."""
    return _FIRST_PORT + job % _NUM_PORTS


def _number(environment: Mapping[str, str], name: str) -> int | None:
    return int(environment[name]) if environment.get(name, "").isdigit() else None
