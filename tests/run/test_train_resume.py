"""Resuming interrupted runs bitwise: real processes, killed and terminated."""

import json
import random
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

from noloco_jax.config import from_dict, load_config, to_dict
from noloco_jax.run.loop import Hooks
from noloco_jax.train import training
from noloco_jax.train.training import train
from support import processes, warm
from support.paths import ROOT

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def uninterrupted(config) -> Path:
    return processes.trained(config, "uninterrupted")


def assert_same_run(workdir: Path, other: Path) -> None:
    assert processes.metrics(workdir) == processes.metrics(other)
    mine, theirs = processes.weights(workdir), processes.weights(other)
    for name in theirs:
        np.testing.assert_array_equal(mine[name], theirs[name], err_msg=name)


def test_a_run_killed_at_random_steps_and_during_saves_resumes_bitwise(config, uninterrupted):
    workdir = config.parent / "killed"
    rng = random.Random(0)

    def saving() -> bool:
        return any("tmp" in path.name for path in (workdir / "checkpoints").glob("*"))

    interrupted = 0
    for step in (3, 14):
        run = processes.start(config, workdir)
        processes.wait_until(processes.reached(workdir, step + rng.randrange(4)), run)
        processes.kill(run)
        run = processes.start(config, workdir)
        processes.wait_until(lambda: not saving(), run)  # a start first removes the previous one's partial save
        interrupted += processes.wait_until(saving, run)
        processes.kill(run)
    assert interrupted
    [(status, output)] = processes.run(config, workdir)
    assert status == 0, output
    assert_same_run(workdir, uninterrupted)


def test_a_resumed_offloaded_run_matches_the_on_device_run_bitwise(config, uninterrupted):
    workdir, offload = config.parent / "offloaded", "--config.outer.offload=True"
    run = processes.start(config, workdir, offload)
    assert processes.wait_until(processes.reached(workdir, 12), run)  # the save of step 4 ends before that of step 8
    processes.kill(run)
    [(status, output)] = processes.run(config, workdir, offload)
    assert status == 0, output
    assert "resuming from the checkpoint of step" in output
    assert_same_run(workdir, uninterrupted)


def test_a_termination_signal_saves_exits_with_status_75_and_resumes_bitwise(config, uninterrupted):
    """Once by SIGTERM, and after the resume by SIGHUP."""
    workdir, saved = config.parent / "signalled", 0
    for number in (signal.SIGTERM, signal.SIGHUP):
        run = processes.start(config, workdir, seconds_per_step=0.2)
        processes.wait_until(processes.reached(workdir, saved + 4), run)
        run[0].send_signal(number)
        [(status, output)] = processes.finish(run)
        assert status == 75, output
        assert "everything is saved" in output
        assert f"resuming from the checkpoint of step {saved}" in output or not saved
        before, saved = saved, max(int(path.name) for path in (workdir / "checkpoints").iterdir())
        assert saved >= before + 4

    [(status, output)] = processes.run(config, workdir)
    assert status == 0, output
    assert f"resuming from the checkpoint of step {saved}" in output
    assert_same_run(workdir, uninterrupted)


def test_a_closed_stdout_pipe_neither_stops_nor_changes_the_run(config, uninterrupted):
    workdir = config.parent / "unread"
    [run] = processes.start(config, workdir, seconds_per_step=0.1)
    assert run.stdout is not None
    run.stdout.close()  # also the pipe of standard error
    assert run.wait(processes.PATIENCE) == 0
    assert_same_run(workdir, uninterrupted)


