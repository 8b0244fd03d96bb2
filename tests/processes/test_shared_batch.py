"""A replica over two real processes, of which one reads the data for both."""

import gzip
from pathlib import Path

import pytest

from support import processes
from support.data_makers import write_c4
from support.texts import lines_of_words

pytestmark = pytest.mark.timeout(900)

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
    alone = processes.trained(config, "alone", *ARGUMENTS, devices=2, folders=[whole])
    over_two = processes.trained(config, "over_two", *ARGUMENTS, number=2, folders=[whole, damaged])
    processes.assert_equal_runs(over_two, alone)
