"""Files of a folder and its links: each is read once, link cycles end, and file names give the split."""

import os
from pathlib import Path

import numpy as np
import pytest

from noloco_jax.data.find_files import HoldOut, find_files, split_files, split_in_name
from noloco_jax.data.text import find_text_files
from noloco_jax.errors import UserError
from support.data_makers import OPTIONS


def options(path, split="train", both=True):
    return OPTIONS._replace(path=str(path), split=split, holds_both_splits=both)


def write(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def found(folder):
    return [os.path.relpath(path, folder) for path in find_files(options(folder), [".txt"])]


def test_linked_folders_are_searched_like_others(tmp_path):
    write(tmp_path / "data", "a.txt", "in/b.txt")
    write(tmp_path / "disk", "c.txt", "deep/d.txt", ".hidden/no.txt", "__pycache__/no.txt")
    write(tmp_path / "further", "e.txt")
    (tmp_path / "data/in/link").symlink_to(tmp_path / "disk")
    (tmp_path / "disk/deep/on").symlink_to("../../further")
    (tmp_path / "data/gone").symlink_to(tmp_path / "nowhere")
    expected = ["a.txt", "in/b.txt", "in/link/c.txt", "in/link/deep/d.txt", "in/link/deep/on/e.txt"]
    assert found(tmp_path / "data") == expected


def test_runs_below_the_data_are_not_read_as_text(tmp_path):
    write(tmp_path, "a.txt", "in/b.txt")
    write(tmp_path, "runs/x/metrics.jsonl", "runs/x/checkpoints/10/digests.txt", "runs/x/log.txt")
    write(tmp_path, "runs/compared/comparison.lock", "runs/compared/ddp-seed0/log.txt")
    write(tmp_path, "runs/begins/trainer.lock", "runs/begins/log.txt")
    assert found(tmp_path) == ["a.txt", "in/b.txt"]
    assert found(tmp_path / "runs/x") == ["checkpoints/10/digests.txt", "log.txt"]  # where it is asked for by name


def test_runs_below_an_address_are_not_read_as_text(monkeypatch):
    root = "s3://bucket/data"
    files = ["a.txt", "in/b.txt", "runs/x/metrics.jsonl", "runs/x/checkpoints/10/digests.txt", "runs/xy/c.txt"]
    monkeypatch.setattr(
        "noloco_jax.data.find_files.list_files", lambda path, recursive: [f"{root}/{file}" for file in files]
    )
    assert find_files(options(root), [".txt"]) == [f"{root}/{file}" for file in ("a.txt", "in/b.txt", "runs/xy/c.txt")]


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("a.jsonl", b'{"text": "a"}', "its name says jsonl: give data.kind=jsonl"),
        ("a.parquet", b"PAR1", "its name says parquet: give data.kind=parquet"),
        ("a.txt.gz", b"\x1f\x8b\x08\x01", "is no plain text: decompress it"),
        ("a.bin", b"a few\0words", "is no plain text"),
    ],
)
def test_a_named_file_that_is_no_text_is_refused(name, content, line, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=line):
        find_text_files(options(tmp_path / name))


def test_link_cycles_end(tmp_path):
    write(tmp_path / "data", "a/a.txt", "b/b.txt")
    (tmp_path / "data/a/up").symlink_to(tmp_path / "data")
    (tmp_path / "data/a/self").symlink_to(".")
    (tmp_path / "data/a/to_b").symlink_to("../b")
    (tmp_path / "data/b/to_a").symlink_to("../a")
    (tmp_path / "data/loop").symlink_to("loop")
    assert found(tmp_path / "data") == ["a/a.txt", "a/to_b/b.txt"]


def test_a_file_with_several_symbolic_links_is_read_once(tmp_path):
    write(tmp_path, "a.txt", "blob", "copies/c.txt")
    (tmp_path / "0.txt").symlink_to("a.txt")
    (tmp_path / "b.txt").symlink_to("blob")
    (tmp_path / "bb.txt").symlink_to(tmp_path / "blob")
    os.link(tmp_path / "copies/c.txt", tmp_path / "copies/d.txt")  # a copy of the folder would have two files
    names = [os.path.relpath(path, tmp_path) for path, _ in find_text_files(options(tmp_path))]
    assert names == ["0.txt", "b.txt", "copies/c.txt", "copies/d.txt"]
    assert split_files(options(tmp_path), [".txt"])[0] == [str(tmp_path / name) for name in names]


def test_the_name_of_a_link_gives_the_split_of_its_file(tmp_path):
    write(tmp_path, "all/0.txt", "all/1.txt", "all/2.txt")
    for split, number in (("train", 0), ("train", 1), ("validation", 2)):
        (tmp_path / split).mkdir(exist_ok=True)
        (tmp_path / split / f"{number}.txt").symlink_to(f"../all/{number}.txt")
    for split, numbers in (("train", (0, 1)), ("validation", (2,))):
        files, part = split_files(options(tmp_path, split), [".txt"])
        assert files == [str(tmp_path / split / f"{number}.txt") for number in numbers] and part == "all"


