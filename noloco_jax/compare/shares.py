"""What each of several runs at a time may use of a machine."""

from collections.abc import Mapping, Sequence


def share_of_cores(cores: Sequence[int], jobs: int, slot: int) -> frozenset[int]:
    """The cores of one of so many jobs, beside each other; none stands for all, where jobs are alone or too many."""
    if jobs == 1 or jobs > len(cores):
        return frozenset()
    cores = sorted(cores)
    return frozenset(cores[slot * len(cores) // jobs : (slot + 1) * len(cores) // jobs])


def share_of_gpus(environment: Mapping[str, str], jobs: int, slot: int) -> dict[str, str]:
    """The environment of one of so many jobs: its part of CUDA_VISIBLE_DEVICES, where that names enough of them."""
    named = environment.get("CUDA_VISIBLE_DEVICES", "")
    gpus = [gpu for gpu in named.split(",") if gpu]
    if jobs == 1 or jobs > len(gpus):
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[slot * len(gpus) // jobs : (slot + 1) * len(gpus) // jobs])}
