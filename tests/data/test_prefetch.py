"""Worker processes: as many as asked for, whatever ends them, with the batches of a single thread."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from noloco_jax.config import DataConfig
from noloco_jax.data import RunData, documents
from noloco_jax.data.documents import WorkerLostError
from noloco_jax.errors import TransientError
from support.data_makers import CountingTokenizer, open_streams, write_mixture, write_rows

# Prints the process id of a started stream's worker and waits to be killed.
READ_WITH_A_WORKER = """
import multiprocessing, sys, time
from noloco_jax.config import DataConfig
from noloco_jax.data import RunData
from support.data_makers import CountingTokenizer

if __name__ == "__main__":
    path = sys.argv[1]
    config = DataConfig(kind="jsonl", path=path, validation_path="elsewhere", sequence_length=4, num_workers=1)
    streams = RunData(config, seed=0).streams(CountingTokenizer(), {0: 0}, 1)
    streams.start()
    while not (workers := multiprocessing.active_children()):
        time.sleep(0.1)
    print(workers[0].pid, flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def many_documents(tmp_path_factory):
    """More documents than workers have made when their stream begins."""
    path = tmp_path_factory.mktemp("data") / "many.jsonl"
    path.write_text("".join(json.dumps({"text": f"{60 * k} 60"}) + "\n" for k in range(20_000)))
    return DataConfig(kind="jsonl", path=str(path), validation_path="elsewhere", sequence_length=64, batch_size=64)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_replicas_and_sources_share_as_many_processes_as_num_workers_says(tmp_path, num_workers):
    config, _ = write_mixture(tmp_path)  # four sources
    config = replace(config, num_workers=num_workers)
    before = {*multiprocessing.active_children()}
    with closing(RunData(config, seed=0).streams(CountingTokenizer(), {k: k for k in range(3)}, 3)) as helped:
        with closing(RunData(replace(config, num_workers=0), seed=0).streams(CountingTokenizer(), {2: 2}, 3)) as alone:
            for _ in range(30):
                np.testing.assert_array_equal(next(helped)[2]["input_ids"], next(alone)[2]["input_ids"])
        assert 1 <= len({*multiprocessing.active_children()} - before) <= num_workers
    assert not {*multiprocessing.active_children()} - before


def test_tokens_are_read_without_a_process(tmp_path):
    write_rows(tmp_path / "0.parquet", {"input_ids": [[k, k + 1] for k in range(99)], "label": [[1, 2]] * 99})
    config = DataConfig(kind="parquet", path=str(tmp_path), sequence_length=2, batch_size=1, num_workers=2)
    before = {*multiprocessing.active_children()}
    (stream,) = open_streams(config, 1)
    next(stream)
    assert {*multiprocessing.active_children()} == before


def test_a_worker_starts_with_its_stream_and_ends_when_the_trainer_is_killed(many_documents, tmp_path):
    """The worker of a killed trainer gets no signal, and would keep its memory forever."""
    script = tmp_path / "read.py"
    script.write_text(READ_WITH_A_WORKER)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    reading = subprocess.Popen(
        [sys.executable, script, many_documents.path], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert reading.stdout is not None
    with reading:
        worker = int(reading.stdout.readline())
        reading.kill()
    give_up = time.monotonic() + 300
    while is_running(worker):
        assert time.monotonic() < give_up
        time.sleep(0.1)


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
    assert len(lines) == 2
    assert all("was ended, as where memory is short: reading begins anew" in line for line in lines)


def test_a_worker_that_ends_twice_for_one_batch_ends_the_run(many_documents, monkeypatch):
    (stream,), (alone,) = open_streams(many_documents, 1), open_streams(many_documents, 1)

    def lost(*arguments):
        raise WorkerLostError("a process that reads data was ended")

    with monkeypatch.context() as patched, pytest.raises(TransientError, match="reads data was ended"):
        patched.setattr(documents, "load_documents", lost)
        next(stream)
    assert (next(stream)["input_ids"] == next(alone)["input_ids"]).all()


def test_a_program_that_leaves_its_stream_open_ends_with_its_worker(many_documents, tmp_path):
    script = tmp_path / "leave.py"
    script.write_text(READ_WITH_A_WORKER.replace("time.sleep(600)", "sys.exit(3)"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    leaving = subprocess.run(
        [sys.executable, script, many_documents.path], env=environment, capture_output=True, text=True
    )
    assert leaving.returncode == 3 and "Traceback" not in leaving.stderr
    assert not is_running(int(leaving.stdout))


def test_streams_close_while_their_workers_are_busy(many_documents):
    streams = RunData(replace(many_documents, num_workers=2), seed=0).streams(CountingTokenizer(), {0: 0, 1: 1}, 2)
    streams.start()
    closing_thread = threading.Thread(target=streams.close)
    closing_thread.start()
    closing_thread.join(300)
    assert not closing_thread.is_alive()


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # ProcessLookupError: ended while the file is open
        return False
