"""What each of several runs at a time may use of a machine."""

import shutil
import subprocess
from collections.abc import Mapping, Sequence


def share_of_cores(cores: Sequence[int], jobs: int, slot: int) -> frozenset[int]:
    """The cores of one of so many jobs, beside each other; none stands for all, where jobs are alone or too many."""
    if jobs == 1 or jobs > len(cores):
        return frozenset()
    cores = sorted(cores)
    return frozenset(cores[slot * len(cores) // jobs : (slot + 1) * len(cores) // jobs])


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that runs may use: those that CUDA_VISIBLE_DEVICES names, or all that the driver tells of."""
    if environment.get("JAX_PLATFORMS", "").startswith("cpu"):
        return []
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is None and shutil.which("nvidia-smi", path=environment.get("PATH")):
        called = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
            env=dict(environment),
            capture_output=True,
            text=True,
        )
        named = ",".join(called.stdout.split()) if called.returncode == 0 else ""
    return [gpu for gpu in (named or "").split(",") if gpu]


def share_of_gpus(gpus: Sequence[str], environment: Mapping[str, str], jobs: int, slot: int) -> dict[str, str]:
    """The environment of one of so many jobs: its GPUs, or one that several share and its part of that one's memory,
    unless the environment says how much each may have."""
    if jobs == 1 or not gpus:
        return {}
    if jobs <= len(gpus):
        own = gpus[slot * len(gpus) // jobs : (slot + 1) * len(gpus) // jobs]
        return {"CUDA_VISIBLE_DEVICES": ",".join(own)}
    own, is_settled = gpus[slot % len(gpus)], any(name.endswith("CLIENT_MEM_FRACTION") for name in environment)
    part = {} if is_settled else {"XLA_CLIENT_MEM_FRACTION": f"{0.9 / -(-jobs // len(gpus)):.2f}"}
    return {"CUDA_VISIBLE_DEVICES": own, **part}
