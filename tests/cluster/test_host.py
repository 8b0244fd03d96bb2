"""What a process takes of its machine: devices of the CPU, memory of GPUs as JAX's own client reads it."""

import os
import subprocess
import sys

import pytest
from jaxlib.xla_client import generate_pjrt_gpu_plugin_options

from noloco_jax.cluster.host import num_cpu_devices, use_gpu_memory
from noloco_jax.config import MeshConfig

HOST_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def printed(program: str, **environment: str) -> int:
    """The number that a Python program prints."""
    run = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return int(run.stdout)


@pytest.mark.parametrize(
    ("mesh", "num_replicas", "cores", "num_processes", "expected"),
    [
        (MeshConfig(), 8, 4, 1, 4),
        (MeshConfig(), 6, 5, 1, 3),  # 5 and 4 do not divide 6
        (MeshConfig(), 7, 4, 1, 1),
        (MeshConfig(fsdp=2), 4, 5, 1, 4),  # two cores a replica, room for two
        (MeshConfig(replica=2, fsdp=-1), 4, 7, 1, 6),
        (MeshConfig(replica=2, tensor=3), 4, 1, 1, 6),  # an explicit mesh, however few the cores
        (MeshConfig(), 8, 4, 4, 1),
        (MeshConfig(replica=2, fsdp=3), 4, 4, 4, 2),  # 6 devices of 4 processes
    ],
)
def test_a_process_makes_as_many_devices_as_mesh_cores_and_replicas_allow(
    mesh, num_replicas, cores, num_processes, expected
):
    assert num_cpu_devices(mesh, num_replicas, cores, num_processes) == expected


def test_jax_has_the_devices_that_the_cores_allow():
    program = """
import os
os.sched_getaffinity = lambda pid: range(5)
import jax
from noloco_jax.cluster.host import use_cpu_cores
from noloco_jax.config import TrainConfig
use_cpu_cores(TrainConfig(num_replicas=6))
print(jax.local_device_count())
"""
    assert printed(program, XLA_FLAGS="") == 3


@pytest.fixture
def no_limits_set(monkeypatch):
    for name in (HOST_LIMIT, *FRACTIONS):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)


def test_a_process_may_fill_its_gpus_and_pin_the_hosts_memory(no_limits_set):
    use_gpu_memory()
    assert generate_pjrt_gpu_plugin_options()["memory_fraction"] == 0.92
    with open("/proc/meminfo") as file:
        kibibytes = int(file.readline().split()[1])
    assert int(os.environ[HOST_LIMIT]) == kibibytes // 2**20


@pytest.mark.parametrize("name", FRACTIONS)
def test_limits_that_the_environment_sets_stay(monkeypatch, no_limits_set, name):
    monkeypatch.setenv(name, "0.5")
    monkeypatch.setenv(HOST_LIMIT, "7")
    use_gpu_memory()
    assert generate_pjrt_gpu_plugin_options()["memory_fraction"] == 0.5
    assert os.environ[HOST_LIMIT] == "7"
