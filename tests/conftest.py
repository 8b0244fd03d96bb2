"""Every test sees eight CPU devices and strict broadcasting; set in the environment so that child processes do too."""

import os
import signal
import sys
from pathlib import Path

import pytest

from support.xla_flags import QUICK_TO_COMPILE

assert "jax" not in sys.modules, "jax read its environment before the tests could set it"

os.environ["JAX_PLATFORMS"] = "cpu"
XLA_FLAGS = ["--xla_force_host_platform_device_count=8", *QUICK_TO_COMPILE]
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *XLA_FLAGS]).strip()
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # a cache would hide what a test compiles

# Started in the background a shell lets a process ignore Ctrl-C, and its children would too.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Files and rooms whose tests start runs or compile whole training programs, the longest first and those of several
# processes apart from one another: workers (`-n`) take files in this order. The tests of all other files are `unit`.
LONG = (
    *("processes/test_train", "spmd/test_pipeline", "processes/test_pipeline", "run/test_train_errors"),
    "processes/test_full_disk",
    *("processes/test_elastic", "spmd/test_layouts", "run/test_train_resume", "model/test_llama", "inspect/"),
    *("processes/test_lateness", "bench/", "compare/test_runs", "model/test_decode", "spmd/test_offload"),
    *("processes/test_shared_batch", "run/test_checkpoint", "spmd/test_programs", "spmd/test_muon"),
    *("spmd/test_document_mask", "processes/test_kills", "islands/test_training", "islands/test_crossing"),
    "islands/test_meshes",
)
TESTS = Path(__file__).parent


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run those of eight processes and killed runs too: minutes")
    parser.addoption("--kills", type=int, default=10, help="with --slow: how often runs are killed")
    parser.addoption("--kills_seed", type=int, default=0, help="with --slow: another one, other instants")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: only with --slow")
    config.addinivalue_line("markers", "unit: starts no run and compiles nothing large; conftest.py sets it")


def pytest_collection_modifyitems(config, items):
    def place(item) -> int:
        name = item.path.relative_to(TESTS).as_posix()
        return next((i for i, prefix in enumerate(LONG) if name.startswith(prefix)), len(LONG))

    items.sort(key=place)
    for item in items:
        if place(item) == len(LONG):
            item.add_marker("unit")
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="takes minutes on few cores: run with --slow"))


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
