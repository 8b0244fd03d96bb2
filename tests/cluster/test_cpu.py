"""How a process uses its CPU."""

import os
import platform
import subprocess
import sys

import pytest

# Allocates, fills and frees 256 MiB, and prints how many pages the second time had to fetch from the kernel.
_PAGES_FETCHED_AGAIN = """
import resource
import numpy as np
{first}
np.ones(2**25)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
np.ones(2**25)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
_KEEP = "from noloco_jax.cluster.cpu import keep_freed_memory; keep_freed_memory()"


def printed(program, **environment):
    """The number that a Python program prints."""
    run = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return int(run.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators than glibc's are left as they are")
def test_memory_once_freed_is_used_again_without_the_kernel():
    kept, handed_back = (printed(_PAGES_FETCHED_AGAIN.format(first=first)) for first in (_KEEP, ""))
    assert kept < 100 < handed_back


def test_where_gpus_may_train_freed_memory_is_left_to_the_allocator():
    fetched = printed(_PAGES_FETCHED_AGAIN.format(first=_KEEP), JAX_PLATFORMS="cuda")
    assert fetched > 100


@pytest.mark.parametrize(("cores", "num_replicas", "devices"), [(4, 8, 4), (5, 6, 3), (4, 7, 1)])
def test_a_process_makes_as_many_devices_as_its_cores_and_replicas_allow(cores, num_replicas, devices):
    program = f"""
import os
os.sched_getaffinity = lambda pid: range({cores})
import jax
from noloco_jax.config import fields as config
from noloco_jax.cluster.cpu import use_cpu_cores
use_cpu_cores(config.from_dict({{"num_replicas": {num_replicas}}}))
print(jax.local_device_count())
"""
    assert printed(program, XLA_FLAGS="") == devices
