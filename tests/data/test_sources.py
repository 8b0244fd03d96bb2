"""Finding, reading and shuffling text files and C4 shards."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from noloco_jax.config import DataConfig
from noloco_jax.data.find_files import find_files
from noloco_jax.data.source import WindowShuffledShard, seeded_permutation
from noloco_jax.data.text import TextSource, find_text_files
from noloco_jax.errors import UserError
from support.data_makers import OPTIONS, CountingTokenizer, check_data, validation_batches, write_c4

PIECE = 8192  # bytes
SPLITS = ("validation", "train")


def options(path, split="train", both=False):
    return OPTIONS._replace(path=str(path), split=split, holds_both_splits=both)


def read_texts(path, split="train", both=False):
    """Return the documents of a folder, in order."""
    source = TextSource(options(path, split, both), PIECE)
    shard = source.open_shard(0, 0, 1, ())
    records = [shard.get(k) for k in range(int(source.fingerprint["documents"]))]
    return source.load([k for k in records if k is not None])


def test_text_files_are_found_by_suffix_outside_ignored_folders(tmp_path):
    for name in ["b.py", "a.txt", "deep/er/c.md", "deep/d.rst", "deep/e.c", "empty.py"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("" if "empty" in name else "text")
    for folder in ["site-packages", "deep/dist-packages", "__pycache__", ".git"]:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "no.py").write_text("no")
    (tmp_path / ".hidden.py").write_text("no")
    found = [Path(path).relative_to(tmp_path).as_posix() for path, _ in find_text_files(options(tmp_path))]
    assert found == ["a.txt", "b.py", "deep/d.rst", "deep/er/c.md"]


def test_a_long_file_is_split_at_line_ends_without_loss(tmp_path):
    rng = np.random.default_rng(0)
    text = "".join("é" * int(n) + "\n" for n in rng.integers(0, 150, 3000))
    (tmp_path / "long.txt").write_text(text)
    pieces = read_texts(tmp_path)
    assert len(pieces) == -(-len(text.encode()) // PIECE) > 3
    assert "".join(pieces) == text
    assert all(piece.endswith("\n") for piece in pieces)


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "0.txt").write_bytes("\ufeffone\ufefftwo".encode())
    assert read_texts(tmp_path) == ["one\ufefftwo"]


def test_a_file_without_line_ends_is_split_between_characters(tmp_path):
    text = "x" + "€🙂" * 30_000
    (tmp_path / "line.txt").write_text(text)
    pieces = read_texts(tmp_path)
    assert len(pieces) > 2
    assert "".join(pieces) == text


def test_bytes_that_are_not_utf8_are_replaced(tmp_path):
    (tmp_path / "0.txt").write_bytes(b"caf\xe9!")
    assert read_texts(tmp_path) == ["caf\ufffd!"]


def test_whole_files_are_held_out_of_many_text_files(tmp_path):
    for k in range(60):
        (tmp_path / f"{k:02}.txt").write_text(f"{k}\n" * (PIECE if k % 2 else 1))
    validation, train = (set("".join(read_texts(tmp_path, split, both=True)).split()) for split in SPLITS)
    assert validation == {"25"}
    assert train == {str(k) for k in range(60)} - validation


def test_a_fiftieth_of_the_text_is_held_out_of_few_text_files(tmp_path):
    lines = [[f"{file} {k:06}\n" for k in range(10 * PIECE if file == 1 else 40)] for file in range(3)]
    for file, its_lines in enumerate(lines):
        (tmp_path / f"{file}.txt").write_text("".join(its_lines))
    validation, train = ("".join(read_texts(tmp_path, split, both=True)).splitlines() for split in SPLITS)
    assert 0.01 < len(validation) / sum(map(len, lines)) < 0.03
    assert sorted(validation + train) == [line.strip() for its_lines in lines for line in its_lines]


def test_c4_validation_files_are_found_in_the_training_folder_or_another(tmp_path):
    write_c4(tmp_path / "data", [["0 3"]])
    write_c4(tmp_path / "data", [["10 9"]], "validation")
    write_c4(tmp_path / "other", [["20 9"]], "validation")
    config = DataConfig(kind="jsonl", path=str(tmp_path / "data"), add_bos=False, add_eos=False, sequence_length=8)
    config = replace(config, batch_size=1)
    for path, first in (("", 10), (str(tmp_path / "other"), 20)):
        (batch,) = validation_batches(replace(config, validation_path=path), CountingTokenizer(), num_batches=3)
        assert batch["input_ids"].tolist() == [list(range(first, first + 8))]
    check_data(config)


@pytest.mark.parametrize("excluded", ["snapshot/valid.txt", "blobs/2", "snapshot/held_out", "blobs"])
def test_validation_files_are_not_trained_on_through_links(tmp_path, excluded):
    """Files in the Hugging Face cache are links."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    (snapshot / "held_out").mkdir(parents=True)
    blobs.mkdir()
    for number, name in enumerate(["train.txt", "held_out/x.txt", "valid.txt"]):
        (blobs / str(number)).write_text(name)
        (snapshot / name).symlink_to(blobs / str(number))
    kept = {
        "snapshot/valid.txt": ["held_out/x.txt", "train.txt"],
        "blobs/2": ["held_out/x.txt", "train.txt"],
        "snapshot/held_out": ["train.txt", "valid.txt"],
    }
    searched = options(snapshot)._replace(exclude=str(tmp_path / excluded))
    if excluded == "blobs":
        with pytest.raises(UserError, match=r"holds no file \*\.txt"):
            find_files(searched, [".txt"])
    else:
        found = find_files(searched, [".txt"])
        assert [os.path.relpath(file, snapshot) for file in found] == kept[excluded]


class Numbers(WindowShuffledShard):
    """Shard of the documents 0 to 24."""

    def read_window(self, window):
        return list(range(25))[window * self._window_size : (window + 1) * self._window_size]


def test_a_shard_is_shuffled_within_each_window():
    shard = Numbers(10, (1, 2))
    found: list = [shard.get(document) for document in range(25)]
    for start in (0, 10, 20):
        window = found[start : start + 10]
        assert sorted(window) == list(range(25))[start : start + 10] != window
    assert [document + 10 for document in found[:10]] != found[10:20]  # each window has its own order
    assert shard.get(25) is None
    assert shard.get(40) is None


def test_every_bit_of_a_seed_matters_and_32_bit_seeds_keep_their_permutation():
    keys = [(0, 1), (2**32, 0), (2**32,), (0, 1, 0), (1, 0), (2**32 + 1, 0), (2**64, 0), (0, 2**32), (2**63 - 1, 0)]
    assert len({tuple(seeded_permutation(50, *key)) for key in keys}) == len(keys)
    largest = np.random.PCG64(np.random.SeedSequence((2, 2**32 - 1, 7)))  # the permutation of earlier versions
    assert seeded_permutation(50, 2**32 - 1, 7).tolist() == np.argsort(largest.random_raw(50), kind="stable").tolist()
