"""Wrong input to `island train`: one line that says what to do, exit 2, before anything is compiled."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
import pytest

from noloco_jax.cluster.workdir_lock import WorkdirLock
from noloco_jax.config import from_dict
from noloco_jax.config.flags import load_config
from noloco_jax.errors import UserError
from noloco_jax.island.command import main as island
from noloco_jax.island.membership import Membership, _identity
from noloco_jax.islands.protocol.messages import Identity
from noloco_jax.islands.roster import Roster, read_roster
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.programs import build_programs
from support.island_world import differing
from support.paths import ROOT
from support.processes import write_config
from support.rosters import on_loopback, written
from support.sites import Site

COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    return write_config(tmp_path_factory.mktemp("config"))


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Collect the names of programs compiled during the test, except conversions of numbers, which are no training."""
    names: list[str] = []

    def listen(event: str, duration_secs: float, **more: Any) -> None:
        if event == COMPILED and "convert_element_type" not in more["fun_name"]:
            names.append(more["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


def write_roster(folder: Path) -> Path:
    return written(on_loopback("paris", "berlin"), folder / "roster.toml")


def command(config: Path, roster: Path, *more: str, name: str = "paris") -> list[str]:
    """Return the arguments of `island train` for two replicas."""
    workdir = roster.parent / "workdir"
    flags = [f"--config={config}", f"--roster={roster}", f"--name={name}", f"--workdir={workdir}"]
    return ["train", *flags, "--config.num_replicas=2", *more]


def error_line(arguments: list[str], compiled: list[str]) -> str:
    """Run the command and return its error, one line; nothing may have been compiled before it."""
    with pytest.raises(UserError) as error:
        island(arguments)
    assert error.value.exit_status == 2 and "\n" not in str(error.value)
    assert compiled == []
    return str(error.value)


def test_the_fixture_detects_a_compiled_program(compiled):
    jax.jit(lambda x: x + 17).lower(1.0).compile()
    assert compiled


def test_wrong_input_ends_the_process_with_one_error_line_and_exit_status_2(config, tmp_path):
    arguments = command(config, write_roster(tmp_path), name="pari")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(
        [sys.executable, "-m", "noloco_jax.island", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    line = "error: the roster of test has no island 'pari': did you mean 'paris'?\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", line)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--config.num_replicas=3"], "num_replicas=3 and the roster of test has 2 islands: give --config.num_replica"),
        (["--config.method=diloco"], "method='diloco': islands meet in pairs, give --config.method=noloco"),
        (["--config.model.num_layers=0"], "model.num_layers=0"),
        (["--keys=nowhere"], "nowhere/ca.pem cannot be read (No such file or directory): give the folder that"),
        (["--roster=nowhere.toml"], "the roster nowhere.toml cannot be read (No such file or directory): give the pat"),
        (["--nam=x"], "unknown argument '--nam=x': did you mean '--name'?"),
    ],
)
def test_a_wrong_flag_is_reported(config, tmp_path, compiled, more, said):
    assert said in error_line(command(config, write_roster(tmp_path), *more), compiled)


def test_a_dry_run_compiles_and_writes_nothing_and_opens_no_port(config, tmp_path, compiled, capsys):
    roster = write_roster(tmp_path)
    with socket.create_server(read_roster(roster).address("paris")):
        assert island(command(config, roster, "--dry_run")) == 0
    assert "paris, 1 of 2 of test" in capsys.readouterr().out
    assert compiled == [] and not (tmp_path / "workdir").exists()


@pytest.mark.parametrize("more", [[], ["--dry_run"]], ids=["train", "dry_run"])
def test_a_missing_wandb_is_reported(config, tmp_path, compiled, monkeypatch, more):
    monkeypatch.setitem(sys.modules, "wandb", None)
    line = error_line(command(config, write_roster(tmp_path), "--wandb=p", *more), compiled)
    assert line.endswith("not installed: pip install wandb") and not (tmp_path / "workdir").exists()


def test_a_from_step_without_a_checkpoint_is_reported(config, tmp_path, compiled):
    line = error_line(command(config, write_roster(tmp_path), "--from_step=5"), compiled)
    assert "--from_step=5: " in line and "holds no checkpoint of that step (there are none)" in line


def test_a_workdir_in_use_by_a_trainer_is_reported(config, tmp_path, compiled):
    with WorkdirLock(tmp_path / "workdir", print):
        line = error_line(command(config, write_roster(tmp_path)), compiled)
    assert f"workdir is in use by the trainer on {socket.gethostname()} (process {os.getpid()}, since " in line


def test_a_port_in_use_is_reported(config, tmp_path, compiled):
    roster = write_roster(tmp_path)
    with socket.create_server(read_roster(roster).address("paris")):
        line = error_line(command(config, roster), compiled)
    assert "paris cannot listen at 127.0.0.1:" in line and "another program, or the same island, runs there" in line


def identity(config: Path, roster: Roster) -> Identity:
    """Return the identity of the island that the command would start with this configuration."""
    loaded = from_dict(load_config(str(config), ["--config.num_replicas=2"]))
    member = Membership(roster, "berlin", None)
    own = member.own(loaded)
    return _identity(member, loaded, build_programs(own, make_mesh(own, jax.devices()[:1])), "byte")


def test_an_island_that_already_runs_is_reported(config, tmp_path, compiled):
    roster = write_roster(tmp_path)
    site = Site("paris", read_roster(roster))
    site.open()
    try:
        line = error_line(command(config, roster), compiled)
    finally:
        site.close()
    assert line == (
        f"paris runs already, at {read_roster(roster).address('paris')}: stop it, or give --name of an island of test "
        "that does not run yet"
    )


@pytest.mark.parametrize("field", ["model", "config", "tokenizer"])
def test_a_difference_from_the_other_islands_is_named(config, tmp_path, compiled, field):
    """The model is compared last: everything else of the command's identity is the others'."""
    roster = write_roster(tmp_path)
    same = identity(config, read_roster(roster))
    other = differing(same, field)
    site = Site("berlin", read_roster(roster), identity=other)
    site.open()
    compiled.clear()
    try:
        line = error_line(command(config, roster), compiled)
    finally:
        site.close()
    named, theirs, mine = field, getattr(other, field), getattr(same, field)
    if field == "config":
        named, theirs, mine = "seed", theirs["seed"], "the default"
    said = f"{named}: {mine} here, {theirs} at berlin"
    assert line.startswith(f"1 of 1 islands refuse paris; berlin says: {said}: give all")
    assert f"paris was refused: {named}: {theirs} here, {mine} at paris" in site.lines  # on the other side too