def test_a_full_stdout_is_reported_once_and_does_not_stop_the_run(config, uninterrupted):
    workdir = config.parent / "full"
    with open("/dev/full", "w") as full:
        run = warm.Popen(
            processes.command(config, workdir),
            env=processes.environment(config),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
    _, errors = run.communicate(timeout=processes.PATIENCE)
    assert run.returncode == 0, errors
    [line] = [line for line in errors.splitlines() if "No space left" in line]
    assert line.startswith("warning: standard output cannot be written") and str(workdir) not in line
    assert_same_run(workdir, uninterrupted)


@pytest.fixture
def compiled_once(monkeypatch):
    """Compile the programs of a run once for all its starts in this process: they are functions of their arguments."""
    compile_run, made = training._compile, {}

    def compile_once(config, *arguments, **options):
        key = json.dumps(to_dict(config))
        if key not in made:
            made[key] = compile_run(config, *arguments, **options)
        return made[key]

    monkeypatch.setattr(training, "_compile", compile_once)


class Terminate(Hooks):
    """Hooks that send this process a SIGTERM in a given step."""

    def __init__(self, step: int):
        self._step = step

    def before_step(self, step: int) -> None:
        if step == self._step:
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.usefixtures("compiled_once")
def test_evaluations_skipped_by_termination_are_run_at_the_next_start(config, tmp_path):
    """The next start evaluates the restored state, also after the last step."""
    run = from_dict(load_config(str(config), ["--config.num_steps=4", "--config.eval_every=2"]))
    assert train(run, tmp_path, hooks=Terminate(2)) == 75
    assert [line["step"] for line in processes.metrics(tmp_path) if line["kind"] == "eval"] == []
    assert train(run, tmp_path, hooks=Terminate(4)) == 75
    assert [line["step"] for line in processes.metrics(tmp_path) if line["kind"] == "eval"] == [2]
    assert train(run, tmp_path) == 0
    assert [(line["kind"], line["step"]) for line in processes.metrics(tmp_path)] == [
        *(("train", 1), ("train", 2), ("eval", 2)),
        *(("train", 3), ("train", 4), ("eval", 4)),
    ]


@pytest.mark.usefixtures("compiled_once")
def test_a_run_with_delayed_fragment_exchanges_resumes_bitwise(config, tmp_path):
    """The run stops with three pending corrections and two outer steps not yet logged, and ends with a final merge."""
    flags = ["--config.num_steps=8", "--config.outer.fragments=4", "--config.outer.delay=3", "--config.log_every=4"]
    run = from_dict(load_config(str(config), [*flags, "--config.outer.final_merge=True"]))
    assert train(run, tmp_path / "one") == 0
    assert train(run, tmp_path / "two", hooks=Terminate(6)) == 75
    assert train(run, tmp_path / "two") == 0
    assert_same_run(tmp_path / "two", tmp_path / "one")
    logged = [line["outer_steps"] for line in processes.metrics(tmp_path / "one") if "round" in line]
    assert logged == [4, 4]  # one outer step per inner step
    for weights in processes.weights(tmp_path / "one").values():
        np.testing.assert_array_equal(weights, np.broadcast_to(weights[:1], weights.shape))


@pytest.mark.usefixtures("compiled_once")
def test_a_terminated_run_on_a_data_mixture_resumes_bitwise(config, tmp_path, capsys):
    mixture = {"long": ("data", 2), "short": ("held_out", 1)}
    flags = ["--config.data.kind=mixture", "--config.data.path=", "--config.data.validation_path="]
    for name, (folder, weight) in mixture.items():
        fields = {"kind": "text", "path": config.parent / folder, "weight": weight}
        flags += [f"--config.data.mixture.{name}.{field}={value}" for field, value in fields.items()]
    run = from_dict(load_config(str(config), [*flags, "--config.num_steps=6"]))
    assert train(run, tmp_path / "whole") == 0
    assert f"66.7 % long: text in {config.parent / 'data'}" in "".join(capsys.readouterr().out.split("\n"))
    assert train(run, tmp_path / "cut", hooks=Terminate(2)) == 75
    assert train(from_dict(load_config(str(tmp_path / "cut/config.json"))), tmp_path / "cut") == 0
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


def test_restarting_a_complete_run_reports_completion(config, uninterrupted, capsys):
    assert train(from_dict(load_config(str(config))), uninterrupted) == 0
    assert "the run is complete (24 steps)" in capsys.readouterr().out
