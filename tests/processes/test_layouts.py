"""Layouts over two real processes: stages with random routing, exchanges over the hosts, a replica that spans both."""

import gzip
import signal
from pathlib import Path

import pytest

from support import processes
from support.data_makers import write_c4
from support.texts import lines_of_words

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


LATE = (
    *("--config.num_steps=24", "--config.outer.delay=3", "--config.outer.fragments=2"),
    "--config.checkpoint_every=8",
)


def test_overlapped_host_exchanges_train_and_resume_as_in_one_process(config):
    """SIGTERM to one process stops the run while corrections are pending."""
    alone = processes.trained(config, "not_late", "--config.mesh.replica=1", *LATE)
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


FIELDS = {
    "method": "ddp",
    "num_replicas": 1,
    "mesh.fsdp": 2,
    "num_steps": 6,
    "checkpoint_every": 6,
    "eval_every": 0,
    "data.kind": "jsonl",
    "data.path": "c4",  # relative to the working directory of a process
    "data.validation_path": "",
}
ARGUMENTS = [f"--config.{name}={value}" for name, value in FIELDS.items()]


def shards(folder: Path) -> list[Path]:
    """Write training and validation shards; return the training shards."""
    texts = lines_of_words(240)
    write_c4(folder / "c4", [texts[:20]], "validation")
    return write_c4(folder / "c4", [texts[20:130], texts[130:]])


def test_one_process_reads_for_a_replica_over_two_and_weights_match_bitwise(config, tmp_path):
    """The second process cannot read: all its documents but the first, which is read in advance, are damaged."""
    whole, damaged = tmp_path / "whole", tmp_path / "damaged"
    shards(whole)
    for file in shards(damaged):
        first, *others = gzip.decompress(file.read_bytes()).splitlines(keepends=True)
        file.write_bytes(gzip.compress(first + b"no document\n" * len(others)))
    alone = processes.trained(config, "reads_itself", *ARGUMENTS, devices=2, folders=[whole])
    over_two = processes.trained(config, "over_two", *ARGUMENTS, number=2, folders=[whole, damaged])
    processes.assert_equal_runs(over_two, alone)
