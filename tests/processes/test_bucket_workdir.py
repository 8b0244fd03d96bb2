"""Processes that train on a workdir in a bucket: killed at any write, a run ends as an undisturbed one."""

import itertools
import os
import random
import re
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from noloco_jax.export import command as export
from noloco_jax.generate import command as generate
from noloco_jax.run import digests
from noloco_jax.run.bucket_reading import download_checkpoint, read_contents, readable_workdir
from noloco_jax.storage import objects
from noloco_jax.storage.local_copies import Address
from support import buckets, processes
from support.stores import S3, Request

NUM_STEPS = 24
ARGUMENTS = [
    *(f"--config.num_steps={NUM_STEPS}", "--config.model.num_layers=1", "--config.eval_batches=1"),
    *("--config.checkpoint_every=3", "--config.keep_checkpoints=2", "--config.eval_every=6"),
]
USUAL_KILLS = 2
MOST_WRITES, MOST_SECONDS = 180, 9.0  # of an uninterrupted start
# Kinds of writes and deletions at which a process is killed: the first pattern that matches the request.
WRITES = {
    "lease": r"trainer\.lock",
    "record": r"contents\.json",
    "digests": r"checkpoints/\d+/digests\.txt",
    "checkpoint": r"checkpoints/\d+/",
    "pruning": r"^\S+ delete",
    "metrics": r"metrics\.jsonl",
    "other files": r"",
}


@pytest.fixture
def s3(servers, monkeypatch, tmp_path):
    """Return the S3 server and the address of a folder there, with scratch space for this test only."""
    server = servers("s3")
    monkeypatch.setenv("NOLOCO_JAX_SCRATCH", str(tmp_path / "scratch"))
    yield server, buckets.new_bucket(server, monkeypatch)
    server.on_request = lambda request, done: None
    buckets.forget()


@pytest.fixture(scope="module")
def whole(config) -> Path:
    """Return the workdir of the undisturbed run on a local disk."""
    return processes.trained(config, "whole", *ARGUMENTS)


def start(config: Path, address: str, *arguments: str, number: int = 1) -> list[subprocess.Popen[str]]:
    return processes.start(config, address, *ARGUMENTS, *arguments, number=number)


@pytest.mark.timeout(0)
def test_a_run_killed_at_any_bucket_write_matches_the_undisturbed_run_bitwise(config, whole, s3, request, capsys):
    """Weights and metrics equal those of the run on disk, and every checkpoint present after a kill is whole."""
    server, folder = s3
    count = request.config.getoption("--kills") if request.config.getoption("--slow") else USUAL_KILLS
    rng, kills = random.Random(request.config.getoption("--kills_seed")), Counter()
    for number in itertools.count():
        address, newest = Address(f"{folder}/{number}"), 0
        while (kind := start_and_kill(server, config, address, rng)) is not None:
            kills[kind] += 1
            newest, before = check_whole(address), newest
            assert newest >= before, f"the checkpoint of step {before} is lost"
        check_equal(address, whole)
        with capsys.disabled():
            print(f"\n{number + 1} runs, {kills.total()} kills:", dict(kills), flush=True)
        if kills.total() >= count:
            return


def test_a_stop_saves_to_a_gcs_bucket_and_the_same_command_resumes_bitwise(
    config, whole, servers, monkeypatch, tmp_path
):
    monkeypatch.setenv("NOLOCO_JAX_SCRATCH", str(tmp_path / "scratch"))
    address = Address(buckets.new_bucket(servers("gs"), monkeypatch))
    (running,) = start(config, address)
    assert processes.wait_until(lambda: len(read_contents(address).checkpoints) > 0, [running])
    running.send_signal(signal.SIGTERM)
    ((status, output),) = processes.finish([running])
    assert (status, "everything is saved" in output) == (75, True), output
    newest = check_whole(address)
    ((status, output),) = processes.finish(start(config, address))
    assert (status, f"resuming from the checkpoint of step {newest}" in output) == (0, True), output
    check_equal(address, whole)
    buckets.forget()


def start_and_kill(server: S3, config: Path, address: Address, rng: random.Random) -> str | None:
    """Start the run and kill it at a write or after a time; return the kind of write, or None if it completed."""
    at, before_it = rng.randrange(1, MOST_WRITES), rng.random() < 0.5
    seconds = rng.uniform(1.0, MOST_SECONDS) if rng.random() < 0.2 else None
    writes, kind = 0, "time"

    def kill_at_write(request: Request, done: bool) -> None:
        nonlocal writes, kind
        if request.method in ("PUT", "POST", "DELETE") and done != before_it:
            writes += 1
            if writes == at and seconds is None:
                described = f"{request.path} {request.query}"
                kind = next(name for name, pattern in WRITES.items() if re.search(pattern, described))
                os.kill(running.pid, signal.SIGKILL)

    (running,) = start(config, address)
    server.on_request = kill_at_write
    try:
        if seconds is not None:
            time.sleep(seconds)
            running.kill()
        output, _ = running.communicate(timeout=processes.PATIENCE)
    finally:
        processes.kill([running])
        server.on_request = lambda request, done: None
    assert running.returncode in (0, -signal.SIGKILL), output
    return None if running.returncode == 0 else kind