def files_of(root, names, **options):
    """Create the files `names` below `root`; return (names of the split's files, part)."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    files, part = split_files(OPTIONS._replace(path=str(root), **options), (".x",))
    return [Path(file).relative_to(root).as_posix() for file in files], part


def test_file_names_give_the_split_by_hugging_face_conventions():
    for name, split in {
        "train-00000-of-00004.parquet": "train",
        "c4-train.00000-of-01024.jsonl.gz": "train",
        "validation-00000-of-00001.parquet": "validation",
        "my_val_0.jsonl": "validation",
        "DEV.jsonl": "validation",
        "test.jsonl": "test",
        "default/train/0000.parquet": "train",
        "test/part-3.jsonl.zst": "test",
        "train/validation-0.parquet": "validation",
        "training set/0.parquet": "train",
        "trains.parquet": None,
        "develop/0.parquet": None,
        "0.parquet": None,
    }.items():
        assert split_in_name(Path(name).parts) == split, name


@pytest.mark.parametrize(
    ("names", "split", "both", "found", "part"),
    [
        ("deep/train-0 other test-0 train-1 validation-0", "train", True, "deep/train-0 train-1", "all"),
        ("deep/train-0 other test-0 train-1 validation-0", "validation", True, "validation-0", "all"),
        ("test-0 train-0", "train", True, "train-0", "rest"),
        ("test-0 train-0", "validation", True, "train-0", "held_out"),
        ("b a/a dev/0 test/0", "train", True, "a/a b", "all"),
        ("train-0 val-0 test-0", "validation", False, "val-0", "all"),
        ("train-0 test-0", "validation", False, "test-0", "all"),
        ("1 0", "validation", False, "0 1", "all"),
    ],
)
def test_file_names_decide_what_a_split_reads(tmp_path, names, split, both, found, part):
    files = files_of(tmp_path, [f"{name}.x" for name in names.split()], split=split, holds_both_splits=both)
    assert files == ([f"{name}.x" for name in found.split()], part)


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["books.x", "train-0.x", "wiki.x"], "not trained on, as others are named train: books.x and 1 more"),
        (["a.x", "software-testing.x"], "not trained on, as their names say validation or test: software-testing.x"),
        (["train-0.x", "validation-0.x", "test-0.x"], None),
        (["a.x", "b.x"], None),
    ],
)
def test_files_left_out_of_training_by_their_names_are_told(tmp_path, capsys, names, told):
    files_of(tmp_path, names)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[2] for line in lines] == ([] if told is None else [told])


def test_a_file_beside_its_compressed_form_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"a\.x and .*a\.x\.gz hold the same documents: move one of them elsewhere"):
        write(tmp_path, "a.x", "a.x.gz", "b.x")
        split_files(options(tmp_path), (".x", ".x.gz"))


def test_training_on_only_validation_and_test_files_is_refused(tmp_path):
    with pytest.raises(UserError, match="no file to train on: the names of all 2 say validation or test"):
        files_of(tmp_path, ["dev-0.x", "test-0.x"])


def test_files_below_the_path_of_the_other_split_are_left_out(tmp_path):
    names = ["book/0.x", "book/last/1.x", "book/2.x"]
    apart = {"holds_both_splits": False, "exclude": str(tmp_path / "book" / "last")}
    assert files_of(tmp_path, names, **apart) == (["book/0.x", "book/2.x"], "all")
    inside = {"holds_both_splits": False, "exclude": str(tmp_path), "path": str(tmp_path / "book" / "last")}
    files, _ = split_files(OPTIONS._replace(**inside), (".x",))
    assert files == [str(tmp_path / "book" / "last" / "1.x")]


def test_every_item_is_either_held_out_or_in_the_rest():
    for count in (1, 2, 7, 49, 50, 51, 76, 1003):
        held_out, rest = (HoldOut(count, split).mask(0, count) for split in ("held_out", "rest"))
        np.testing.assert_array_equal(held_out, ~rest)
        assert 1 <= held_out.sum() <= max(1, round(count / 49)), count


def test_count_before_agrees_with_the_mask():
    for split in ("all", "held_out", "rest"):
        for count in (1, 2, 49, 50, 127):
            hold_out = HoldOut(count, split)
            mask = hold_out.mask(0, count)
            counts = [hold_out.count_before(k) for k in range(count + 1)]
            assert counts == [int(mask[:k].sum()) for k in range(count + 1)], (split, count)
            np.testing.assert_array_equal(hold_out.mask(count // 3, count), mask[count // 3 :])
