"""Absence of global blocking: eight processes, one of them late, and the others that wait for it."""

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from noloco_jax.errors import UserError
from noloco_jax.lateness import command as lateness
from noloco_jax.lateness.command import Late, held_up, linked, seconds_stood, summary
from support import platforms, processes, warm
from support.paths import ROOT

LATE, SECONDS = 3, 6.0


def test_lateness_spreads_only_through_exchanges():
    rounds = [(10, ((0, 1), (2, 3))), (20, ((0, 2), (1, 3))), (30, ((0, 3), (1, 2)))]
    assert linked(rounds, [Late(2, 15, 1.0)]) == [set(), {0, 2}, {0, 1, 2, 3}]
    assert linked(rounds, [Late(2, 10, 1.0)]) == [{2, 3}, {0, 1, 2, 3}, {0, 1, 2, 3}]
    assert linked([(10, ((0, 1, 2, 3),))], [Late(0, 1, 1.0)]) == [{0, 1, 2, 3}]


ROWS = [
    {"step": 5, "seconds": [9.0, 0.0, 0.0]},  # before any process is late
    {"step": 10, "seconds": [0.7, 0.0, 0.1]},
    {"step": 12, "seconds": [0.4, 0.2, 0.9]},  # as when waiting for a correction that is due
    {"step": 20, "seconds": [0.0, 2.0, 0.0]},
]


def test_held_up_counts_processes_that_wait_half_the_lateness_within_the_window():
    assert held_up(ROWS, [Late(2, 8, 2.0)], window=5) == 1  # replica 0, for 1.1 s; 2 itself is late
    assert held_up(ROWS, [Late(2, 8, 2.0)], window=4) == 0
    assert held_up(ROWS, [Late(2, 8, 2.0)], window=13) == 2


def test_the_summary_averages_the_waits_of_processes_that_are_never_late():
    assert seconds_stood(ROWS) == pytest.approx([10.1, 2.2, 1.0])
    stood = {"noloco, delay 0": [3.0, 1.0, 9.0], "diloco": [2.5, 2.5, 0.0]}
    assert summary(stood, [Late(2, 8, 2.0)]) == (
        "For 2 s of lateness each of the others stood, on average, 2 s with noloco, delay 0; 2.5 s with diloco: "
        "least with noloco, delay 0."
    )


def arguments(config: Path, workdir: Path) -> list[str]:
    """Return the flags of two processes that train four steps with noloco, a fragment after each."""
    fields = {"num_replicas": 2, "outer.sync_every": 2, "outer.fragments": 2}
    return [
        *(f"--config={config}", "--workdir", str(workdir), "--methods=noloco", "--delays=0,1", "--steps=4"),
        *("--late=1:3:1.4", "--step_seconds=0", *(f"--config.{name}={x}" for name, x in fields.items())),
    ]


@pytest.fixture(scope="module")
def finished(config) -> tuple[Path, str]:
    """Return the workdir of a completed call, and its stdout."""
    workdir, output = config.parent / "finished", io.StringIO()
    with pytest.MonkeyPatch.context() as patches, contextlib.redirect_stdout(output):
        processes.set_environment(config, patches)
        # Without a number of devices: a process with a delay creates a second one for its exchanges.
        patches.setenv("XLA_FLAGS", " ".join(platforms.QUICK_TO_COMPILE))
        forking = {"Popen": warm.Popen, "DEVNULL": subprocess.DEVNULL, "STDOUT": subprocess.STDOUT}
        patches.setattr(lateness, "subprocess", SimpleNamespace(**forking))
        patches.setattr(lateness.signal, "signal", lambda *_: None)  # pytest's handlers stay
        assert lateness.main(arguments(config, workdir)) == 0
    return workdir, output.getvalue()


@pytest.mark.timeout(processes.PATIENCE)
def test_every_outer_step_of_a_fragment_records_the_wait_of_each_process(finished):
    rows = json.loads((finished[0] / "lateness.json").read_text())["noloco, delay 0"]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["groups"] == [[[0, 1]]] for row in rows)
    assert all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 for row in rows)
    assert [row["linked"] for row in rows] == [[], [], [0, 1], [0, 1]]
    # Process 0 waits for process 1, which sleeps for 1.4 s before step 3, less what holds itself up meanwhile.
    assert rows[2]["seconds"][0] > 0.8


@pytest.mark.timeout(processes.PATIENCE)
def test_the_output_names_the_runs_and_compares_the_delays(finished):
    lines = finished[1].splitlines()
    assert lines[:2] == [
        "process 1 of 2 is 1.4 s late before step 3",
        "noloco, delay 0 (1 of 2): 2 processes compile, then take 4 steps",
    ]
    assert [line.split("\u2502")[1].strip() for line in lines if line.startswith("\u2502")] == [
        "noloco, delay 0",
        "noloco, delay 1",
    ]
    assert lines[-1].startswith("For 1.4 s of lateness each of the others stood, on average, ")
    assert len(lines) < 15


