"""Which of a machine's GPUs are a process's own, where several processes of one run share the machine.

What Slurm does, by its man page srun(1) and its source (plugins/gres/common, releases 21.08 to 25.11):

* CUDA_VISIBLE_DEVICES lists the GPUs that a task may use. Without binding, all tasks of a step on a node see the same.
* --gpus-per-task=N implies --gpu-bind=per_task:N, which shows every task N GPUs of its own, unless another binding is
  given. Before 21.08 it reserves the GPUs and binds nobody. The tasks find N in SLURM_GPUS_PER_TASK ("2", "a100:2")
  or, since 23.11, in SLURM_TRES_PER_TASK ("cpu=4,gres/gpu=2").
* SLURM_GPUS_ON_NODE is the number of GPUs that the whole step has on the node, whatever a task sees of them. It tells
  bound tasks from others however they were bound. (--gpu-bind=closest may show one GPU to several tasks.)
"""

import itertools
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from noloco_jax.errors import UserError


def gpus_of_machine() -> int:
    """Count the NVIDIA GPUs that the system shows, without starting CUDA, which reads its settings only once."""
    devices = list(Path("/dev").glob("nvidia[0-9]*"))  # in a container, those that it was given
    return len(devices) or len(list(Path("/proc/driver/nvidia/gpus").glob("*")))  # not all systems make devices at boot


def own_gpus(
    environment: Mapping[str, str], local_rank: int, num_local: int, count_gpus: Callable[[], int]
) -> tuple[int, ...] | None:
    """Choose the GPUs that a process takes of those that it sees.

    Processes that were given GPUs of their own take all that they see. Processes that all see the same GPUs take equal
    shares of them, in the order of their ranks.

    Args:
      environment: of this process.
      local_rank: this process among those of the run on this machine, from 0.
      num_local: how many those are.
      count_gpus: tells how many GPUs the machine has; called where CUDA_VISIBLE_DEVICES is not set.

    Returns:
      Indices into CUDA_VISIBLE_DEVICES, or the GPUs' numbers where it is not set, as `jax.distributed.initialize` takes
      them; None: all that the process sees.

    Raises:
      UserError: if the processes cannot share the GPUs evenly.
    """
    settled = "JAX_LOCAL_DEVICE_IDS" in environment or environment.get("JAX_PLATFORMS", "").startswith("cpu")
    if settled or num_local == 1:
        return None
    visible = _visible_gpus(environment)
    if visible is not None and _has_its_own(environment, visible, num_local):
        return None
    num_gpus = count_gpus() if visible is None else visible
    if num_gpus % num_local:
        raise UserError(
            f"the {num_local} processes of this machine cannot share its {num_gpus} GPUs evenly: start {num_gpus}, "
            "a process a GPU, or set JAX_PLATFORMS=cpu"
        )
    share = num_gpus // num_local
    return tuple(range(local_rank * share, (local_rank + 1) * share)) or None


def _visible_gpus(environment: Mapping[str, str]) -> int | None:
    """Count the GPUs that CUDA_VISIBLE_DEVICES lists, up to the first that is none (as -1); None if not set."""
    if "CUDA_VISIBLE_DEVICES" not in environment:
        return None
    entries = environment["CUDA_VISIBLE_DEVICES"].split(",")
    return len(list(itertools.takewhile(re.compile(r"\s*(\d|GPU-|MIG-)").match, entries)))


def _has_its_own(environment: Mapping[str, str], visible: int, num_local: int) -> bool:
    """Return True if a process sees its own GPUs alone, with `num_local` processes on the machine."""
    if visible == _gpus_per_task(environment):
        return True
    on_node = environment.get("SLURM_GPUS_ON_NODE", "")
    if not on_node.isdigit():
        return visible == 1  # set for each process by whoever starts them
    if visible >= int(on_node):
        return False
    if visible * num_local > int(on_node):
        raise UserError(
            f"Slurm shows {visible} of the node's {on_node} GPUs to each of its {num_local} tasks, so that some share: "
            "give --gpus-per-task=1, or --gpu-bind=none to divide them evenly"
        )
    return True


def _gpus_per_task(environment: Mapping[str, str]) -> int | None:
    """The N of --gpus-per-task=N, or of --tres-per-task=gres/gpu:N; types of GPUs add up."""
    texts = environment.get("SLURM_GPUS_PER_TASK", "").split(",")
    if texts == [""]:
        texts = [text for text in environment.get("SLURM_TRES_PER_TASK", "").split(",") if "gpu" in text]
    counts = [int(match[0]) for text in texts if (match := re.search(r"\d+$", text))]
    return sum(counts) or None
