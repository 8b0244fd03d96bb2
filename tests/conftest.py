"""Every test sees eight CPU devices and strict broadcasting; set in the environment so that child processes do too.

With `-m gpu`, the tests that are right on any device run on the GPUs that JAX finds, their other halves on the CPU.
"""

import gc
import signal
import sys
from pathlib import Path

import pytest

from support import platforms

assert "jax" not in sys.modules, "jax read its environment before the tests could set it"

# Started in the background a shell lets a process ignore these, and its children would too.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which `nohup` has them ignore


# Files and rooms whose tests start runs or compile whole training programs, the longest first and those of several
# processes apart from one another: workers (`-n`) take files in this order. The tests of all other files are `unit`.
LONG = (
    *("processes/test_train", "train/test_parts_and_modes", "spmd/test_pipeline", "processes/test_pipeline"),
    *("train/test_train_errors", "processes/test_full_disk", "processes/test_workdir_lock"),
    *("islands/test_come_and_go", "islands/test_own_loop", "islands/test_several_processes"),
    *(
        "processes/test_elastic",
        "spmd/test_layouts",
        "train/test_train_resume",
        "model/test_llama",
        "model/test_own_model",
        "communication/",
    ),
    *("bench/", "compare/test_runs", "model/test_decode", "spmd/test_offload"),
    *("processes/test_shared_batch", "checkpoint/test_checkpoint", "spmd/test_programs", "spmd/test_muon"),
    *("spmd/test_document_mask", "processes/test_kills", "islands/test_training", "islands/test_crossing"),
    *(
        "tools/test_documented_commands",
        "tools/test_notebook",
        "islands/test_finished",
        "islands/test_membership",
        "islands/test_meshes",
        "islands/test_killed",
    ),
)
# What `-m gpu` runs: tests of numbers, which hold on any device. Those that ask for more GPUs than there are skip.
ON_GPUS = (
    *("model/test_golden", "model/test_attention", "model/test_document_mask", "model/test_decode"),
    *("outer/test_golden", "outer/test_oracle", "outer/test_rules", "outer/test_fragments", "outer/test_sparseloco"),
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
    parser.addoption("--slow", action="store_true", help="run those of eight processes and killed runs too: minutes")
    parser.addoption("--kills", type=int, default=10, help="with --slow: how often runs are killed")
    parser.addoption("--kills_seed", type=int, default=0, help="with --slow: another one, other instants")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: only with --slow")
    config.addinivalue_line("markers", "unit: starts no run and compiles nothing large; conftest.py sets it")
    config.addinivalue_line("markers", "gpu: right on any device, and given alone on GPUs; conftest.py sets it")
    (platforms.use_gpus if config.option.markexpr == "gpu" else platforms.use_cpu)()
    if not hasattr(config, "workerinput"):
        platforms.share_programs()


def pytest_unconfigure(config):
    if not hasattr(config, "workerinput"):
        platforms.forget_programs()


def pytest_sessionstart(session):
    if session.config.option.markexpr == "gpu" and (reason := platforms.missing()):
        pytest.exit(reason, returncode=2)


def pytest_collection_finish(session):
    # JAX makes many objects as it traces: Python's search for unreachable ones, at its defaults, took a twentieth of
    # the time of a test that compiles.
    del session
    gc.freeze()
    gc.set_threshold(50_000)


def pytest_collection_modifyitems(config, items):
    names = {path: path.relative_to(TESTS).as_posix() for path in {item.path for item in items}}
    places = {
        path: next((i for i, prefix in enumerate(LONG) if name.startswith(prefix)), len(LONG))
        for path, name in names.items()
    }
    items.sort(key=lambda item: places[item.path])
    for item in items:
        if places[item.path] == len(LONG):
            item.add_marker("unit")
        if names[item.path].startswith(ON_GPUS):
            item.add_marker("gpu")
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