@pytest.mark.timeout(processes.PATIENCE)
def test_a_workdir_that_holds_runs_is_refused_and_unchanged(finished, config):
    workdir, _ = finished
    before = {path: path.stat().st_mtime_ns for path in workdir.rglob("*")}
    with pytest.raises(UserError, match="noloco holds a run already: give another --workdir"):
        lateness.main(arguments(config, workdir))
    assert {path: path.stat().st_mtime_ns for path in workdir.rglob("*")} == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--methods=noloco,ddp",
            "--methods=noloco,ddp: 'ddp' has no outer steps, choose from noloco,diloco,epidemic,sparseloco",
        ),
        ("--methods=local", "'local' has no outer steps"),
        ("--config.outer.sync_every=5", "outer.sync_every=5 is more than --steps=4"),
        ("--delays=0,3", "outer.delay=3"),
        ("--delays=soon", "--delays=soon: give numbers of steps"),
        ("--step_seconds=-1", "--step_seconds=-1.0: give seconds from 0"),
        ("--late=2:3:5", "--late=2:3:5 names no process or step: there are num_replicas=2 processes and --steps=4"),
        ("--late=1:5:5", "--late=1:5:5 names no process or step"),
        ("--late=1:2:nan", "--late=1:2:nan: nan is not a duration"),
        ("--methods=noloco,diloco --config.outer.wire=bfloat16", "epidemic's messages and method='diloco'"),
    ],
)
def test_invalid_arguments_are_refused_before_anything_starts(flags, message, config, tmp_path):
    workdir = tmp_path / "runs"
    with pytest.raises(UserError, match=message):
        lateness.main([*arguments(config, workdir), *flags.split()])
    assert not workdir.exists()


@pytest.mark.parametrize(
    ("platforms", "expected"), [("", ["cpu 0", "cpu 1"]), ("cuda", ["cuda 0", "cuda 1"])], ids=["unset", "cuda"]
)
def test_no_two_processes_share_a_gpu(platforms, expected, config, tmp_path, monkeypatch):
    """A stand-in interpreter prints the devices that each process would use."""
    interpreter = tmp_path / "python"
    interpreter.write_text('#!/bin/sh\necho "$JAX_PLATFORMS $JAX_LOCAL_DEVICE_IDS"\n')
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    monkeypatch.setattr(lateness.signal, "signal", lambda *_: None)  # pytest's handlers stay
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    with pytest.raises(UserError, match=r"metrics\.jsonl is not there"):
        lateness.main(arguments(config, tmp_path))
    assert [(tmp_path / f"noloco/log.{i}.txt").read_text().strip() for i in range(2)] == expected


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> dict[str, list[dict]]:
    """Return rows of outer steps after steps 3, 6, 9 and 12 of eight processes, one of which is late at step 8."""
    folder = tmp_path_factory.mktemp("lateness")
    config = processes.write_config(folder)
    fields = {"num_replicas": 8, "outer.sync_every": 3}
    command = [
        *(sys.executable, "-m", "noloco_jax.lateness", f"--config={config}", f"--workdir={folder / 'runs'}"),
        *("--steps=12", "--delays=0", "--step_seconds=0", f"--late={LATE}:8:{SECONDS}"),
        *(f"--config.{name}={x}" for name, x in fields.items()),
    ]
    completed = subprocess.run(
        command, env=processes.environment(config), cwd=ROOT, capture_output=True, text=True, timeout=800
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return json.loads((folder / "runs/lateness.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_with_noloco_only_processes_linked_to_the_late_one_wait(rows):
    # The first round is left out: in it, processes also wait for those that started later.
    _, before, during, after = rows["noloco, delay 0"]
    assert max(before["seconds"]) < SECONDS / 2
    [partners] = [group for group in during["groups"][0] if LATE in group]
    assert sorted(partners) == during["linked"]
    waited = {i for i, seconds in enumerate(during["seconds"]) if seconds > SECONDS / 2}
    assert waited == set(partners) - {LATE}
    waited = {i for i, seconds in enumerate(after["seconds"]) if seconds > SECONDS / 2}
    assert waited <= set(after["linked"])
    assert len(after["linked"]) == 4


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_with_diloco_all_wait_for_the_late_process(rows):
    _, _, during, _ = rows["diloco"]
    assert during["linked"] == list(range(8))
    others = np.delete(during["seconds"], LATE)
    assert min(others) > SECONDS / 2
