"""Workers: alternating, they make the chunks of a single worker, and divide the reading where the format allows."""

import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from noloco_jax.config import DataConfig
from noloco_jax.data import parquet, prefetch, redistribute
from noloco_jax.data.from_config import open_source
from noloco_jax.data.positions import DataPosition, start_position
from noloco_jax.data.prefetch import ReplicaDocuments, chunks
from noloco_jax.data.reading import WorkerLostError
from noloco_jax.errors import TransientError
from support.data_makers import CountingTokenizer, open_streams, write_counting, write_rows

KINDS = ["c4", "jsonl", "parquet", "text"]
# Prints the process id of a started stream's worker and waits to be killed.
READ_WITH_A_WORKER = """
import multiprocessing, sys, time
from noloco_jax.config import DataConfig
from support.data_makers import open_streams

if __name__ == "__main__":
    path = sys.argv[1]
    config = DataConfig(kind="jsonl", path=path, validation_path="elsewhere", sequence_length=4, num_workers=1)
    (stream,) = open_streams(config, 1)
    stream.start()
    while not (workers := multiprocessing.active_children()):
        time.sleep(0.1)
    print(workers[0].pid, flush=True)
    time.sleep(600)
"""


def documents_of(config, replica=0, num_replicas=1):
    source = open_source(config, CountingTokenizer(), validation=False, seed=0, vocab_size=None)
    return ReplicaDocuments(source, replica, num_replicas)


def in_turns(documents, position, num_workers):
    """Yield the chunks of several workers, switching to the next worker after a chunk that ends a turn."""
    workers = [chunks(documents, position, worker, num_workers) for worker in range(num_workers)]
    for worker in itertools.cycle(workers):
        while not (chunk := next(worker))["ends_turn"]:
            yield chunk
        yield chunk


def positions_and_tokens(made, count):
    """Return positions and tokens of the first `count` documents."""
    found = []
    for chunk in made:
        tokens = np.split(chunk["tokens"], chunk["ends"][:-1], axis=1)
        found += zip(chunk["positions"].positions, (array.tolist() for array in tokens), strict=True)
        if len(found) >= count:
            return found[:count]


@pytest.mark.parametrize("kind", KINDS)
def test_alternating_workers_make_the_chunks_of_a_single_worker(tmp_path, kind):
    config, _ = write_counting(kind, tmp_path / "data", 150)
    (stream,) = open_streams(config, 1)
    for _ in range(37):
        next(stream)
    state = json.loads(json.dumps(stream.get_state()))
    starts = [DataPosition.from_json(one) for one in (state, *redistribute([state], 3))]
    for position in [start_position(0, 1), *starts]:
        documents = documents_of(config)
        alone = positions_and_tokens(in_turns(documents, position, 1), 200)  # into the next epoch
        for num_workers in (2, 3):
            assert positions_and_tokens(in_turns(documents, position, num_workers), 200) == alone, num_workers


@pytest.mark.parametrize("row_group_size", [3, 8, 25])
def test_workers_share_out_the_row_groups_of_tokens(tmp_path, monkeypatch, row_group_size):
    rows = [[k, k + 1] for k in range(1000)]
    labels = [[k + 1, k + 2] for k in range(1000)]
    write_rows(tmp_path / "0.parquet", {"input_ids": rows, "label": labels}, row_group_size)
    config = DataConfig(
        kind="parquet", path=str(tmp_path), validation_path="elsewhere", sequence_length=2, shuffle_buffer=8
    )
    read_batches, num_read = parquet.read_batches, 0

    def counting(path, groups, columns):
        nonlocal num_read
        for group in groups:
            for batch in read_batches(path, range(group, group + 1), columns):
                num_read += batch.num_rows
                yield batch

    monkeypatch.setattr(parquet, "read_batches", counting)
    documents, position = documents_of(config), start_position(0, 1)
    for worker in range(5):
        for chunk in chunks(documents, position, worker, 5):
            if chunk["positions"].positions[-1].epoch:
                break
    assert 1000 <= num_read < 2000  # five workers that read everything would have read 5000 rows


def test_a_worker_starts_with_its_stream_and_ends_when_the_trainer_is_killed(tmp_path):
    """The worker of a killed trainer gets no signal, and would keep its memory forever."""
    config, _ = write_counting("jsonl", tmp_path / "data", 150)
    script = tmp_path / "read.py"
    script.write_text(READ_WITH_A_WORKER)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    reading = subprocess.Popen(
        [sys.executable, script, config.path], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert reading.stdout is not None
    with reading:
        worker = int(reading.stdout.readline())
        reading.kill()
    give_up = time.monotonic() + 30
    while is_running(worker):
        assert time.monotonic() < give_up
        time.sleep(0.1)


@pytest.fixture(scope="module")
def many_documents(tmp_path_factory):
    """More documents than workers have made when their stream begins."""
    path = tmp_path_factory.mktemp("data") / "many.jsonl"
    path.write_text("".join(json.dumps({"text": f"{60 * k} 60"}) + "\n" for k in range(20_000)))
    return DataConfig(kind="jsonl", path=str(path), validation_path="elsewhere", sequence_length=64, batch_size=64)


def test_batches_continue_where_a_worker_gets_a_signal(many_documents, capfd):
    """Ctrl-C comes to all processes of a terminal, SIGTERM to all of Slurm's, SIGKILL where memory is short."""
    (alone,), (helped,) = open_streams(many_documents, 1), open_streams(replace(many_documents, num_workers=1), 1)
    others = {*multiprocessing.active_children()}
    sent = {1: signal.SIGINT, 2: signal.SIGHUP, 20: signal.SIGTERM, 40: signal.SIGKILL}
    with closing(helped):
        for step in range(60):
            if step in sent:
                (worker,) = {*multiprocessing.active_children()} - others
                assert worker.pid is not None
                os.kill(worker.pid, sent[step])
            assert (next(helped)["input_ids"] == next(alone)["input_ids"]).all()
    lines = [line for line in capfd.readouterr().err.splitlines() if "resource_tracker" not in line]
    for line, name in zip(lines, ("SIGTERM", "SIGKILL"), strict=True):
        assert f"was ended by {name}, as where memory is short: reading begins anew after the last batch" in line


def test_a_worker_that_ends_twice_for_one_batch_ends_the_run(many_documents, monkeypatch):
    (stream,), (alone,) = open_streams(many_documents, 1), open_streams(many_documents, 1)

    def lost(*arguments):
        raise WorkerLostError("a process that reads data was ended")
        yield

    with monkeypatch.context() as patched, pytest.raises(TransientError, match="reads data was ended"):
        patched.setattr(prefetch, "chunks", lost)
        next(stream)
    assert (next(stream)["input_ids"] == next(alone)["input_ids"]).all()


def test_a_program_that_leaves_its_stream_open_ends_with_its_worker(many_documents, tmp_path):
    script = tmp_path / "leave.py"
    script.write_text(READ_WITH_A_WORKER.replace("time.sleep(600)", "sys.exit(3)"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    leaving = subprocess.run(
        [sys.executable, script, many_documents.path], env=environment, stdout=subprocess.PIPE, text=True, timeout=120
    )
    assert leaving.returncode == 3
    assert not is_running(int(leaving.stdout))


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # ProcessLookupError: ended while the file is open
        return False
