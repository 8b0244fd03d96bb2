"""The wheel, and behaviour with only a part of its requirements installed."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import noloco_jax
from noloco_jax.__main__ import main
from noloco_jax.config.config_file import read_config_file
from noloco_jax.errors import UserError
from support.paths import CONFIGS, ROOT, TOOLS

# Makes imports of some packages fail as if they were not installed.
WITHOUT = """
import importlib.abc, sys
class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
"""
BEYOND_THE_TRANSFORM = ("flax", "orbax", "grain", "transformers", "pyarrow", "ml_collections", "cryptography", "rich")


def run_without(packages: tuple[str, ...], program: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", WITHOUT.format(blocked=packages) + program]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel from a copy, because setuptools writes into the source folder."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("noloco_jax", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", f"--wheel-dir={out}", str(source)]
    built = subprocess.run(command, capture_output=True, text=True)
    if "No matching distribution found for setuptools" in built.stdout + built.stderr:
        pytest.skip("pip reaches no index from which to take setuptools")
    assert built.returncode == 0, built.stderr
    (path,) = out.glob("*.whl")
    with zipfile.ZipFile(path) as opened:
        yield opened


def test_the_wheel_holds_modules_configs_dashboard_page_and_type_marker_only(wheel):
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "noloco_jax").rglob("*.py")}
    configs = {f"noloco_jax/configs/{path.name}" for path in CONFIGS.glob("*.py")}
    page = {f"noloco_jax/islands/{name}" for name in ("page.html", "messages.proto", "messages_pb2.pyi")}
    assert packed == modules | configs | page | {"noloco_jax/py.typed"}


def test_a_config_of_an_installed_wheel_is_found_by_its_path_in_a_clone(wheel, tmp_path):
    wheel.extractall(tmp_path)
    program = (
        "from noloco_jax.config.config_file import read_config_file as r; print(r('configs/c4_1b.py:noloco').method)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    own = tmp_path / "noloco_jax" / "configs" / "c4_1b.py"
    assert (done.stdout, done.stderr) == ("noloco\n", f"configs/c4_1b.py is not in this folder: using {own}\n")


def test_a_config_in_the_working_directory_goes_before_the_packages_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("configs").mkdir()
    Path("configs/quickstart.py").write_text("def get_config():\n    return {'num_steps': 7}\n")
    assert read_config_file("configs/quickstart.py").num_steps == 7


@pytest.mark.parametrize(
    ("path", "said"),
    [
        *((path, "does not exist") for path in ("quickstart.py", "other/configs/quickstart.py", "configs/../setup.py")),
        ("configs/quikstart.py", r"did you mean configs/quickstart\.py\?"),
    ],
)
def test_only_paths_in_configs_fall_back_to_the_packages_own_files(path, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=said):
        read_config_file(path)


def test_a_step_of_the_transform_needs_jax_and_optax_only():
    program = (
        "import jax, jax.numpy as jnp, optax, noloco_jax as nj\n"
        "optimizer = optax.chain(optax.sgd(1.0), nj.noloco(nj.RandomPairing(2), outer_lr=1.0, sync_every=1))\n"
        "params = {'w': jnp.array([0.0, 2.0])}\n"
        "state = jax.vmap(optimizer.init)(params)\n"
        "updates, _ = jax.vmap(optimizer.update, axis_name='replica')(params, state, params)\n"
        "print(*updates['w'].tolist())"
    )
    done = run_without(BEYOND_THE_TRANSFORM, program)
    assert done.returncode == 0 and len(done.stdout.split()) == 2, done.stderr


@pytest.mark.parametrize("tool", ["train", "generate"])
def test_a_command_without_its_packages_names_one_and_ends_with_2(tool):
    program = f"import runpy; sys.argv[1:] = ['--help']; runpy.run_module('noloco_jax.{tool}', run_name='__main__')"
    done = run_without(("flax", "ml_collections", "ml"), program)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("error: this needs ml_collections, which is not installed: pip install noloco-jax")


def test_the_list_of_commands_is_complete_begins_with_training_and_imports_nothing_heavy():
    program = (
        "import atexit, runpy, sys\n"
        "heavy = {'jax', 'numpy', 'optax', 'ml_collections'}\n"
        "atexit.register(lambda: print(heavy & {*sys.modules}))\n"
        "runpy.run_module('noloco_jax', run_name='__main__', alter_sys=True)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    *lines, imported = done.stdout.splitlines()
    listed = {line.split()[2].removeprefix("noloco_jax."): line.split()[3:] for line in lines if line.startswith("  ")}
    assert (listed.keys(), imported) == ({*TOOLS}, "set()") and all(listed.values())
    assert next(iter(listed)) == "train"


def test_the_package_shows_its_public_names_alone_each_as_it_is_defined():
    assert [name for name in dir(noloco_jax) if not name.startswith("__")] == noloco_jax.__all__
    assert [getattr(noloco_jax, name).__name__ for name in noloco_jax.__all__] == noloco_jax.__all__


@pytest.mark.parametrize(("argument", "said"), [("train", r"python -m noloco_jax\.train"), ("--no_such", "unknown")])
def test_the_list_of_commands_takes_no_other_arguments(argument, said):
    with pytest.raises(UserError, match=said):
        main([argument])
