"""Imports between the rooms of the package."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {name_of(path): path for path in (ROOT / "noloco_jax").rglob("*.py")}


def imports(path: Path, *, at_once: bool = False) -> set[str]:
    """Return the package's modules that a file imports; with `at_once`, only those imported at its top level."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in tree.body if at_once else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & FILES.keys()


def room(module: str) -> str:
    return ".".join(module.split(".")[:2])


# Packages from the top down: a package imports those below it alone. Modules beside the packages are checked by
# `test_there_are_no_circular_imports`.
LAYERS = (
    ("tools", "examples"),
    ("islands",),
    ("train",),
    ("checkpoint", "metrics"),
    ("cluster",),
    ("spmd",),
    ("model",),
    ("data",),
    ("config",),
    ("optim",),
)
DEPTH = {f"noloco_jax.{name}": depth for depth, layer in enumerate(LAYERS) for name in layer}


def test_packages_import_only_packages_of_lower_layers():
    """`tests/README.md` names the layers; packages of one layer do not import each other."""
    for module, path in FILES.items():
        if room(module) in DEPTH:
            for name in {room(name) for name in imports(path)} & DEPTH.keys() - {room(module)}:
                assert DEPTH[name] > DEPTH[room(module)], f"{module} imports {name}"
    packages = {room(module) for module, path in FILES.items() if path.parent.name != "noloco_jax"}
    assert packages == DEPTH.keys()


def test_there_are_no_circular_imports():
    order = graphlib.TopologicalSorter(
        {module: imports(path, at_once=True) - {module} for module, path in FILES.items()}
    )
    assert len(list(order.static_order())) == len(FILES)


@pytest.fixture(scope="module")
def imported() -> dict[str, set[str]]:
    """Return what one process has imported after each of three programs, which it runs one after the other."""
    programs = {
        "a run of all replicas": "import noloco_jax.train.run",
        "routes": "from noloco_jax.optim.exchange.permute import device_routes\n"
        "device_routes(np.array([[1, 0, 3, 2]]), 4, 1)",
        "pictures": "import noloco_jax.metrics.curves\nfrom noloco_jax.tools import simulate\n"
        "import noloco_jax.tools.compare.report",
    }
    lines = ["import sys, numpy as np", *(f"{program}; print(*sys.modules)" for program in programs.values())]
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {name: {*line.split()} for name, line in zip(programs, done.stdout.splitlines(), strict=True)}


def test_matplotlib_is_imported_only_for_drawing(imported):
    assert "matplotlib" not in imported["pictures"]


HEAVY = ("jax", "numpy", "optax", "flax", "orbax", "grain", "pyarrow", "rich", "noloco_jax.train.run")


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (["train", "--help"], 0),
        (["train", "--no_such_flag"], 2),
        (["train", "--workdir=runs/x", "--config=no_such_file.py"], 2),
        (["island", "--help"], 0),
        (["island", "train", "--help"], 0),
        (["island", "merge", "--help"], 0),
        (["island", "status", "--no_such_flag"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_help_and_wrong_flags_of_training_commands_import_nothing_heavy(command, status):
    tool, *flags = command
    program = (
        "import atexit, runpy, sys\n"
        f"atexit.register(lambda: print('imported:', [name for name in {HEAVY} if name in sys.modules]))\n"
        f"runpy.run_module('noloco_jax.{tool}', run_name='__main__', alter_sys=True)"
    )
    done = subprocess.run([sys.executable, "-c", program, *flags], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (status, "imported: []"), done.stderr


def test_routes_of_one_replica_per_device_import_no_scipy(imported):
    assert "scipy.optimize" not in imported["routes"]


def test_a_run_that_trains_all_replicas_imports_nothing_of_islands(imported):
    names = ("noloco_jax.island", "cryptography", "grpc")
    assert not [module for module in imported["a run of all replicas"] if module.startswith(names)]
