"""Every test sees eight CPU devices and strict broadcasting; set in the environment so that child processes do too.

A test is of one of three tiers: `unit`, by the list below; `slow`, by its own mark; and the default, all others. With
`-m gpu`, the tests that are right on any device run on the GPUs that JAX finds, their other halves on the CPU.
"""

import gc
import signal
import sys
import zlib
from pathlib import Path

import pytest

from support import platforms
from support.cpu import Cpu

assert "jax" not in sys.modules, "jax read its environment before the tests could set it"

# Started in the background a shell lets a process ignore these, and its children would too.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which `nohup` has them ignore

# Folders and files whose tests start no run and compile nothing large: two minutes in all.
UNIT = (
    *("cluster/", "config/", "data/", "exchange/", "metrics/", "optim/", "simulate/"),
    *("compare/test_plan", "compare/test_report", "checkpoint/test_digests", "checkpoint/test_record"),
    *(
        "model/test_attention",
        "model/test_huggingface",
        "model/test_architecture",
        "model/test_loss",
        "spmd/test_gradients",
    ),
    *("spmd/test_learning_rates", "spmd/test_mesh", "spmd/test_routing", "tools/test_errors", "tools/test_formatting"),
)
# Tests of numbers, which hold on any device. Those that ask for more GPUs than there are skip.
GPU = (
    *("model/test_golden", "model/test_attention", "model/test_decode"),
    *("optim/test_golden", "optim/test_rules", "optim/test_fragments", "optim/test_sparseloco"),
    *(
        "exchange/test_modulo",
        "exchange/test_wire",
        "spmd/test_layouts",
        "spmd/test_offload",
        "train/test_train_resume",
    ),
)
TESTS = Path(__file__).parent


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=10, help="with -m slow: how often runs are killed")
    parser.addoption("--kills_seed", type=int, default=0, help="with -m slow: another one, other instants")


def pytest_configure(config):
    config.pluginmanager.register(Cpu())
    (platforms.use_gpus if config.option.markexpr == "gpu" else platforms.use_cpu)()
    if not hasattr(config, "workerinput"):
        platforms.share_programs()


def pytest_unconfigure(config):
    if not hasattr(config, "workerinput"):
        platforms.forget_programs()


def pytest_sessionstart(session):
    if session.config.option.markexpr == "gpu" and (reason := platforms.missing()):
        pytest.exit(reason, returncode=2)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items):
    for item in items:
        name = item.path.relative_to(TESTS).as_posix()
        if name.startswith(UNIT) and not item.get_closest_marker("slow"):
            item.add_marker("unit")
        if name.startswith(GPU):
            item.add_marker("gpu")

    def order(item: pytest.Item) -> tuple[bool, int]:
        """Workers (`-n`) take whole files in this order: the long ones first, those of a folder apart."""
        return item.get_closest_marker("unit") is not None, zlib.crc32(str(item.path.relative_to(TESTS)).encode())

    items.sort(key=order)


def pytest_collection_finish(session):
    # JAX makes many objects as it traces: Python's search for unreachable ones, at its defaults, took a twentieth of
    # the time of a test that compiles.
    del session
    gc.freeze()
    gc.set_threshold(50_000)


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
