"""Every test sees eight CPU devices and strict broadcasting; set in the environment so that child processes do too."""

import os
import signal
import sys
from pathlib import Path

import pytest

assert "jax" not in sys.modules, "jax read its environment before the tests could set it"

os.environ["JAX_PLATFORMS"] = "cpu"
# Tests compile much and compute little: code of the least optimisation is ready in half the time.
XLA_FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *XLA_FLAGS]).strip()
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # a cache would hide what a test compiles

# Started in the background a shell lets a process ignore Ctrl-C, and its children would too.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests with eight processes as well: minutes")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: only with --slow")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--slow"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="eight processes, minutes on few cores: run with --slow"))


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    """The file of a small run's configuration, in a folder that a test file's runs share."""
    from support import processes  # imports jax

    return processes.write_config(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def config_file(tmp_path) -> str:
    """The file of a comparison's configuration."""
    from support import comparisons  # imports jax

    return comparisons.write_config(tmp_path)
