"""Atomic writes of files, full disks, and checks of folders."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from noloco_jax.errors import TransientError, UserError
from noloco_jax.files import (
    check_checkpoint_path,
    check_writable,
    folder_of_flag,
    full_disk_reported,
    is_full_disk,
    no_room_message,
    write_whole,
)


@pytest.mark.parametrize(("content", "written"), [("é\n", b"\xc3\xa9\n"), (b"\x00\r\n", b"\x00\r\n")])
def test_text_is_written_as_utf_8_and_bytes_unchanged_to_a_new_folder(tmp_path, content, written):
    path = write_whole(tmp_path / "new/folder/a", content)
    assert path.read_bytes() == written and list((tmp_path / "new/folder").iterdir()) == [path]


def test_a_failed_write_leaves_the_former_file(tmp_path, monkeypatch):
    path = write_whole(tmp_path / "a.txt", "former")

    def write_a_part(self, content):
        with self.open("wb") as file:
            file.write(content[:2])
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "write_bytes", write_a_part)
    with pytest.raises(OSError, match="full"):
        write_whole(path, "later")
    assert path.read_text() == "former"
    assert list(tmp_path.iterdir()) == [path]


def test_a_killed_processs_temporary_file_is_removed_by_the_next_write(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "replace", lambda self, target: None)  # killed before the rename
    write_whole(tmp_path / "a.txt", "former")
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == [tmp_path / "a.txt.tmp"]
    monkeypatch.setattr(os, "getpid", lambda: 0)  # another process
    path = write_whole(tmp_path / "a.txt", "later")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_a_transient_error_that_names_the_folder(tmp_path):
    with (
        pytest.raises(TransientError, match=f"{tmp_path}: no space left on device: make room"),
        full_disk_reported(tmp_path),
        Path("/dev/full").open("w") as file,
    ):
        file.write("text")


@pytest.mark.parametrize(
    ("error", "is_full"),
    [
        (OSError(errno.EDQUOT, "used up"), True),
        (ValueError("RESOURCE_EXHAUSTED: No space left on device [28]"), True),
        (OSError(errno.EIO, "Input/output error"), False),
    ],
)
def test_a_full_disk_is_recognized_by_number_or_words(error, is_full):
    assert is_full_disk(error) == is_full


def test_errors_other_than_a_full_disk_are_unchanged(tmp_path):
    with pytest.raises(FileNotFoundError), full_disk_reported(tmp_path):
        (tmp_path / "absent").read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no folder"),
        *((address, "is an address") for address in ("gs://bucket/run", "s3://b/run", "hf+http://there", "gs:/bucket")),
        ("~nobody_of_this_name/run", "there is no user of this name here"),
    ],
)
def test_a_flag_that_names_no_folder_is_refused(text, message):
    with pytest.raises(UserError, match=message):
        folder_of_flag(text)


def test_a_folder_may_be_named_from_home(monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    assert [str(folder_of_flag(text)) for text in ("~/run", "runs/a:b", "/c")] == ["/somewhere/run", "runs/a:b", "/c"]


def test_an_existing_or_creatable_folder_is_writable(tmp_path):
    for folder in (tmp_path, tmp_path / "new" / "deeper"):
        check_writable(folder)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["file", "file/below", "link"])
def test_a_folder_with_a_file_in_the_way_is_refused(tmp_path, name):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=f"cannot be a folder: .*/{name.split('/')[0]} is in the way"):
        check_writable(tmp_path / name)


def test_a_folder_without_permission_is_refused(tmp_path, monkeypatch):
    def refuse(path, mode=0):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "mkdir", refuse)  # root has every permission
    with pytest.raises(UserError, match=rf"{tmp_path} takes no new folder \(Permission denied\)"):
        check_writable(tmp_path / "run")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_a_folder_in_which_none_can_be_made_is_refused_whatever_its_permissions_say():
    for folder in ("/proc/x", "/proc/self/x/y"):
        with pytest.raises(UserError, match=f"{folder} cannot be written: /proc.* takes no new folder"):
            check_writable(Path(folder))


def test_a_disk_without_room_for_a_checkpoint_is_told_with_both_sizes(tmp_path, monkeypatch):
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**40, 2**40 - 2**20, 2**20))
    assert no_room_message(tmp_path / "run", 2**20) == ""
    told = no_room_message(tmp_path / "run", 3 * 2**20)
    assert told.startswith(f"{tmp_path / 'run'}: a checkpoint takes about 3 MiB, and 1 MiB are free: make room")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 0))
    assert no_room_message(tmp_path / "run", 2**50) == ""


@pytest.mark.parametrize("name", ["lr=[1e-3]/run", "back\\slash", "a]"])
def test_a_path_from_which_checkpoints_could_not_be_read_is_refused(name):
    with pytest.raises(UserError, match=r"could not be read again .*: give another folder"):
        check_checkpoint_path(Path(name))
    check_checkpoint_path(Path("with spaces, é, #, ?, * and {x}"))
