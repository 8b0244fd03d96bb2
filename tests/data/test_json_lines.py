"""JSON lines of any name and compression, read as one data set."""

import json
from dataclasses import replace

import pytest

from noloco_jax.config import DataConfig
from noloco_jax.data import ByteTokenizer, check_data, validation_batches
from noloco_jax.errors import UserError
from support.data_makers import documents, open_streams, read_through, write_counting, write_json_lines

BYTE = ByteTokenizer()


def config_for(path, **fields):
    plain = {"add_bos": False, "add_eos": False, "sequence_length": 4, "batch_size": 1}
    return DataConfig(kind="jsonl", path=str(path), **plain | fields)


def test_plain_and_compressed_files_are_read_in_sorted_order(tmp_path):
    write_json_lines(tmp_path / "b.jsonl.gz", ["wo", "rl"])
    write_json_lines(tmp_path / "a.jsonl", ["hel"])
    write_json_lines(tmp_path / "a b.jsonl.zst", ["lo ", ""])
    write_json_lines(tmp_path / "deep" / "c.jsonl", ["d!"])
    write_json_lines(tmp_path / "notes.json", ["not this"])
    config = config_for("elsewhere", validation_path=str(tmp_path), sequence_length=11)
    (batch,) = validation_batches(config, BYTE, num_batches=5)
    assert BYTE.decode(batch["input_ids"][0]) == "lo helworld"


def test_a_file_named_outright_may_have_any_name(tmp_path):
    write_json_lines(tmp_path / "corpus", ["abcd", "efgh"])
    (batch, *_) = validation_batches(
        config_for("elsewhere", validation_path=str(tmp_path / "corpus")), BYTE, num_batches=5
    )
    assert BYTE.decode(batch["input_ids"][0]) == "abcd"


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_stream_resumes_in_the_middle_of_a_file(tmp_path, suffix):
    write_json_lines(tmp_path / f"0.jsonl{suffix}", [f"{first} {count}" for first, count in documents(60)])
    config = config_for(tmp_path, validation_path="elsewhere", shuffle_buffer=5)
    (whole,), (again,) = open_streams(config, 1), open_streams(config, 1)
    for _ in range(40):
        next(whole)
    again.set_state(json.loads(json.dumps(whole.get_state())))
    for _ in range(20):
        assert next(again)["input_ids"].tolist() == next(whole)["input_ids"].tolist()


def test_one_document_in_fifty_is_held_out_of_large_and_of_many_small_files(tmp_path):
    for name, files in {"large": 2, "small": 1000}.items():
        spans = documents(1000)
        config, total = write_counting("jsonl", tmp_path / name, len(spans), files)
        config = replace(config, validation_path="", batch_size=1, sequence_length=1)
        (stream,) = open_streams(config, 1)
        trained = set(read_through(stream, 0))
        held_out = [span for span in spans if span[0] not in trained]
        assert 15 <= len(held_out) <= 25, name
        assert len(trained) + sum(count for _, count in held_out) == total


def test_of_two_documents_one_is_held_out(tmp_path):
    for name, files in {"one": 1, "two": 2}.items():
        config, _ = write_counting("jsonl", tmp_path / name, 2, files)
        config = replace(config, validation_path="")
        check_data(config, num_replicas=1)
        with pytest.raises(UserError, match=r"num_replicas=3, but .* holds 1 train documents"):
            check_data(config, num_replicas=3)
