"""What a process takes of a GPU's memory, as JAX's own GPU client would read it."""

import os

import pytest
from jaxlib.xla_client import generate_pjrt_gpu_plugin_options

from noloco_jax.cluster.gpu import use_gpu_memory

HOST_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in (HOST_LIMIT, *FRACTIONS):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)


def test_a_process_may_fill_its_gpus_and_pin_the_hosts_memory():
    use_gpu_memory()
    assert generate_pjrt_gpu_plugin_options()["memory_fraction"] == 0.92
    with open("/proc/meminfo") as file:
        kibibytes = int(file.readline().split()[1])
    assert int(os.environ[HOST_LIMIT]) == kibibytes // 2**20


@pytest.mark.parametrize("name", FRACTIONS)
def test_what_the_environment_says_stays(monkeypatch, name):
    monkeypatch.setenv(name, "0.5")
    monkeypatch.setenv(HOST_LIMIT, "7")
    use_gpu_memory()
    assert generate_pjrt_gpu_plugin_options()["memory_fraction"] == 0.5
    assert os.environ[HOST_LIMIT] == "7"
