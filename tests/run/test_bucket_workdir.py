"""A workdir in a bucket: despite failures its contents are whole, and the newest whole checkpoint is found."""

import contextlib
import json
import os
import shutil
import time
from pathlib import Path

import pytest

from noloco_jax.cluster import workdir_lease
from noloco_jax.cluster.processes import OneProcess
from noloco_jax.cluster.workdir_lock import holder_of
from noloco_jax.errors import TransientError, UserError
from noloco_jax.run import bucket_reading, bucket_workdir, digests
from noloco_jax.run.bucket_reading import Contents, download_newest, read_contents, readable_workdir
from noloco_jax.run.bucket_workdir import BucketWorkdir, opened_workdir
from noloco_jax.storage import objects, retries
from noloco_jax.storage.local_copies import Address, named
from support import buckets


@pytest.fixture
def s3(servers, monkeypatch):
    """Return the S3 server and the address of a workdir there."""
    server = servers("s3")
    yield server, Address(buckets.new_bucket(server, monkeypatch))
    buckets.forget()


@pytest.fixture(params=["s3", "gs"])
def address(request, servers, monkeypatch):
    yield Address(buckets.new_bucket(servers(request.param), monkeypatch))
    buckets.forget()


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch, tmp_path):
    monkeypatch.setattr(retries, "sleep", lambda seconds: None)
    monkeypatch.setattr(workdir_lease, "_SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(bucket_workdir, "SYNC_SECONDS", 3600.0)  # no periodic sync, only explicit ones
    monkeypatch.setenv("NOLOCO_JAX_SCRATCH", str(tmp_path / "scratch"))


def opened(address: Address, **choices):
    return opened_workdir(address, OneProcess(), print, **{"from_step": None, "read_only": False, **choices})


def checkpoint(root: Path, step: int, content: bytes = b"weights") -> Path:
    """Write a checkpoint as the checkpointer leaves it before the final rename; return its folder."""
    folder = root / "checkpoints" / f"{step}.orbax-checkpoint-tmp"
    for name in ("state/d/one", "state/manifest", "run/metadata"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(f"{step} {name} ".encode() + content)
    digests.write_digests(folder)
    return folder


def publish(workdir: BucketWorkdir, *steps: int, keep: int = 2) -> None:
    """Publish checkpoints as the checkpointer does, with only the newest kept in the local copy."""
    for step in steps:
        folder = checkpoint(workdir.folder, step)
        workdir.publish(step, folder, lambda every: every[-keep:])
        for other in folder.parent.iterdir():
            if other != folder:
                shutil.rmtree(other)
        folder.rename(folder.with_name(str(step)))


def fail(server, *faults: int) -> None:
    """Make the next requests fail with these statuses; without any, end the outage."""
    server.everywhere = bool(faults)
    server.faults.clear()
    server.faults.extend(faults)


def step_of_whole_copy(address: Address, folder: Path) -> int | None:
    """Download the newest checkpoint and check that it is as it was saved; return its step."""
    step = download_newest(address, folder)
    if step is not None:
        copied = folder / "checkpoints" / str(step)
        digests.check_files(copied, digests.read_digests(copied) or {})
        assert (copied / "state/manifest").read_bytes() == f"{step} state/manifest weights".encode()
    return step


@contextlib.contextmanager
def another_machine(root: Path):
    """Use another local copy in the body, and take over the former trainer's lease without waiting."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NOLOCO_JAX_SCRATCH", str(root / "another machine"))
        patch.setattr(workdir_lease, "SILENT_SECONDS", 0.0)
        patch.setattr(workdir_lease, "_POLL_SECONDS", 0.0)
        yield


def test_a_run_downloads_files_and_checkpoints_of_the_previous_run(address, tmp_path):
    with opened(address) as workdir:
        assert (workdir.steps(), list(workdir.folder.glob("*.json*"))) == ([], [])
        (workdir.folder / "metrics.jsonl").write_text("first\n")
        publish(workdir, 4, 8, 12)
        assert workdir.steps() == [8, 12]
        (workdir.folder / "tensorboard").mkdir()
        (workdir.folder / "tensorboard/events").write_bytes(b"\0\1")
    assert not (workdir.folder / "metrics.jsonl").exists()  # the local copy is removed at the end
    with opened(address) as workdir:
        assert (workdir.folder / "metrics.jsonl").read_text() == "first\n"
        assert (workdir.folder / "tensorboard/events").read_bytes() == b"\0\1"
        assert [path.name for path in (workdir.folder / "checkpoints").iterdir()] == ["12"]
        assert workdir.steps() == [8, 12]
        assert named(workdir.folder / "metrics.jsonl") == f"{address}/metrics.jsonl"
    left = objects.list_objects(address)
    assert {name.split("/")[1] for name in left if name.startswith("checkpoints/")} == {"8", "12"}
    assert "trainer.lock" not in left


def test_a_workdir_admits_one_trainer_and_any_readers(address, tmp_path):
    with opened(address) as workdir:
        publish(workdir, 4)
        (workdir.folder / "metrics.jsonl").write_text("first\n")
        workdir.sync()
        with readable_workdir(address) as folder:
            assert (folder / "metrics.jsonl").read_text() == "first\n"
            assert (folder / "checkpoints/4/state/manifest").exists()
        with opened(address, read_only=True) as another:
            assert another.holder() is not None
        with pytest.raises(UserError, match="in use by the trainer on"), opened(address):
            pass
    assert objects.list_objects(f"{address}/checkpoints") != []


@pytest.mark.parametrize("writes", range(5))  # three files, the digests, and the contents record
def test_a_partially_uploaded_checkpoint_is_ignored(s3, tmp_path, monkeypatch, writes):
    """For any first failing write, the newest whole checkpoint is the previous one."""
    server, address = s3

    def fail_after_writes(request, done):
        passed.append(request.method == "PUT" and "trainer.lock" not in request.path and done)
        if sum(passed) >= writes:
            fail(server, *[503] * 100)

    passed = []
    monkeypatch.setattr(bucket_reading, "_AT_ONCE", 1)
    with (
        pytest.raises(TransientError),
        pytest.warns(UserWarning, match="the run continues, and the checkpoint of step 8 is uploaded"),
        opened(address) as workdir,
    ):
        publish(workdir, 4)
        server.on_request = fail_after_writes
        publish(workdir, 8)
    server.on_request = lambda request, done: None
    fail(server)
    assert (sum(passed), step_of_whole_copy(address, tmp_path / "copy")) == (writes, 4)
    with another_machine(tmp_path), opened(address) as workdir:
        assert workdir.steps() == [4]
        assert not any(name.startswith("checkpoints/8/") for name in objects.list_objects(address))
        publish(workdir, 8)
    assert step_of_whole_copy(address, tmp_path / "again") == 8


def test_a_checkpoint_is_uploaded_once_an_outage_ends(s3, tmp_path, monkeypatch):
    server, address = s3
    monkeypatch.setattr(bucket_workdir, "SYNC_SECONDS", 0.05)
    with opened(address) as workdir:
        publish(workdir, 4)
        fail(server, *[503] * 1_000_000)  # retries do not pause here
        with pytest.warns(UserWarning, match="the checkpoint of step 8"):
            publish(workdir, 8)
        assert workdir.steps() == [4]
        fail(server)
        deadline = time.monotonic() + 30
        while workdir.steps() != [4, 8]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert step_of_whole_copy(address, tmp_path / "copy") == 8
    assert not workdir.folder.joinpath("metrics.jsonl").exists()


def end_during_an_outage(server, address) -> Path:
    """End a run during an outage of the store; return its local copy."""
    with pytest.raises(TransientError), opened(address) as workdir:
        publish(workdir, 4)
        fail(server, *[503] * 1000)
        with pytest.warns(UserWarning, match="the run continues"):
            publish(workdir, 8)
        (workdir.folder / "metrics.jsonl").write_text("step 8\n")
    fail(server)
    return workdir.folder


def test_files_left_by_a_failed_final_upload_are_uploaded_at_the_next_start(s3, tmp_path, capfd):
    server, address = s3
    folder = end_during_an_outage(server, address)
    assert f"up to the checkpoint of step 8, is kept in {folder}: the same command" in capfd.readouterr().err
    assert step_of_whole_copy(address, tmp_path / "copy") == 4
    for _ in range(2):  # the first start uploads, the second finds the upload
        with opened(address) as workdir:
            assert workdir.steps() == [4, 8]
            assert (workdir.folder / "checkpoints/8/state/manifest").exists()
            assert objects.read_object(f"{address}/metrics.jsonl") == b"step 8\n"
    assert step_of_whole_copy(address, tmp_path / "again") == 8
    assert list(folder.glob("checkpoints/*")) == []


def test_a_local_copy_is_dropped_if_another_machine_has_continued_the_run(s3, tmp_path, capsys):
    server, address = s3
    end_during_an_outage(server, address)
    with another_machine(tmp_path), opened(address) as workdir:
        publish(workdir, 6)
    with opened(address) as workdir:
        assert workdir.steps() == [4, 6]
        assert (workdir.folder / "checkpoints/6").exists() and not (workdir.folder / "checkpoints/8").exists()
    assert "could not upload, up to step 8, and the workdir has gone on without it" in capsys.readouterr().out


def test_a_refused_upload_is_raised_at_the_next_check_and_keeps_the_checkpoint(s3, tmp_path):
    server, address = s3
    with pytest.raises(UserError, match="is refused"), opened(address) as workdir:
        publish(workdir, 4)
        fail(server, *[403] * 1000)
        publish(workdir, 8)
        workdir.check_not_refused()
    fail(server)
    with opened(address) as workdir:
        assert workdir.steps() == [4, 8]


def test_a_stale_listing_loses_no_file_or_checkpoint(s3, tmp_path):
    server, address = s3
    server.lags = True
    with opened(address) as workdir:
        (workdir.folder / "metrics.jsonl").write_text("first\n")
        publish(workdir, 4, 8, 12)
    assert step_of_whole_copy(address, tmp_path / "copy") == 12
    with opened(address) as workdir:
        assert (workdir.folder / "metrics.jsonl").read_text() == "first\n"
        assert workdir.steps() == [8, 12]


def test_a_checkpoint_deleted_from_the_bucket_is_ignored(address, tmp_path):
    with opened(address) as workdir:
        publish(workdir, 4, 8)
    objects.delete_folder(f"{address}/checkpoints/8")
    with opened(address) as workdir:
        assert (workdir.steps(), [path.name for path in (workdir.folder / "checkpoints").iterdir()]) == ([4], ["4"])


def test_checkpoints_copied_into_a_bucket_are_found_by_their_digests(address, tmp_path):
    for step in (4, 8):
        folder = checkpoint(tmp_path, step)
        for file in [path for path in folder.rglob("*") if path.is_file()]:
            objects.upload_file(file, f"{address}/checkpoints/{step}/{file.relative_to(folder).as_posix()}")
    objects.write_object(f"{address}/metrics.jsonl", b"first\n")
    assert read_contents(address) == Contents((4, 8), ("metrics.jsonl",))
    assert step_of_whole_copy(address, tmp_path / "copy") == 8


def test_the_lease_of_a_new_workdir_does_not_replace_the_lock_of_its_local_copy(address):
    with opened(address) as workdir:
        assert "trainer.lock" in objects.list_objects(address) and read_contents(address) == Contents()
        holder = holder_of(workdir.folder)
        assert holder is not None and holder.process == os.getpid()
    assert not (workdir.folder / "trainer.lock").exists()


def test_damaged_digests_and_contents_records_are_named(address, tmp_path):
    with opened(address) as workdir:
        publish(workdir, 4)
    objects.write_object(f"{address}/checkpoints/4/digests.txt", b"0\nnothing")
    with pytest.raises(UserError, match=f"the checkpoint {address}/checkpoints/4 is not whole"):
        download_newest(address, tmp_path)
    objects.write_object(f"{address}/contents.json", b'{"checkpoints": [4], "files": ["../../etc/passwd"]}')
    with pytest.raises(UserError, match=f"{address}/contents.json is damaged"):
        read_contents(address)


def test_files_are_replaced_when_they_change_and_deleted_when_they_are_gone(s3):
    server, address = s3
    with opened(address) as workdir:
        metrics, other = workdir.folder / "metrics.jsonl", workdir.folder / "tensorboard/other"
        other.parent.mkdir()
        metrics.write_text("first\n")
        other.write_text("other")
        workdir.sync()
        server.requests.clear()
        workdir.sync()
        assert server.requests == []  # nothing has changed
        with metrics.open("a") as file:
            file.write("second\n")
        other.unlink()
        workdir.sync()
        assert objects.read_object(f"{address}/metrics.jsonl") == b"first\nsecond\n"
        assert read_contents(address).files == ("metrics.jsonl",)
        assert "tensorboard/other" not in objects.list_objects(address)


def test_a_trainer_that_was_held_up_renews_its_lease_before_it_uploads(s3, monkeypatch):
    server, address = s3
    with opened(address) as workdir:
        (workdir.folder / "metrics.jsonl").write_text("first\n")
        monkeypatch.setattr(workdir_lease.time, "monotonic", lambda: time.time() + 1e6)  # much later
        server.requests.clear()
        workdir.sync()
        written = [request.path.rpartition("/")[2] for request in server.requests if request.method == "PUT"]
        assert written == ["trainer.lock", "metrics.jsonl", "contents.json"]


def test_a_large_file_is_replaced_less_often(s3, monkeypatch):
    monkeypatch.setattr(bucket_workdir.time, "monotonic", lambda: now)
    _, address = s3
    now = 100.0
    with opened(address) as workdir:
        metrics = workdir.folder / "metrics.jsonl"
        metrics.write_bytes(bytes(1000))
        workdir.sync(at_most=100)
        metrics.write_bytes(bytes(1001))
        now += 9.0
        workdir.sync(at_most=100)
        assert len(objects.read_object(f"{address}/metrics.jsonl")) == 1000
        now += 2.0
        workdir.sync(at_most=100)
        assert len(objects.read_object(f"{address}/metrics.jsonl")) == 1001


def test_publishing_a_checkpoint_uploads_the_metrics_up_to_it(address):
    with opened(address) as workdir:
        (workdir.folder / "metrics.jsonl").write_text("step 4\n")
        publish(workdir, 4)
        assert objects.read_object(f"{address}/metrics.jsonl") == b"step 4\n"


def test_a_checkpoint_is_set_aside_whole_despite_stale_listings(s3):
    server, address = s3
    server.lags = True
    with opened(address) as workdir:
        publish(workdir, 4, 8, keep=9)
        workdir.set_aside_after(4)
    server.lags = False
    aside = [name.removeprefix("8/") for name in objects.list_objects(f"{address}/checkpoints_set_aside")]
    assert aside == ["digests.txt", "run/metadata", "state/d/one", "state/manifest"]


def test_a_reader_without_checkpoints_requests_none(s3):
    server, address = s3
    with opened(address) as workdir:
        (workdir.folder / "metrics.jsonl").write_text("first\n")
        publish(workdir, 4)
    server.requests.clear()
    with readable_workdir(address, checkpoints="none") as folder:
        assert (folder / "metrics.jsonl").read_text() == "first\n"
        assert not (folder / "checkpoints").exists()
    assert not any("/checkpoints/" in str(request) for request in server.requests)


def test_later_checkpoints_are_set_aside_under_unique_names(address):
    for _ in range(2):
        with opened(address) as workdir:
            publish(workdir, 4, 8, 12, keep=9)
            assert (workdir.set_aside_after(4), workdir.steps()) == (2, [4])
    aside = objects.list_objects(f"{address}/checkpoints_set_aside")
    assert {name.split("/")[0] for name in aside} == {"8", "12", "8.1", "12.1"}


def test_from_step_downloads_that_checkpoint_and_the_newest(address):
    with opened(address) as workdir:
        publish(workdir, 4, 8, 12, keep=9)
    with opened(address, from_step=4) as workdir:
        assert {path.name for path in (workdir.folder / "checkpoints").iterdir()} == {"4", "12"}


def test_a_missing_bucket_or_refused_access_fails_before_anything_is_written(s3, tmp_path):
    server, address = s3
    with pytest.raises(UserError, match="there is no bucket 'nowhere'"), opened(Address("s3://nowhere/run")):
        pass
    server.everywhere = True
    server.faults.extend([403] * 9)
    with pytest.raises(UserError, match="is refused") as caught, opened(address):
        pass
    assert caught.value.exit_status == 2
    assert not any((tmp_path / "scratch").rglob("*.jsonl"))


def test_a_truncated_read_of_the_contents_record_is_retried(s3):
    server, address = s3
    with opened(address) as workdir:
        publish(workdir, 4)
    server.faults.extend(["cut", "short"])
    assert read_contents(address).checkpoints == (4,)
    assert json.loads(objects.read_object(f"{address}/contents.json"))["checkpoints"] == [4]


def test_copied_checkpoints_without_digests_are_refused_and_kept(address):
    for name in ("4/state/manifest", "8/state/manifest"):
        objects.write_object(f"{address}/checkpoints/{name}", b"of an earlier version")
    with (
        pytest.raises(UserError, match=r"checkpoints/4 has no digests.txt: .* or of an earlier version"),
        opened(address),
    ):
        pass
    assert objects.list_objects(f"{address}/checkpoints") == ["4/state/manifest", "8/state/manifest"]


def test_a_checkpoint_with_a_missing_file_is_refused_and_kept(address):
    with opened(address) as workdir:
        publish(workdir, 4, 8)
    objects.delete_object(f"{address}/checkpoints/8/state/d/one")
    with pytest.raises(UserError, match=r"checkpoints/8 is not whole \(.*state/d/one.* is missing\)"), opened(address):
        pass
    assert {name.split("/")[0] for name in objects.list_objects(f"{address}/checkpoints")} == {"4", "8"}
    objects.delete_folder(f"{address}/checkpoints/8")
    with opened(address) as workdir:
        assert workdir.steps() == [4]


def test_a_config_file_deleted_locally_stays_in_the_bucket(address):
    with opened(address) as workdir:
        (workdir.folder / "config.json").write_text("{}")
        workdir.sync()
        (workdir.folder / "config.json").unlink()
        workdir.sync()
    with opened(address) as workdir:
        assert (workdir.folder / "config.json").read_text() == "{}"
