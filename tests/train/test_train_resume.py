"""Resuming interrupted runs bitwise: real processes, killed and terminated."""

import contextlib
import json
import signal
from pathlib import Path

import numpy as np
import pytest

from noloco_jax.config import load_config, to_dict
from noloco_jax.train import loop, phases
from noloco_jax.train.run import train
from support import processes

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def uninterrupted(config) -> Path:
    return processes.trained(config, "uninterrupted")


def test_an_offloaded_run_killed_at_a_step_and_during_a_save_ends_bitwise_as_one_on_devices(config, uninterrupted):
    workdir, offload = config.parent / "killed", "--config.outer.offload=True"

    def saving() -> bool:
        return any("tmp" in path.name for path in (workdir / "checkpoints").glob("*"))

    run = processes.start(config, workdir, offload)
    processes.wait_until(processes.reached(workdir, 6), run)
    processes.kill(run)
    run = processes.start(config, workdir, offload)
    processes.wait_until(lambda: not saving(), run)  # a start first removes the previous one's partial save
    assert processes.wait_until(saving, run)
    processes.kill(run)
    [(status, output)] = processes.run(config, workdir, offload)
    assert status == 0, output
    processes.assert_equal_runs(workdir, uninterrupted)


def test_a_closed_stdout_pipe_neither_stops_nor_changes_the_run(config, uninterrupted):
    workdir = config.parent / "unread"
    [run] = processes.start(config, workdir, seconds_per_step=0.1)
    assert run.stdout is not None
    run.stdout.close()  # also the pipe of standard error
    assert run.wait(processes.PATIENCE) == 0
    processes.assert_equal_runs(workdir, uninterrupted)


@pytest.fixture
def compiled_once(monkeypatch):
    """Compile the programs of a run once for all its starts in this process: they are functions of their arguments."""
    compile_run, made = phases.compile_run, {}

    def compile_once(setup, *arguments, **options):
        key = json.dumps(to_dict(setup.config))
        if key not in made:
            made[key] = compile_run(setup, *arguments, **options)
        return made[key]

    monkeypatch.setattr(phases, "compile_run", compile_once)


@contextlib.contextmanager
def terminated_in(step: int):
    """Send this process a SIGTERM in the given step of a run."""
    take = loop._inner_step

    def take_and_terminate(run, state, number):
        if number == step:
            signal.raise_signal(signal.SIGTERM)
        return take(run, state, number)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(loop, "_inner_step", take_and_terminate)
        yield


@pytest.mark.usefixtures("compiled_once")
def test_a_run_with_delayed_fragment_exchanges_resumes_bitwise(config, tmp_path):
    """The run stops with three pending corrections and two outer steps not yet logged, and ends with a final merge."""
    flags = ["--config.num_steps=8", "--config.outer.fragments=4", "--config.outer.delay=3", "--config.log_every=4"]
    run = load_config(str(config), [*flags, "--config.outer.final_merge=True"])
    assert train(run, tmp_path / "one") == 0
    with terminated_in(6):
        assert train(run, tmp_path / "two") == 75
    assert train(run, tmp_path / "two") == 0
    processes.assert_equal_runs(tmp_path / "two", tmp_path / "one")
    logged = [line["outer_steps"] for line in processes.metrics(tmp_path / "one") if "round" in line]
    assert logged == [4, 4]  # one outer step per inner step
    for weights in processes.weights(tmp_path / "one").values():
        np.testing.assert_array_equal(weights, np.broadcast_to(weights[:1], weights.shape))


def test_restarting_a_complete_run_prints_one_line(config, uninterrupted, capsys):
    for flags, late in ([], ""), (["--config.outer.final_merge=True"], "outer.final_merge: False before, True now"):
        assert train(load_config(str(config), flags), uninterrupted) == 0
        [line] = capsys.readouterr().out.splitlines()
        assert line.startswith("the run is complete (24 steps): give a larger --config.num_steps")
        assert line.endswith(f"; without effect: {late}" if late else "new run")
