"""Which files and documents are trained on and validated on; hold-outs by enumeration."""

from pathlib import Path

import numpy as np
import pytest

from noloco_jax.data.source import SourceOptions
from noloco_jax.data.splits import HoldOut, split_files
from noloco_jax.errors import UserError

OPTIONS = SourceOptions(
    "", "data.path", "train", True, exclude="", seed=0, shuffle_buffer=1, on_bad_shard="stop", text_column="text"
)


def files_of(root, names, **options):
    """(names of the split's files, part) in a folder that holds `names`."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    files, part = split_files(OPTIONS._replace(path=str(root), **options), (".x",))
    return [Path(file).relative_to(root).as_posix() for file in files], part


def test_a_name_says_its_split_as_hugging_face_has_it(tmp_path):
    """Beside files of both splits: one that names no split, or a third, is in neither."""
    for name, expected in {
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
        names, root = [f"{name}.x", "train-z.x", "validation-z.x"], tmp_path / str(abs(hash(name)))
        listed = {split: files_of(root, names, split=split)[0] for split in ("train", "validation")}
        assert [split for split in listed if names[0] in listed[split]] == [
            split for split in listed if split == expected
        ]


def test_training_reads_the_files_named_train_alone_and_holds_none_of_them_out(tmp_path):
    names = ["deep/train-0.x", "other.x", "test-0.x", "train-1.x", "validation-0.x"]
    assert files_of(tmp_path, names) == (["deep/train-0.x", "train-1.x"], "all")
    assert files_of(tmp_path, [], split="validation") == (["validation-0.x"], "all")


def test_without_validation_files_a_part_of_the_training_files_is_held_out(tmp_path):
    names = ["test-0.x", "train-0.x"]
    assert files_of(tmp_path, names) == (["train-0.x"], "rest")
    assert files_of(tmp_path, [], split="validation") == (["train-0.x"], "held_out")


def test_without_training_files_those_that_name_no_split_are_trained_on(tmp_path):
    assert files_of(tmp_path, ["b.x", "a/a.x", "dev/0.x", "test/0.x"]) == (["a/a.x", "b.x"], "all")


def test_a_folder_of_validation_and_test_files_is_not_trained_on(tmp_path):
    with pytest.raises(UserError, match="no file to train on: the names of all 2 say validation or test"):
        files_of(tmp_path, ["dev-0.x", "test-0.x"])


def test_a_validation_folder_of_its_own_may_have_any_names(tmp_path):
    alone = {"split": "validation", "holds_both_splits": False}
    assert files_of(tmp_path / "a", ["train-0.x", "val-0.x"], **alone) == (["val-0.x"], "all")
    assert files_of(tmp_path / "b", ["train-0.x", "test-0.x"], **alone) == (["test-0.x"], "all")
    assert files_of(tmp_path / "c", ["1.x", "0.x"], **alone) == (["0.x", "1.x"], "all")
    assert files_of(tmp_path / "d", ["test-0.x", "val-0.x"], **alone) == (["val-0.x"], "all")


def test_files_of_the_other_path_inside_are_left_out(tmp_path):
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


def test_counts_before_an_item_are_those_of_the_mask():
    for split in ("all", "held_out", "rest"):
        for count in (1, 2, 49, 50, 127):
            hold_out = HoldOut(count, split)
            mask = hold_out.mask(0, count)
            counts = [hold_out.count_before(k) for k in range(count + 1)]
            assert counts == [int(mask[:k].sum()) for k in range(count + 1)], (split, count)
            np.testing.assert_array_equal(hold_out.mask(count // 3, count), mask[count // 3 :])
