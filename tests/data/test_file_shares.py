"""Shares of files: each document in one, equal ones, and few files that are read twice."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from noloco_jax.data import json_lines
from noloco_jax.data.file_shares import FileLength, divide_files
from noloco_jax.data.run_data import open_source
from support.data_makers import (
    CountingTokenizer,
    open_streams,
    read_through,
    train_stream,
    write_counting,
    write_json_lines,
)


def held_by_shard(shards, documents):
    """Return the (file, document) pairs of each shard, of files with these numbers of documents."""
    return [
        [(part.file, k) for part in parts for k in range(documents[part.file]) if part.holds(k)] for parts in shards
    ]


def equal_documents(numbers, is_counted=True):
    return [FileLength(number, 10 * number, is_counted) for number in numbers]


@pytest.mark.parametrize("is_counted", [True, False])
def test_every_document_is_in_one_share_whatever_was_estimated(is_counted):
    rng = np.random.default_rng(0)
    for num_shards in (1, 2, 3, 7):
        estimated, longer = rng.integers(1, 60, 12).tolist(), rng.integers(1, 120, 12).tolist()
        lengths = [FileLength(n, int(rng.integers(1, 999)), is_counted) for n in estimated]
        documents = estimated if is_counted else longer
        held = held_by_shard(divide_files(lengths, rng.permutation(12).tolist(), num_shards), documents)
        expected = {(file, k): 1 for file, number in enumerate(documents) for k in range(number)}
        assert Counter(pair for shard in held for pair in shard) == expected


@pytest.mark.parametrize(
    ("numbers", "num_shards"), [([1000, 10, 10, 10], 4), ([97] * 5, 4), ([100] * 8, 3), ([3, 0, 1, 0, 1], 5)]
)
def test_counted_documents_of_one_length_are_divided_to_within_one(numbers, num_shards):
    held = held_by_shard(divide_files(equal_documents(numbers), range(len(numbers)), num_shards), numbers)
    share = sum(numbers) / num_shards
    assert all(share - 1 < len(shard) < share + 1 for shard in held)


def test_a_file_with_other_documents_than_estimated_is_shared_in_the_same_proportion():
    for true in (30, 3000):
        held = held_by_shard(divide_files(equal_documents([300, 100], False), [0, 1], 2), [true, 0])
        assert abs(len(held[0]) - true * 2 / 3) <= 3 and abs(len(held[1]) - true / 3) <= 3


def test_as_many_documents_as_estimated_have_all_turns():
    for number in range(1, 60):
        shards = divide_files(equal_documents([number], False), [0], number)
        assert [len(shard) for shard in held_by_shard(shards, [number])] == [1] * number


def test_each_cut_makes_one_file_more_to_read():
    rng = np.random.default_rng(0)
    numbers = rng.integers(50, 200, 64).tolist()
    assert sum(map(len, divide_files(equal_documents(numbers, False), range(64), 8))) <= 64 + 7
    nearly = [1000 + int(noise) for noise in rng.integers(-9, 10, 8)]
    assert [len(parts) for parts in divide_files(equal_documents(nearly, False), range(8), 8)] == [1] * 8
    assert [len(parts) for parts in divide_files(equal_documents([356] * 1024, False), range(1024), 8)] == [128] * 8


def test_files_of_long_and_short_documents_are_divided_by_their_bytes():
    lengths = [FileLength(100, 30_000, True), *(FileLength(100, 10_000, True) for _ in range(3))]
    held = held_by_shard(divide_files(lengths, [0, 1, 2, 3], 2), [100] * 4)
    assert [sum(300 if file == 0 else 100 for file, _ in shard) for shard in held] == [30_000, 30_000]


def test_a_document_longer_than_a_share_leaves_none_without():
    lengths = [FileLength(1, 10**6, True), *(FileLength(2, 50, True) for _ in range(3))]
    assert all(held_by_shard(divide_files(lengths, [0, 1, 2, 3], 4), [1, 2, 2, 2]))


@pytest.fixture(params=["counted", "estimated"])
def measuring(request, monkeypatch):
    if request.param == "estimated":
        monkeypatch.setattr(json_lines, "_MEASURED_BYTES", 0)
        monkeypatch.setattr(json_lines, "_MEASURED_BYTES_EACH", 100)
    return request.param


@pytest.mark.parametrize(("numbers", "num_replicas"), [((1000, 10, 10, 10), 4), ((60,) * 5, 4), ((60,) * 8, 3)])
def test_replicas_of_one_pace_use_no_document_twice_before_all_are_used(tmp_path, numbers, num_replicas):
    ids = iter(range(9999))
    for file, number in enumerate(numbers):
        lines = [json.dumps({"text": f"{next(ids):04d} 1"}) + "\n" for _ in range(number)]
        (tmp_path / f"{file}.jsonl").write_text("".join(lines))
    config, _ = write_counting("jsonl", tmp_path.parent / f"{tmp_path.name}-other", 3)
    config = replace(config, path=str(tmp_path), sequence_length=1, batch_size=1)
    steps = sum(numbers) // num_replicas
    streams = open_streams(config, num_replicas)
    uses = Counter(int(next(stream)["input_ids"][0, 0]) for stream in streams for _ in range(steps))
    assert set(uses.values()) == {1} and len(uses) == steps * num_replicas


@pytest.mark.parametrize("shuffle_buffer", [1, 4])
def test_an_epoch_of_cut_files_holds_every_token_once_and_resumes_within_them(tmp_path, measuring, shuffle_buffer):
    config, count = write_counting("jsonl", tmp_path / "data", 60, files=4)
    config = replace(config, sequence_length=1, batch_size=1, shuffle_buffer=shuffle_buffer)
    streams = open_streams(config, 3)
    seen = Counter(token for epoch in range(2) for stream in streams for token in read_through(stream, epoch))
    assert seen == dict.fromkeys(range(count), 2)
    whole, again = (train_stream(config, CountingTokenizer(), replica=1, num_replicas=3, seed=0) for _ in range(2))
    states, ids = [], []
    for _ in range(count):
        states.append(json.dumps(whole.get_state()))
        ids.append(int(next(whole)["input_ids"][0, 0]))
    for start in range(0, count - 9, 5):
        again.set_state(json.loads(states[start]))
        assert [int(next(again)["input_ids"][0, 0]) for _ in range(9)] == ids[start : start + 9]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_lengths_are_those_of_the_part_and_estimated_from_the_beginning(tmp_path, monkeypatch, suffix):
    texts = [bytes(np.random.default_rng(k).integers(97, 123, 900).astype(np.uint8)).decode() for k in range(2000)]
    write_json_lines(tmp_path / f"0.jsonl{suffix}", texts)
    config, _ = write_counting("jsonl", tmp_path.parent / f"{tmp_path.name}-other", 3)
    config = replace(config, path=str(tmp_path), validation_path="")

    def length(max_bytes):
        monkeypatch.setattr(json_lines, "_MEASURED_BYTES", max_bytes)
        source = open_source(config, validation=False, seed=0, vocab_size=None)
        assert isinstance(source, json_lines.JsonLinesSource)
        return source.file_lengths()[0]

    counted, estimated = length(1 << 25), length(1 << 19)
    assert 1955 <= counted.documents <= 1965 and counted.is_counted and not estimated.is_counted
    for name in ("documents", "bytes"):  # Zstandard's last block of 128 KiB is cut
        assert getattr(estimated, name) == pytest.approx(getattr(counted, name), rel=0.15 if suffix == ".zst" else 0.05)
