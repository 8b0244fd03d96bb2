"""No global blocking, shown: eight processes, one of them late, and who of the others waits for it."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from noloco_jax.errors import UserError
from noloco_jax.lateness import command as lateness
from noloco_jax.lateness.command import Late, linked
from support import processes
from support.paths import ROOT

LATE, SECONDS = 3, 6.0


def test_lateness_spreads_by_meetings_alone():
    rounds = [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 3), (1, 2))]
    assert linked(rounds, [Late(2, 15, 1.0)], sync_every=10) == [set(), {0, 2}, {0, 1, 2, 3}]
    assert linked(rounds, [Late(2, 10, 1.0)], sync_every=10) == [{2, 3}, {0, 1, 2, 3}, {0, 1, 2, 3}]
    assert linked([((0, 1, 2, 3),)], [Late(0, 1, 1.0)], sync_every=10) == [{0, 1, 2, 3}]


def arguments(config: Path, workdir: Path) -> list[str]:
    """The flags of two processes that train two steps with noloco and meet after each, the workdir apart."""
    fields = {"num_replicas": 2, "num_steps": 2, "outer.sync_every": 1, "inner.warmup_steps": 1}
    return [
        *(f"--config={config}", "--workdir", str(workdir), "--processes=2", "--methods=noloco"),
        *(f"--config.{name}={x}" for name, x in fields.items()),
    ]


@pytest.fixture(scope="module")
def finished(config) -> Path:
    """The workdir of a call that came to its end."""
    workdir = config.parent / "finished"
    called = subprocess.run(
        [sys.executable, "-m", "noloco_jax.lateness", *arguments(config, workdir)],
        env=processes.environment(config),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=processes.PATIENCE,
    )
    assert called.returncode == 0, called.stdout + called.stderr
    return workdir


@pytest.mark.timeout(processes.PATIENCE)
def test_of_every_outer_step_each_process_has_its_seconds(finished):
    rows = json.loads((finished / "lateness.json").read_text())["noloco"]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 for row in rows)


@pytest.mark.timeout(processes.PATIENCE)
def test_runs_that_are_there_are_not_measured_again(finished, config):
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    with pytest.raises(UserError, match="noloco holds a run already: give another --workdir"):
        lateness.main([*arguments(config, finished), "--late=1:2:5"])
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--methods=noloco,ddp",
            "--methods=noloco,ddp: 'ddp' has no outer steps, choose from noloco,diloco,epidemic,sparseloco",
        ),
        ("--methods=local", "'local' has no outer steps"),
        ("--config.outer.sync_every=3", "outer.sync_every=3 is more than num_steps=2"),
        ("--processes=3", "--processes=3 and num_replicas=2"),
        ("--config.outer.fragments=2 --config.outer.sync_every=2", "outer.fragments=2: who waits is measured of outer"),
        ("--late=1:3:5", "--late=1:3:5 is of no process or step"),
        ("--late=1:2:nan", "--late=1:2:nan: nan is no time to be late by"),
        ("--methods=noloco,diloco --config.outer.wire=bfloat16", "epidemic's messages and method='diloco'"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(flags, message, config, tmp_path):
    workdir = tmp_path / "runs"
    with pytest.raises(UserError, match=message):
        lateness.main([*arguments(config, workdir), *flags.split()])
    assert not workdir.exists()


@pytest.mark.parametrize(
    ("platforms", "expected"), [("", ["cpu 0", "cpu 1"]), ("cuda", ["cuda 0", "cuda 1"])], ids=["unset", "cuda"]
)
def test_no_two_processes_share_a_gpu(platforms, expected, config, tmp_path, monkeypatch):
    """Processes that only say where they would compute."""
    interpreter = tmp_path / "python"
    interpreter.write_text('#!/bin/sh\necho "$JAX_PLATFORMS $JAX_LOCAL_DEVICE_IDS"\n')
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    monkeypatch.setattr(lateness.signal, "signal", lambda *_: None)  # pytest keeps its own
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    with pytest.raises(UserError, match=r"metrics\.jsonl is not there"):
        lateness.main(arguments(config, tmp_path))
    assert [(tmp_path / f"noloco/log.{i}.txt").read_text().strip() for i in range(2)] == expected


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> dict[str, list[dict]]:
    """Rounds after steps 3, 6, 9 and 12; one process is late at step 8. Till 12 nothing else spans them."""
    folder = tmp_path_factory.mktemp("lateness")
    config = processes.write_config(folder)
    fields = {"num_replicas": 8, "num_steps": 12, "outer.sync_every": 3, "eval_every": 12, "checkpoint_every": 12}
    command = [
        *(sys.executable, "-m", "noloco_jax.lateness", f"--config={config}", f"--workdir={folder / 'runs'}"),
        *("--processes=8", f"--late={LATE}:8:{SECONDS}", *(f"--config.{name}={x}" for name, x in fields.items())),
    ]
    called = subprocess.run(
        command, env=processes.environment(config), cwd=ROOT, capture_output=True, text=True, timeout=800
    )
    assert called.returncode == 0, called.stdout + called.stderr
    return json.loads((folder / "runs/lateness.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_with_noloco_only_those_linked_to_the_late_process_wait(rows):
    _, before, during, after = rows["noloco"]  # in the first round, processes also wait for those that started later
    assert max(before["seconds"]) < SECONDS / 2
    [partners] = [group for group in during["groups"] if LATE in group]
    assert sorted(partners) == during["can_wait"]
    waited = {i for i, seconds in enumerate(during["seconds"]) if seconds > SECONDS / 2}
    assert waited == set(partners) - {LATE}
    waited = {i for i, seconds in enumerate(after["seconds"]) if seconds > SECONDS / 2}
    assert waited <= set(after["can_wait"])
    assert len(after["can_wait"]) == 4


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_with_diloco_all_wait_for_the_late_process(rows):
    _, _, during, _ = rows["diloco"]
    assert during["can_wait"] == list(range(8))
    others = np.delete(during["seconds"], LATE)
    assert min(others) > SECONDS / 2
