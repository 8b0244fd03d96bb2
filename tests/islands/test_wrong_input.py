"""Wrong input to the `island` commands: one line that says what to do, before anything is compiled or written."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
import pytest

from noloco_jax.errors import UserError
from noloco_jax.islands.command import main as island
from noloco_jax.islands.peers import PROTOCOL
from noloco_jax.islands.roster import read_roster
from support.live_island import LiveIsland, training, wait_for
from support.rosters import on_loopback, written

COMPILED = "/jax/core/compile/backend_compile_duration"


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


@pytest.fixture
def roster(tmp_path) -> Path:
    return written(on_loopback("paris", "berlin"), tmp_path / "roster.toml")


def command(config: Path, roster: Path, *more: str) -> list[str]:
    """Return the arguments of `island train` for two replicas."""
    workdir = roster.parent / "workdir"
    flags = [f"--config={config}", f"--roster={roster}", "--name=paris", f"--workdir={workdir}"]
    return ["train", *flags, "--config.num_replicas=2", *more]


def error_line(arguments: list[str], compiled: list[str]) -> str:
    """Run the command and return its error, one line; nothing may have been compiled before it."""
    with pytest.raises(UserError) as error:
        island(arguments)
    assert error.value.exit_status == 2 and "\n" not in str(error.value)
    assert compiled == []
    return str(error.value)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            ["--config.num_replicas=3"],
            "num_replicas=3 and the run test began with 2 islands: give --config.num_replicas=2",
        ),
        (["--config.method=diloco"], "method='diloco': islands exchange in pairs, give --config.method=noloco"),
        (["--config.outer.delay=2"], "leave out --config.outer.delay"),
        (["--keys=nowhere"], "nowhere/ca.pem cannot be read (No such file or directory): give the folder that"),
        (["--roster=nowhere.toml"], "the roster nowhere.toml cannot be read (No such file or directory): give the pat"),
        (["--name=pari"], "the roster of test has no island 'pari': did you mean 'paris'?"),
        (["--linger=-1"], "--linger=-1.0: give seconds"),
        (["--listen=7070"], "'7070' is no address"),
    ],
)
def test_a_wrong_flag_is_reported(config, roster, compiled, more, said):
    assert said in error_line(command(config, roster, *more), compiled)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("keys --roster=ROSTER --out=new --days=0", "--days=0: give 1 to 3650"),
        ("keys --roster=ROSTER --out=new --replace=pari", "has no island 'pari': did you mean 'paris'"),
        ("keys --roster=ROSTER --out=new --replace", "expected one argument"),
        ("status --roster=ROSTER --seconds=0", "give more than 0 and up to 600"),
        ("dashboard --roster=ROSTER --every=0", "give 0.2 to 3600 seconds"),
        ("dashboard --roster=ROSTER --listen=8080", "is no address"),
        ("merge --out=new", "give --roster=FILE of islands that train, or --workdirs"),
        ("merge --out=new --workdirs a --roster=b", "give --roster=FILE of islands that train, or --workdirs"),
        ("merge --out=new --roster=b --config.seed=1", "takes no fields but --config.data"),
        ("merge --out=new --roster=b --seconds=0", "give more than 0"),
    ],
)
def test_a_wrong_flag_of_a_command_is_refused_and_nothing_is_written(arguments, said, roster, monkeypatch):
    monkeypatch.chdir(roster.parent)
    with pytest.raises(UserError, match=said):
        island(arguments.replace("ROSTER", str(roster)).split())
    assert not (roster.parent / "new").exists()


def test_a_dry_run_compiles_and_writes_nothing_and_opens_no_port(config, roster, compiled, capsys):
    with socket.create_server(read_roster(roster).member("paris").address):
        assert island(command(config, roster, "--dry_run")) == 0
    assert "paris, island 1 of 2 in the run test" in capsys.readouterr().out
    assert compiled == [] and not (roster.parent / "workdir").exists()


def test_a_port_in_use_is_reported(config, roster, compiled):
    with socket.create_server(read_roster(roster).member("paris").address):
        line = error_line(command(config, roster), compiled)
    assert "cannot listen at " in line and "--listen=HOST:PORT" in line


def test_an_island_that_runs_already_is_reported(config, roster, compiled, tmp_path):
    paris = LiveIsland("paris", read_roster(roster), tmp_path)
    with training(paris):
        wait_for(lambda: hasattr(paris.link, "_listener"))
        assert "paris runs already" in error_line(command(config, roster), compiled)


def test_a_difference_from_the_other_islands_is_named_on_both_sides(config, roster, compiled, tmp_path):
    berlin = LiveIsland("berlin", read_roster(roster), tmp_path, identity={"protocol": "1"})
    with training(berlin):
        wait_for(lambda: hasattr(berlin.link, "_listener"))
        line = error_line(command(config, roster), compiled)
        hint = "(install one version of noloco_jax on both)"
        assert line == f"most islands refuse paris: protocol: {PROTOCOL} here, 1 at berlin {hint}"
        assert berlin.link.node.table.peers["paris"].wrong.startswith(f"protocol: 1 here, {PROTOCOL} at paris")
