"""Objects in buckets: whole writes, consistent reads, and retries of transient faults."""

import json
import tempfile

import pytest

from noloco_jax.errors import TransientError, UserError
from noloco_jax.storage import addresses, objects, retries
from noloco_jax.storage.local_copies import readable_folder
from support import buckets
from support.disks import small_disk

SCHEMES = ("s3", "gs")


@pytest.fixture(params=SCHEMES)
def folder(request, servers, monkeypatch):
    yield buckets.new_bucket(servers(request.param), monkeypatch)
    buckets.forget()


@pytest.fixture
def s3(servers, monkeypatch):
    """Return the S3 server and the address of a folder there."""
    server = servers("s3")
    yield server, buckets.new_bucket(server, monkeypatch)
    buckets.forget()


@pytest.fixture(autouse=True)
def naps(monkeypatch):
    """Record the seconds between attempts instead of waiting."""
    waited = []
    monkeypatch.setattr(retries, "sleep", waited.append)
    return waited


def test_objects_are_written_read_listed_copied_and_deleted(folder):
    for name, content in (("a", b"first"), ("b/c", b"second"), ("b/empty", b"")):
        objects.write_object(f"{folder}/{name}", content)
        assert objects.read_object(f"{folder}/{name}") == content
    objects.write_object(f"{folder}/a", b"another, longer one")
    assert objects.read_object(f"{folder}/a") == b"another, longer one"
    objects.copy_object(f"{folder}/a", f"{folder}/d/a")
    assert objects.list_objects(folder) == ["a", "b/c", "b/empty", "d/a"]
    objects.delete_folder(f"{folder}/b")
    objects.delete_object(f"{folder}/a")
    objects.delete_object(f"{folder}/a")  # already deleted
    assert objects.list_objects(folder) == ["d/a"]
    with pytest.raises(FileNotFoundError):
        objects.read_object(f"{folder}/a")
    assert objects.list_objects(f"{folder}/nothing") == []


def test_a_multipart_file_round_trips_bitwise(folder, tmp_path):
    content = bytes(range(256)) * (100 << 10)  # 25 MiB
    (tmp_path / "file").write_bytes(content)
    objects.upload_file(tmp_path / "file", f"{folder}/file")
    objects.download_file(f"{folder}/file", tmp_path / "new/copy")
    assert (tmp_path / "new/copy").read_bytes() == content


@pytest.mark.parametrize("fault", [503, "cut", "short"])
def test_a_failing_read_is_retried(s3, naps, tmp_path, fault):
    server, folder = s3
    content = bytes(range(200)) * 1000
    objects.write_object(f"{folder}/a", content)
    server.faults.extend([fault, fault])
    objects.download_file(f"{folder}/a", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == content
    assert naps[0] == addresses.RETRY_DELAYS[0]


def test_a_failing_write_is_retried(s3, naps):
    server, folder = s3
    server.everywhere = True
    server.faults.extend([503, 500])
    objects.write_object(f"{folder}/a", b"content")
    assert (objects.read_object(f"{folder}/a"), naps) == (b"content", [*addresses.RETRY_DELAYS[:2]])


def test_an_upload_lost_by_the_server_is_restarted(folder, naps, monkeypatch, tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    opened, lost = objects.file_system(folder), ["Permanent error in UploadChunk: Status(NOT_FOUND: no upload)"] * 2

    def lose_the_upload(path: str):
        if lost:
            raise OSError(lost.pop())
        return opened

    monkeypatch.setattr(objects, "file_system", lose_the_upload)
    objects.upload_file(tmp_path / "file", f"{folder}/a")
    assert (objects.read_object(f"{folder}/a"), naps) == (b"content", [*addresses.RETRY_DELAYS[:2]])


def test_a_persistent_server_error_is_transient_once_retries_are_exhausted(s3):
    server, folder = s3
    server.everywhere = True
    server.faults.extend([503] * 100)
    with pytest.raises(TransientError, match=f"{folder}/a cannot be written .*503.* not even after 31.5 seconds"):
        objects.write_object(f"{folder}/a", b"content")


@pytest.mark.parametrize("act", [objects.check_writable, objects.check_bucket])
def test_refused_credentials_are_a_user_error(s3, act):
    server, folder = s3
    server.everywhere = True
    server.faults.extend([403] * 10)
    with pytest.raises(UserError, match=r"is refused .*AWS_ACCESS_KEY_ID") as caught:
        act(folder)
    assert caught.value.exit_status == 2


def test_a_missing_bucket_is_named(folder):
    objects.check_bucket(folder)
    scheme = folder.partition("://")[0]
    with pytest.raises(UserError, match="there is no bucket 'nowhere'") as caught:
        objects.check_bucket(f"{scheme}://nowhere/run")
    assert caught.value.exit_status == 2
    with pytest.raises(UserError, match="names no bucket"):
        objects.check_bucket(f"{scheme}:///run")


def test_an_object_replaced_during_a_read_is_read_whole(folder, monkeypatch):
    objects.write_object(f"{folder}/a", b'{"short": 1}')
    longer = {"longer": list(range(50))}
    read_part = objects._read_part

    def replace_then_read(opened, path, start, size):
        monkeypatch.setattr(objects, "_read_part", read_part)
        objects.write_object(path, json.dumps(longer).encode())
        return read_part(opened, path, start, size)

    monkeypatch.setattr(objects, "_read_part", replace_then_read)
    assert objects.read_json(f"{folder}/a") == longer
    objects.write_object(f"{folder}/a", b"{")
    with pytest.raises(ValueError):
        objects.read_json(f"{folder}/a")


def test_a_download_restarts_if_the_object_is_replaced_between_attempts(s3, naps, tmp_path):
    server, folder = s3
    objects.write_object(f"{folder}/a", bytes(1000))

    def replace_after_a_failure(request, done):
        if done and request.method == "GET" and not server.faults:
            server.on_request = lambda request, done: None
            objects.write_object(f"{folder}/a", b"another" * 100)

    server.faults.append(503)
    server.on_request = replace_after_a_failure
    objects.download_file(f"{folder}/a", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"another" * 100


@pytest.mark.parametrize("write", ["file", "folder"])
def test_a_full_disk_during_a_download_is_a_transient_error(folder, write):
    objects.write_object(f"{folder}/a.json", bytes(100_000))
    with small_disk(50) as disk, pytest.raises(TransientError, match="no space left on device: make room"):
        if write == "file":
            objects.download_file(f"{folder}/a.json", disk.folder / "below/a")
        else:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(tempfile, "tempdir", str(disk.folder))
                with readable_folder(folder, (".json",)):
                    pass
