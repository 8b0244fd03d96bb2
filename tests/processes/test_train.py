"""Runs over several real processes: training as in one, also after processes are stopped or killed."""

import signal
from pathlib import Path

import pytest

from support import processes

pytestmark = pytest.mark.timeout(900)

# Processes agree to stop within a second or two of a SIGTERM; a fast machine takes many steps meanwhile.
LONG = ("--config.num_steps=40", "--config.checkpoint_every=6")


@pytest.fixture(scope="module")
def alone(config) -> Path:
    """Return the workdir of the run in one process, all replicas on one device."""
    return processes.trained(config, "alone", "--config.mesh.replica=1", *LONG)


@pytest.fixture(scope="module")
def two(config) -> tuple[Path, list[str]]:
    """Return the workdir of the run over two processes with two replicas each, and the output of each process."""
    workdir = config.parent / "two"
    results = processes.run(config, workdir, *LONG, number=2)
    assert [status for status, _ in results] == [0, 0], processes.report(results)
    return workdir, [output for _, output in results]


def test_replicas_over_processes_train_as_in_one_process(alone, two):
    workdir, _ = two
    processes.assert_same_training(workdir, alone)
    processes.assert_same_losses(workdir, alone)


def test_only_the_first_process_reports(two):
    _, (first, second) = two
    assert "validation" in first
    assert "loss" not in second


def test_a_run_resumes_on_another_number_of_processes_and_mesh(config, alone):
    """Two processes that share every replica, of which one gets a SIGTERM; then one process."""
    workdir = config.parent / "moved"
    sharded = ("--config.mesh.replica=1", "--config.mesh.fsdp=2")
    run = processes.start(config, workdir, *LONG, *sharded, number=2, seconds_per_step=0.3)
    processes.wait_until(processes.reached(workdir, 5), run)
    run[1].send_signal(signal.SIGTERM)
    results = processes.finish(run)
    assert [status for status, _ in results] == [75, 75], processes.report(results)
    assert "everything is saved" in results[0][1]
    step = max(int(path.name) for path in (workdir / "checkpoints").iterdir())
    assert step >= 5
    [(status, output)] = processes.run(config, workdir, *LONG)
    assert status == 0, output
    assert f"resuming from the checkpoint of step {step}" in output
    processes.assert_same_training(workdir, alone)


def test_a_run_resumes_bitwise_after_a_sigkill_of_one_process(config, two):
    """The loss of the first process ends the other within a bounded time; a restart resumes."""
    whole, broken = two[0], config.parent / "broken"
    run = processes.start(config, broken, *LONG, number=2, seconds_per_step=0.05)
    processes.wait_until(processes.reached(broken, 15), run)
    run[0].send_signal(signal.SIGKILL)
    assert all(status != 0 for status, _ in processes.finish(run))
    results = processes.run(config, broken, *LONG, number=2)
    assert [status for status, _ in results] == [0, 0], processes.report(results)
    processes.assert_equal_runs(broken, whole)
