"""Files that are there whole or not at all."""

from pathlib import Path

import pytest

from noloco_jax.files import write_whole


def test_text_is_utf_8_and_bytes_are_as_they_are(tmp_path):
    assert write_whole(tmp_path / "a", "é\n").read_bytes() == b"\xc3\xa9\n"
    assert write_whole(tmp_path / "b", b"\x00\r\n").read_bytes() == b"\x00\r\n"


def test_the_folder_is_made_and_nothing_else_is_left_in_it(tmp_path):
    path = write_whole(tmp_path / "new/folder/a.txt", "text")
    assert list((tmp_path / "new/folder").iterdir()) == [path]


def test_a_write_that_fails_leaves_the_former_file(tmp_path, monkeypatch):
    path = write_whole(tmp_path / "a.txt", "former")

    def write_a_part(self, content):
        with self.open("wb") as file:
            file.write(content[:2])
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "write_bytes", write_a_part)
    with pytest.raises(OSError, match="full"):
        write_whole(path, "later")
    assert path.read_text() == "former"
