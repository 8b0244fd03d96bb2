"""Transient errors are retried; damaged files are refused, or skipped with a warning."""

import errno
import itertools
import os
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from noloco_jax import storage
from noloco_jax.config import DataConfig
from noloco_jax.data import json_lines, load_tokenizer
from noloco_jax.errors import TransientError, UserError
from noloco_jax.storage import DISK_DELAYS, with_retries
from support.data_makers import (
    open_streams,
    position_of,
    read_through,
    validation_batches,
    write_counting,
    write_json_lines,
    write_rows,
)

KINDS = ["jsonl", "parquet", "text"]
BYTE = load_tokenizer("byte")


def failing(times, number):
    """Return a read that raises OSError with errno `number` for `times` calls, then returns "content"."""
    errors = iter([OSError(number, os.strerror(number))] * times)

    def read():
        for error in errors:
            raise error
        return "content"

    return read


def test_a_transient_error_is_retried_until_it_passes(waits):
    for number in (errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.ENOENT):
        waits.clear()
        assert with_retries(failing(3, number), "file") == "content"
        assert waits == list(DISK_DELAYS[:3])


def test_other_system_errors_are_not_retried(waits):
    with pytest.raises(UserError, match=r"^file cannot be read \(Permission denied\)") as caught:
        with_retries(failing(1, errno.EACCES), "file")
    assert caught.value.exit_status == 2
    assert not waits


@pytest.mark.parametrize("kind", KINDS)
def test_a_temporarily_missing_file_does_not_interrupt_reading(tmp_path, waits, monkeypatch, kind):
    config, count = write_counting(kind, tmp_path / "data", 60)
    config = replace(config, sequence_length=1, batch_size=1)
    (stream,) = open_streams(config, 1)
    (tmp_path / "data").rename(tmp_path / "gone")
    monkeypatch.setattr(storage, "sleep", lambda _: (tmp_path / "gone").rename(tmp_path / "data"))
    assert sorted(read_through(stream, 0)) == list(range(count))


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_stays_missing_raises_a_transient_error(tmp_path, waits, kind):
    config, _ = write_counting(kind, tmp_path / "data", 60)
    (stream,) = open_streams(config, 1)
    (tmp_path / "data").rename(tmp_path / "gone")
    with pytest.raises(TransientError, match=r"data/.* cannot be read \(.*\), .* the same command continues") as caught:
        next(stream)
    assert caught.value.exit_status == 1
    assert waits == list(DISK_DELAYS)


def test_a_parquet_read_that_fails_mid_file_is_retried_from_there(tmp_path, waits, monkeypatch):
    rows, iter_batches = [[k, k + 1] for k in range(1000)], pq.ParquetFile.iter_batches
    write_rows(tmp_path / "0.parquet", {"input_ids": rows, "label": [[0, 1]] * 1000}, row_group_size=1000)

    def flaky(file, *args, **kwargs):
        for k, batch in enumerate(iter_batches(file, *args, **kwargs)):
            if k == 3 and not waits:
                raise OSError(errno.EIO, "Input/output error")
            yield batch

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", flaky)
    config = DataConfig(
        kind="parquet", path="elsewhere", validation_path=str(tmp_path), sequence_length=2, batch_size=1
    )
    batches = validation_batches(config, None, num_batches=2000)
    assert [batch["input_ids"].tolist() for batch in batches] == [[row] for row in rows]
    assert len(waits) == 1


def test_a_read_of_lines_that_fails_mid_file_is_retried_from_there(tmp_path, waits, monkeypatch):
    write_json_lines(tmp_path / "0.jsonl.gz", [f"{k} 1" for k in range(1000)])
    open_decompressed = json_lines.open_decompressed

    class FlakyFile:
        """File that fails once, at its 500th line."""

        def __init__(self, path):
            self._file, self._reads = open_decompressed(path), itertools.count(1)
            self.read, self.close = self._file.read, self._file.close

        def readline(self):
            if next(self._reads) == 500 and not waits:
                raise OSError(errno.ESTALE, "Stale file handle")
            return self._file.readline()

    monkeypatch.setattr(json_lines, "open_decompressed", FlakyFile)
    plain = {"add_bos": False, "add_eos": False, "sequence_length": 1, "batch_size": 1, "shuffle_buffer": 1}
    config = DataConfig(kind="jsonl", path=str(tmp_path), validation_path="elsewhere", **plain)
    (stream,) = open_streams(config, 1)
    assert read_through(stream, 0) == list(range(1000))
    assert len(waits) == 1


def incompressible_texts(count):
    rng = np.random.default_rng(0)
    return ["".join(map(chr, rng.integers(97, 123, 200))) for _ in range(count)]


def damaged_set(kind, folder):
    """Write two files of 100 documents, the second damaged in its middle; return (config, damaged file)."""
    texts = incompressible_texts(200)
    if kind in (".gz", ".zst"):
        for number in range(2):
            write_json_lines(folder / f"{number}.jsonl{kind}", texts[100 * number : 100 * number + 100])
        damaged = folder / f"1.jsonl{kind}"
    else:
        rows = [list(text.encode()) for text in texts]
        for number in range(2):
            write_rows(
                folder / f"{number}.parquet",
                {"input_ids": rows[100 * number : 100 * number + 100]}
                | {"labels": rows[100 * number : 100 * number + 100]},
                10,
            )
        damaged = folder / "1.parquet"
    content = bytearray(damaged.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 200] = bytes(200)
    damaged.write_bytes(content)
    config = DataConfig(
        kind="parquet" if kind == "parquet" else "jsonl",
        path=str(folder),
        validation_path="elsewhere",
        sequence_length=50,
        batch_size=1,
        shuffle_buffer=1,
    )
    return config, damaged


@pytest.mark.parametrize("kind", [".gz", ".zst", "parquet"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_rest_of_a_damaged_file_is_left_out_with_one_warning(tmp_path, capfd, kind, num_workers):
    config, damaged = damaged_set(kind, tmp_path)
    (stream,) = open_streams(replace(config, num_workers=num_workers), 1, BYTE)
    found = bytearray()
    while position_of(stream).epoch < 2:
        found += bytes(token for token in next(stream)["input_ids"].ravel().tolist() if token < 256)
    stream.close()
    first_file = "".join(incompressible_texts(200)[:100]).encode()
    assert found.count(first_file) == 2
    told = [line for line in capfd.readouterr().err.splitlines() if "left out" in line]
    assert len(told) == 1, told  # in two epochs
    assert told[0].startswith(f"warning: {damaged} ") and "fetch it again" in told[0]
