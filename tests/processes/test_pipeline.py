"""Pipeline stages over two real processes with random routing: training as in one process on one device."""

import pytest

from support import processes

pytestmark = pytest.mark.timeout(900)

STAGES = (
    *("--config.num_replicas=2", "--config.mesh.stage=2", "--config.mesh.routing=random"),
    *("--config.num_microbatches=2", "--config.num_steps=12", "--config.checkpoint_every=12"),
    "--config.outer.sync_every=5",  # no outer step at the end: after one, the replicas differ only by rounding
)


def test_stages_over_processes_train_as_in_one_process(config):
    """Each process has one stage of every replica."""
    alone = processes.trained(config, "alone", *STAGES, "--config.mesh.replica=1")
    workdir = processes.trained(config, "two", *STAGES, "--config.mesh.replica=1", number=2)
    processes.assert_same_losses(workdir, alone)
    processes.assert_same_training(workdir, alone)
