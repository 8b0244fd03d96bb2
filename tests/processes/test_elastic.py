"""Resuming a checkpoint of two real processes with fewer replicas, over two processes and in one."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from support import processes

pytestmark = pytest.mark.timeout(900)

# Steps too small to change a weight, and no outer step: the final checkpoint holds the restored weights.
STILL = ("--config.inner.lr=1e-30", "--config.inner.min_lr=0", "--config.outer.sync_every=100")
FEWER = ("--config.num_replicas=2", "--config.elastic=keep", "--config.num_steps=12")


@pytest.fixture(scope="module")
def four(config) -> Path:
    """Return the workdir of four replicas over two processes, saved at step 8."""
    return processes.trained(config, "four", "--config.num_steps=8", number=2)


@pytest.fixture(scope="module")
def alone(config, four) -> Path:
    """Return the workdir of a resume with two of the replicas, in one process."""
    shutil.copytree(four, config.parent / "alone")
    return processes.trained(config, "alone", *FEWER, *STILL)


@pytest.fixture(scope="module")
def over_two(config, four) -> Path:
    """Return the workdir of a resume with two of the replicas, one per process."""
    workdir = config.parent / "over_two"
    shutil.copytree(four, workdir)
    results = processes.run(config, workdir, *FEWER, *STILL, number=2)
    assert [status for status, _ in results] == [0, 0], processes.report(results)
    assert "elastic='keep': 4 replicas become 2, replicas 0 to 1 stay" in results[0][1]
    return workdir


@pytest.mark.parametrize("layout", ["alone", "over_two"])
def test_kept_replicas_are_restored_bitwise(four, layout, request):
    before, after = processes.weights(four), processes.weights(request.getfixturevalue(layout))
    assert np.abs(before["['embed']"][0] - before["['embed']"][1]).max() > 1e-3
    for name in before:
        np.testing.assert_array_equal(after[name], before[name][:2], err_msg=name)


def test_data_are_distributed_alike_over_two_processes_and_in_one(alone, over_two):
    processes.assert_same_losses(over_two, alone, since=8)
