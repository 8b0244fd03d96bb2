"""Bad data: one line that names the fault and the remedy, from `check_data` or from the running stream."""

from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from noloco_jax.config import DataConfig
from noloco_jax.data import load_tokenizer
from noloco_jax.data.file_shares import FileLength
from noloco_jax.data.json_lines import JsonLinesSource
from noloco_jax.data.parquet import ParquetSource
from noloco_jax.errors import UserError
from support.data_makers import (
    check_data,
    open_streams,
    validation_batches,
    write_c4,
    write_counting,
    write_json_lines,
    write_rows,
    write_texts,
)

BYTE = load_tokenizer("byte")
KINDS = ["jsonl", "parquet", "text"]
FINE = {"input_ids": [[1, 2]] * 8, "label": [[2, 3]] * 8}


def assert_refused(config, pattern, **checked):
    """Assert that `check_data` refuses the configuration in one line, and return that line."""
    with pytest.raises(UserError, match=pattern) as caught:
        check_data(config, **checked)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def read_until_refused(config, pattern, batches=2000):
    (stream,) = open_streams(config, 1, BYTE)
    with pytest.raises(UserError, match=pattern):
        for _ in range(batches):
            next(stream)
    with pytest.raises(UserError, match=pattern):  # a second call fails likewise instead of ending the stream
        next(stream)


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        ("jsonl", r"\*\.jsonl, \*\.ndjson, \*\.jsonl\.gz, .*\*\.json\.gz"),
        ("parquet", r"\*\.parquet"),
        ("text", r"\*\.md, \*\.py, \*\.rst, \*\.txt"),
    ],
)
def test_missing_data_are_refused_with_the_files_looked_for(tmp_path, kind, pattern):
    assert_refused(DataConfig(kind=kind), 'data.path is ""')
    assert_refused(DataConfig(kind=kind, path=str(tmp_path / "nowhere")), r"data.path='.*nowhere'.*there is no such")
    (tmp_path / "unrelated.bin").write_bytes(b"1")
    assert_refused(DataConfig(kind=kind, path=str(tmp_path)), pattern)


@pytest.mark.parametrize(
    ("columns", "pattern"),
    [
        (
            {"tokens": [[1]], "ids": [[1]]},
            r"has the columns tokens \(list<.*: expected strings in 'text' .*data\.text_column",
        ),
        (
            {"input_ids": [1, 2], "label": [1, 2]},
            r"has the columns input_ids \(int64\), .*lists of integers in input_ids",
        ),
        ({"input_ids": [[1, -1]] * 4, "label": [[2, 5]] * 4}, "input_ids holds -1"),
        (None, "is no readable Parquet file"),
    ],
)
def test_a_parquet_file_of_another_form_is_refused(tmp_path, columns, pattern):
    write_rows(tmp_path / "0.parquet", FINE)
    if columns is None:
        (tmp_path / "0.parquet").write_text("text")
    else:
        pq.write_table(pa.table(columns), tmp_path / "0.parquet")
    assert_refused(DataConfig(kind="parquet", path=str(tmp_path)), rf"0\.parquet:? {pattern}")


@pytest.mark.parametrize("kind", KINDS)
def test_missing_validation_files_are_refused(tmp_path, kind):
    config, _ = write_counting(kind, tmp_path / "data", 9)
    (tmp_path / "empty").mkdir()
    for folder in ("nowhere", "empty"):
        broken = replace(config, validation_path=str(tmp_path / folder))
        assert_refused(broken, rf"data.validation_path='.*{folder}'")
        with pytest.raises(UserError, match=r"data.validation_path='"):
            validation_batches(broken, BYTE, num_batches=1)


@pytest.mark.parametrize("kind", KINDS)
def test_more_replicas_than_documents_are_refused(tmp_path, kind):
    config, _ = write_counting(kind, tmp_path / "data", 6)
    check_data(config, num_replicas=6)
    assert_refused(config, "num_replicas=7, but .* holds 6 ", num_replicas=7)
    with pytest.raises(UserError, match="use fewer replicas"):
        open_streams(config, 7)


def test_a_replica_without_documents_is_refused(tmp_path, monkeypatch):
    write_c4(tmp_path, [["0 5", "5 5"], []])
    monkeypatch.setattr(JsonLinesSource, "file_lengths", lambda _: [FileLength(2, 80, False)] * 2)
    config = DataConfig(kind="jsonl", path=str(tmp_path), validation_path="elsewhere", sequence_length=2, batch_size=1)
    streams = open_streams(replace(config, shuffle_buffer=1), 2)
    with pytest.raises(UserError, match="replica 1 of 2 gets no document"):
        next(streams[1])


def test_data_without_any_token_are_refused_after_two_epochs(tmp_path, monkeypatch):
    opened = []
    open_shard = ParquetSource.open_shard
    monkeypatch.setattr(ParquetSource, "open_shard", lambda *given: opened.append(given[1]) or open_shard(*given))
    write_rows(tmp_path / "0.parquet", {"input_ids": [[0, 0]] * 8, "attention_mask": [[0, 0]] * 8})
    config = DataConfig(kind="parquet", path=str(tmp_path), sequence_length=2, batch_size=1)
    read_until_refused(config, "hold no token")
    assert max(opened) <= 2
    with pytest.raises(UserError, match="hold no token to predict"):
        validation_batches(config, None, num_batches=1)


def test_empty_documents_at_both_ends_of_the_data_are_accepted(tmp_path):
    """Consecutive empty documents across an epoch boundary must not pass for empty data."""
    rows = {"input_ids": [[0, 0], [1, 2], [3, 4], [0, 0]], "attention_mask": [[0, 0], [1, 1], [1, 1], [0, 0]]}
    write_rows(tmp_path / "0.parquet", rows)
    config = DataConfig(kind="parquet", path=str(tmp_path), validation_path="elsewhere", shuffle_buffer=1)
    (stream,) = open_streams(replace(config, sequence_length=4, batch_size=1), 1)
    assert [next(stream)["input_ids"].tolist() for _ in range(5)] == [[[1, 2, 3, 4]]] * 5


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "text"])
def test_data_too_small_to_hold_out_validation_are_refused(tmp_path, kind):
    if kind == "text":
        write_texts(tmp_path, ["one short file"])
    elif kind == "jsonl":
        write_json_lines(tmp_path / "0.jsonl", ["one document"])
    else:
        write_rows(tmp_path / "0.parquet", {"input_ids": [[1, 2]], "label": [[2, 3]]})
    assert_refused(DataConfig(kind=kind, path=str(tmp_path)), "give data.validation_path")


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "text"])
def test_validation_data_that_are_the_training_data_are_refused(tmp_path, kind):
    config, _ = write_counting(kind, tmp_path / "data", 9)
    (tmp_path / "link").symlink_to(tmp_path / "data")
    for path in (config.path, str(tmp_path / "link"), f"{config.path}/../data/"):
        assert_refused(replace(config, validation_path=path), r"data\.validation_path='.*' is data\.path: .* empty")
