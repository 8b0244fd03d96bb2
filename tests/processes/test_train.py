"""Runs over several real processes: training as in one, stops, kills, a smaller restore, and digests of checkpoints."""

import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import xxhash

from support import processes

pytestmark = pytest.mark.timeout(900)

# Processes agree to stop within a second or two of a SIGTERM; a fast machine takes many steps meanwhile.
LONG = ("--config.num_steps=40", "--config.checkpoint_every=6")
LAST = Path("checkpoints/40")
LONGER = ("--config.num_steps=44",)
# Steps too small to change a weight, and no outer step: the final checkpoint holds the restored weights.
STILL = ("--config.inner.lr=1e-30", "--config.inner.min_lr=0", "--config.outer.sync_every=100")
FEWER = (*LONGER, *STILL, "--config.num_replicas=2", "--config.elastic=merge")


@pytest.fixture(scope="module")
def alone(config) -> Path:
    """Return the workdir of the run in one process, all replicas on one device."""
    return processes.trained(config, "alone", "--config.mesh.replica=1", *LONG)


@pytest.fixture(scope="module")
def two(config) -> Path:
    """Return the workdir of the run over two processes with two replicas each, of which only the first reports."""
    workdir = config.parent / "two"
    results = processes.run(config, workdir, *LONG, number=2)
    (status, first), (other, second) = results
    assert (status, other) == (0, 0), processes.report(results)
    assert "perplexity" in first and "curves: " in first
    assert "perplexity" not in second and "loss" not in second
    return workdir


def test_replicas_over_processes_train_as_in_one_process(alone, two):
    processes.assert_same_training(two, alone)
    processes.assert_same_losses(two, alone)


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
    broken = config.parent / "broken"
    run = processes.start(config, broken, *LONG, number=2, seconds_per_step=0.05)
    processes.wait_until(processes.reached(broken, 15), run)
    run[0].send_signal(signal.SIGKILL)
    assert all(status != 0 for status, _ in processes.finish(run))
    results = processes.run(config, broken, *LONG, number=2)
    assert [status for status, _ in results] == [0, 0], processes.report(results)
    processes.assert_equal_runs(broken, two)


def test_a_smaller_run_has_the_means_bitwise_and_data_over_two_processes_and_in_one(config, two):
    fewer = {number: config.parent / f"fewer{number}" for number in (1, 2)}
    for number, workdir in fewer.items():
        shutil.copytree(two, workdir)
        results = processes.run(config, workdir, *FEWER, number=number)
        assert [status for status, _ in results] == [0] * number, processes.report(results)
        assert "elastic='merge': 4 replicas become 2, replica j of 2 is the mean" in results[0][1]
    before = processes.weights(two)
    assert np.abs(before["['embed']"][0] - before["['embed']"][1]).max() > 1e-3
    for workdir in fewer.values():
        after = processes.weights(workdir)
        for name in before:
            first, second = before[name][:2], before[name][2:]
            np.testing.assert_array_equal(after[name], first + (second - first) / 2, err_msg=name)
    processes.assert_same_losses(fewer[2], fewer[1], since=40)


def test_the_files_of_all_processes_have_digests_and_damage_of_one_is_refused_by_both(config, two):
    workdir = config.parent / "damaged"
    shutil.copytree(two, workdir)
    folder = workdir / LAST
    _, *lines = (folder / "digests.txt").read_text().splitlines()
    listed = {name: (digest, int(size)) for digest, size, name in (line.split() for line in lines)}
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    assert listed.keys() == files.keys() - processes.UNLISTED
    for name in listed:
        content = files[name].read_bytes()
        assert listed[name] == (xxhash.xxh3_128_hexdigest(content), len(content))

    damaged = max((folder / "state/ocdbt.process_1/d").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    for status, output in processes.run(config, workdir, *LONGER, number=2):
        assert status == 2, output
        [line] = [line for line in output.splitlines() if line.startswith("error: ")]
        assert f"{LAST} cannot be read (state/ocdbt.process_1/d/{damaged.name} does not match its digest" in line
        assert "Traceback" not in output