def check_whole(address: Address) -> int:
    """Check that each listed checkpoint is whole and has all metrics up to it; return the newest step, or 0."""
    contents = read_contents(address)
    for step in contents.checkpoints:
        with readable_workdir(address) as folder:
            assert download_checkpoint(address, step, folder), f"the checkpoint of step {step} is listed and missing"
            copied = folder / "checkpoints" / str(step)
            digests.check_files(copied, digests.read_digests(copied) or {})
            steps = {line["step"] for line in processes.metrics(folder) if line["kind"] == "train"}
            assert steps >= set(range(1, step + 1))
    return max(contents.checkpoints, default=0)


def check_equal(address: Address, whole: Path) -> None:
    with readable_workdir(address) as folder:
        mine, theirs = processes.weights(folder), processes.weights(whole)
        assert mine.keys() == theirs.keys()
        for name in theirs:
            np.testing.assert_array_equal(mine[name], theirs[name], err_msg=name)
        assert processes.metrics(folder) == processes.metrics(whole)


def test_checkpoints_of_two_processes_are_whole_in_the_bucket(config, whole, s3):
    """Two processes on one machine share the local copy and each writes its part of a checkpoint to it."""
    _, address = s3
    arguments = [*ARGUMENTS, "--config.checkpoint_every=8"]
    results = processes.run(config, address, *arguments, number=2)
    assert [status for status, _ in results] == [0, 0], processes.report(results)
    assert check_whole(Address(address)) == NUM_STEPS
    assert "metrics.1.jsonl" in read_contents(Address(address)).files
    with readable_workdir(Address(address)) as folder:
        processes.assert_same_training(folder, whole)


def fail_from_the_second_checkpoint(server: S3, fault: int, count: int) -> None:
    def fail(request: Request, done: bool) -> None:
        if "/checkpoints/6/" in request.path:
            server.on_request = lambda request, done: None
            server.everywhere = True
            server.faults.extend([fault] * count)

    server.on_request = fail


def test_expired_credentials_end_the_run_and_a_restart_loses_no_step(config, whole, s3):
    server, address = s3
    fail_from_the_second_checkpoint(server, 400, 1000)
    ((status, output),) = processes.finish(start(config, address))
    server.faults.clear()
    assert status == 2, output
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "is refused" in errors[0] and "Traceback" not in output, output
    assert re.search(r"up to the checkpoint of step (9|1\d|2\d), is kept in \S+: the same command", output), output
    assert check_whole(Address(address)) == 3
    ((status, output),) = processes.finish(start(config, address))
    assert (status, "resuming from the checkpoint of step 3\n" in output) == (0, False), output
    check_equal(Address(address), whole)


@pytest.mark.slow  # a minute of retries
def test_a_run_outlasts_an_outage(config, whole, s3):
    server, address = s3
    fail_from_the_second_checkpoint(server, 503, 80)
    ((status, output),) = processes.finish(start(config, address))
    assert (status, "the run continues, and the checkpoint of step" in output) == (0, True), output
    check_equal(Address(address), whole)


def test_a_missing_bucket_is_refused(config, s3):
    ((status, output),) = processes.finish(start(config, "s3://nowhere/run"))
    assert status == 2
    assert "error: s3://nowhere/run: there is no bucket 'nowhere'" in output


def test_commands_give_the_same_results_in_a_bucket_as_on_a_disk(config, s3, tmp_path, capsys):
    """Covers `export`, `generate`, `--init_from` and a dry run, with a run copied to a bucket."""
    _, folder = s3
    steps = 2
    llama = [*ARGUMENTS, "--config.model.kind=llama", f"--config.num_steps={steps}", "--config.inner.warmup_steps=1"]
    whole = processes.trained(config, "llama", *llama)
    address = f"{folder}/copied"
    for file in sorted(path for path in whole.rglob("*") if path.is_file()):
        objects.upload_file(file, f"{address}/{file.relative_to(whole).as_posix()}")
    export.main([f"--workdir={whole}", f"--out={tmp_path / 'model'}"])
    export.main([f"--workdir={address}", f"--out={folder}/model"])
    assert f"written: {folder}/model" in capsys.readouterr().out
    files = sorted(path.name for path in (tmp_path / "model").iterdir())
    assert objects.list_objects(f"{folder}/model") == files
    for name in files:
        assert objects.read_object(f"{folder}/model/{name}") == (tmp_path / "model" / name).read_bytes()

    generated = []
    for source in (f"--workdir={whole}", f"--workdir={address}", f"--model={folder}/model"):
        more = ["--tokenizer=byte"] if "model" in source else []
        generate.main([source, "--prompt=the ", "--max_new_tokens=8", *more])
        generated.append(capsys.readouterr().out)
    assert generated[0] == generated[1] == generated[2]

    arguments = [*llama, f"--config.init_from={folder}/model", "--dry_run"]
    ((status, output),) = processes.run(config, tmp_path / "new", *arguments)
    assert status == 0, output
    ((status, output),) = processes.run(config, address, *llama, "--dry_run")
    assert (status, f"the checkpoint of step {steps} is as it was saved" in output) == (0, True), output
