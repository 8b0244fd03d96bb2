"""Runs over several processes that exchange between hosts while their devices train."""

import signal

import pytest

from support import processes

pytestmark = pytest.mark.timeout(900)

LATE = (
    *("--config.num_steps=24", "--config.outer.delay=3", "--config.outer.fragments=2"),
    "--config.checkpoint_every=8",
)


def test_overlapped_host_exchanges_train_and_resume_as_in_one_process(config):
    """SIGTERM to one process stops the run while corrections are pending."""
    alone = processes.trained(config, "alone", "--config.mesh.replica=1", *LATE)
    stopped = config.parent / "stopped"
    run = processes.start(config, stopped, *LATE, number=2, devices=2, seconds_per_step=0.5)
    processes.wait_until(processes.reached(stopped, 9), run)
    run[1].send_signal(signal.SIGTERM)
    results = processes.finish(run)
    assert [status for status, _ in results] == [75, 75], processes.report(results)
    results = processes.run(config, stopped, *LATE, number=2, devices=2)
    assert [status for status, _ in results] == [0, 0], processes.report(results)
    processes.assert_same_losses(stopped, alone)
    processes.assert_same_training(stopped, alone)
