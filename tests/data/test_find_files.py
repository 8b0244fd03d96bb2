"""Files of a folder and of those that links in it lead to: each is read once, and none for ever."""

import os

import pytest

from noloco_jax.config import DataConfig
from noloco_jax.data import ByteTokenizer, check_data
from noloco_jax.data.find_files import find_files
from noloco_jax.data.source import SourceOptions
from noloco_jax.data.splits import split_files
from noloco_jax.data.text import find_text_files
from support.data_makers import open_streams, write_c4


def options(path, split="train", both=True):
    return SourceOptions(
        str(path),
        "data.path",
        split,
        both,
        exclude="",
        seed=0,
        shuffle_buffer=1,
        on_bad_shard="stop",
        text_column="text",
    )


def write(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def found(folder):
    return [path.relative_to(folder).as_posix() for path in find_files(options(folder), [".txt"])]


def test_folders_that_links_lead_to_are_searched_like_others(tmp_path):
    write(tmp_path / "data", "a.txt", "in/b.txt")
    write(tmp_path / "disk", "c.txt", "deep/d.txt", ".hidden/no.txt", "__pycache__/no.txt")
    write(tmp_path / "further", "e.txt")
    (tmp_path / "data/in/link").symlink_to(tmp_path / "disk")
    (tmp_path / "disk/deep/on").symlink_to("../../further")
    (tmp_path / "data/gone").symlink_to(tmp_path / "nowhere")
    expected = ["a.txt", "in/b.txt", "in/link/c.txt", "in/link/deep/d.txt", "in/link/deep/on/e.txt"]
    assert found(tmp_path / "data") == expected


@pytest.mark.timeout(20)
def test_links_in_a_circle_end(tmp_path):
    write(tmp_path / "data", "a/a.txt", "b/b.txt")
    (tmp_path / "data/a/up").symlink_to(tmp_path / "data")
    (tmp_path / "data/a/self").symlink_to(".")
    (tmp_path / "data/a/to_b").symlink_to("../b")
    (tmp_path / "data/b/to_a").symlink_to("../a")
    (tmp_path / "data/loop").symlink_to("loop")
    assert found(tmp_path / "data") == ["a/a.txt", "b/b.txt"]


def test_a_folder_keeps_its_own_name_whatever_links_to_it_are_called(tmp_path):
    write(tmp_path / "data", "z/a.txt")
    for name in ("a", "zz"):
        (tmp_path / "data" / name).symlink_to("z")
    (tmp_path / "elsewhere/a.txt").parent.mkdir()
    (tmp_path / "elsewhere/a.txt").write_text("")
    for name in ("y", "x"):
        (tmp_path / "data" / name).symlink_to(tmp_path / "elsewhere")
    assert found(tmp_path / "data") == ["x/a.txt", "z/a.txt"]


def test_a_file_is_read_once_however_many_links_to_it_are_there(tmp_path):
    write(tmp_path, "a.txt", "blob", "copies/c.txt")
    (tmp_path / "0.txt").symlink_to("a.txt")
    (tmp_path / "b.txt").symlink_to("blob")
    (tmp_path / "bb.txt").symlink_to(tmp_path / "blob")
    os.link(tmp_path / "copies/c.txt", tmp_path / "copies/d.txt")  # a copy of the folder would have two files
    names = [os.path.relpath(path, tmp_path) for path, _ in find_text_files(options(tmp_path))]
    assert names == ["0.txt", "b.txt", "copies/c.txt", "copies/d.txt"]
    assert split_files(options(tmp_path), [".txt"])[0] == [str(tmp_path / name) for name in names]


def test_a_file_is_in_the_split_that_a_link_to_it_names(tmp_path):
    write(tmp_path, "all/0.txt", "all/1.txt", "all/2.txt")
    for split, number in (("train", 0), ("train", 1), ("validation", 2)):
        (tmp_path / split).mkdir(exist_ok=True)
        (tmp_path / split / f"{number}.txt").symlink_to(f"../all/{number}.txt")
    for split, numbers in (("train", (0, 1)), ("validation", (2,))):
        files, part = split_files(options(tmp_path, split), [".txt"])
        assert files == [str(tmp_path / split / f"{number}.txt") for number in numbers] and part == "all"


def test_c4_shards_linked_twice_are_read_once(tmp_path):
    (shard,) = write_c4(tmp_path / "data", [["one text"]])
    write_c4(tmp_path / "data", [["validation"]], "validation")
    (tmp_path / "data/c4-train.again.json.gz").symlink_to(shard)
    config = DataConfig(kind="c4", path=str(tmp_path / "data"), sequence_length=4, batch_size=1)
    check_data(config)
    (stream,) = open_streams(config, 1, ByteTokenizer())
    assert stream.source["files"] == 1
