"""Facts that a Cloud TPU pod slice tells its hosts about themselves, of which each runs one process.

They are those by which `jax.distributed.initialize` finds its way without arguments (jax 0.10 to 0.12): environment
variables on Google Kubernetes Engine, the metadata server on TPU virtual machines, and both of several slices.
"""

import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from noloco_jax.errors import UserError

_PORT = 8482  # which JAX uses there too
_SECONDS = 5.0  # for an answer of the metadata server, which is on the same host
_ATTRIBUTES = "http://metadata.google.internal/computeMetadata/v1/instance/attributes"


class Pod(NamedTuple):
    """Place of a process among those of all slices.

    Attributes:
      coordinator: HOST:PORT of the first process.
      num_processes: of all slices.
      process_id: this one, from 0.
    """

    coordinator: str
    num_processes: int
    process_id: int


def tpu_pod_here(environment: Mapping[str, str]) -> Pod | None:
    """Find the place of this process in the pod that its machine belongs to; None on a machine without TPUs."""
    return find_pod(environment) if _has_tpus() else None


def _has_tpus(devices: Path = Path("/dev")) -> bool:
    """Return True if the system shows TPU chips; `vfio` may be another device's, which the metadata server settles."""
    return any(devices.glob("accel[0-9]*")) or any(devices.glob("vfio/[0-9]*"))


def read_metadata(name: str) -> str | None:
    """Return an attribute of this virtual machine; None where there is none, or no metadata server."""
    request = urllib.request.Request(f"{_ATTRIBUTES}/{name}", headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            return answer.read().decode()
    except (OSError, urllib.error.URLError):
        return None


def find_pod(environment: Mapping[str, str], metadata: Callable[[str], str | None] = read_metadata) -> Pod | None:
    """Find the place of this process in a pod; None on a machine without a pod, or alone in it.

    Args:
      environment: of this process.
      metadata: name of an attribute of the machine -> its value; None: there is none.

    Raises:
      UserError: if what is there is incomplete or contradicts itself.
    """
    if "TPU_WORKER_HOSTNAMES" in environment:
        hosts, worker = environment["TPU_WORKER_HOSTNAMES"], environment.get("TPU_WORKER_ID")
        slices: Mapping[str, str] = environment
    elif "TPU_SKIP_MDS_QUERY" in environment or not (hosts := metadata("worker-network-endpoints")):
        return None
    else:
        worker, slices = metadata("agent-worker-number"), _settings(metadata("tpu-env") or "") | dict(environment)
    # A host is a name, perhaps with a port, or name:number:address.
    names = [parts[2] if len(parts) == 3 else parts[0] for parts in (host.split(":") for host in hosts.split(","))]
    count, number = slices.get("MEGASCALE_NUM_SLICES") or "1", slices.get("MEGASCALE_SLICE_ID") or "0"
    if worker is None or not all(text.isdecimal() for text in (worker, count, number)):
        raise UserError(
            f"this TPU host is number {worker} of {len(names)} in slice {number} of {count}: give its place by "
            "--coordinator, --num_processes and --process_id"
        )
    first = (slices.get("MEGASCALE_COORDINATOR_ADDRESS") or names[0]).partition(":")[0]
    num_processes = len(names) * int(count)
    if num_processes == 1:
        return None
    return Pod(f"{first}:{_PORT}", num_processes, int(worker) + int(number) * len(names))


def _settings(text: str) -> dict[str, str]:
    """Parse lines like MEGASCALE_NUM_SLICES: '2'."""
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip().strip("'") for name, _, value in pairs}
