"""Rank of a process in its run: what flags and JAX's variables say; the rest JAX finds by itself.

`jax.distributed.initialize` knows Slurm, Open MPI, Kubernetes and Cloud TPU. This module decides only whether to call
it, before JAX is imported.
"""

import importlib.util
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from noloco_jax.errors import UserError

_DEVICES = Path("/dev")


@dataclass(frozen=True)
class ProcessRank:
    """Arguments of `jax.distributed.initialize`; it finds those that are None.

    Attributes:
      coordinator: HOST:PORT on which process 0 listens.
      num_processes: of the run.
      process_id: this one, from 0.
      local_device_ids: numbers, among the GPUs that this process sees, of its own; empty: all that it sees.
      is_launched: a launcher that JAX knows may have started the process.
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    local_device_ids: tuple[int, ...] | None = None
    is_launched: bool = False


def define_flags(parser: ArgumentParser) -> None:
    """Add the flags that give a process its rank, for machines whose environment does not."""
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens (several processes only)")
    parser.add_argument("--num_processes", type=int, metavar="N", help="processes of the run")
    parser.add_argument("--process_id", type=int, metavar="I", help="this process, from 0 to N - 1")
    parser.add_argument(
        "--start_timeout", type=float, default=300, metavar="SECONDS", help="how long to wait for the other processes"
    )


def find_rank(flags: Namespace, environment: Mapping[str, str]) -> ProcessRank | None:
    """Find the rank of this process; None if it is alone.

    Args:
      flags: as `define_flags` makes them; they go before JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID,
        and these before what JAX finds.
      environment: of this process.

    Raises:
      UserError: if what is given is incomplete or contradicts itself.
    """
    coordinator = flags.coordinator or environment.get("JAX_COORDINATOR_ADDRESS")
    num_processes = _first(flags.num_processes, _number(environment, "JAX_NUM_PROCESSES"))
    process_id = flags.process_id
    if num_processes is not None:  # alone, the variables of a process mean nothing
        process_id = _first(process_id, _number(environment, "JAX_PROCESS_ID"))
        process_id = _first(process_id, _number(environment, "JOB_COMPLETION_INDEX"))  # of a Kubernetes Indexed Job
    given = {"--coordinator": coordinator, "--num_processes": num_processes, "--process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    launched = _is_launched(environment)
    if num_processes == 1 or (len(missing) == 3 and not launched):
        return None
    if missing and not launched:
        there = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
        raise UserError(f"{there} without {' and '.join(missing)}: several processes need all three")
    if process_id is not None and num_processes is not None and not 0 <= process_id < num_processes:
        raise UserError(f"--process_id={process_id} is not between 0 and --num_processes={num_processes} less one")
    if coordinator is not None and not re.fullmatch(r".+:\d+", coordinator):
        raise UserError(f"--coordinator={coordinator} is not HOST:PORT: give the address of process 0 and a free port")
    return ProcessRank(coordinator, num_processes, process_id, _local_devices(environment), launched)


def _is_launched(environment: Mapping[str, str]) -> bool:
    """Return True where a launcher that JAX knows has started several processes, or may have."""
    if (_number(environment, "OMPI_COMM_WORLD_SIZE") or 0) > 1:
        return True
    if "SLURM_STEP_NODELIST" in environment and (_number(environment, "SLURM_NTASKS") or 0) > 1:
        return "SLURM_PROCID" in environment
    if "," in environment.get("TPU_WORKER_HOSTNAMES", "") or "MEGASCALE_NUM_SLICES" in environment:
        return True
    if "JOB_COMPLETION_INDEX" in environment and "KUBERNETES_SERVICE_HOST" in environment:
        return importlib.util.find_spec("kubernetes") is not None  # which JAX asks there
    # A Cloud TPU machine asks its metadata server.
    return any(_DEVICES.glob("accel[0-9]*")) and not environment.get("JAX_PLATFORMS", "").startswith("cpu")


def _local_devices(environment: Mapping[str, str]) -> tuple[int, ...] | None:
    """Return the GPUs of this process where JAX's own choice would be wrong: the one of its number on the machine.

    It would be wrong where a process sees its own GPUs alone, and where it is the only one on its machine.
    """
    if "JAX_LOCAL_DEVICE_IDS" in environment:
        return None
    visible = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    has_its_own = len(visible) == 1 and visible != [""]
    has_its_own |= "SLURM_GPUS_PER_TASK" in environment or "gpu" in environment.get("SLURM_TRES_PER_TASK", "")
    nodes, tasks = (_number(environment, f"SLURM_STEP_NUM_{what}") for what in ("NODES", "TASKS"))
    is_only_one = environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1" or (nodes is not None and nodes == tasks)
    return () if has_its_own or is_only_one else None


def _first(given: int | None, other: int | None) -> int | None:
    return other if given is None else given


def _number(environment: Mapping[str, str], name: str) -> int | None:
    return int(environment[name]) if environment.get(name, "").isdigit() else None
