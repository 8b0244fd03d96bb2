"""Line reading: a reader resumed at a position yields the same lines as one that read from the start."""

import gzip
import json

import numpy as np
import pytest

from noloco_jax.data.line_reader import LinePosition, LineReader
from noloco_jax.errors import UserError
from support.data_makers import compressed, write_json_lines

START = LinePosition(0, 0, 0)


def read_all(files, position=START):
    """Return (lines from `position` on, positions before each line and after the last)."""
    reader = LineReader(files, position)
    lines, positions = [], [position]
    while (line := reader.next()) is not None:
        lines.append(line)
        positions.append(reader.position)
    reader.close()
    return lines, positions


def random_texts(count, letters):
    rng = np.random.default_rng(0)
    return ["".join(map(chr, rng.integers(97, 123, letters))) for _ in range(count)]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_reading_resumes_at_any_position(tmp_path, suffix):
    texts = random_texts(60, 9000)  # many times the read size in all
    files = [str(tmp_path / f"{number}.jsonl{suffix}") for number in range(2)]
    write_json_lines(tmp_path / f"0.jsonl{suffix}", texts[:40])
    write_json_lines(tmp_path / f"1.jsonl{suffix}", texts[40:])
    lines, positions = read_all(files)
    assert [json.loads(line.content)["text"] for line in lines] == texts
    for k in range(0, 61, 7):
        assert read_all(files, positions[k])[0] == lines[k:]


def test_blank_lines_are_left_out_and_counted(tmp_path):
    (tmp_path / "0.jsonl.gz").write_bytes(gzip.compress(b"one\n\n  \ntwo\n\n"))
    lines, positions = read_all([str(tmp_path / "0.jsonl.gz")])
    assert [(line.number, line.content) for line in lines] == [(1, b"one\n"), (4, b"two\n")]
    assert positions[1:] == [LinePosition(0, 1, 4), LinePosition(0, 4, 12)]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_damaged_file_ends_at_the_same_line_from_any_start_position(tmp_path, suffix):
    file = tmp_path / f"0.jsonl{suffix}"
    write_json_lines(file, random_texts(3000, 300))
    file.write_bytes(file.read_bytes()[:-9000])
    lines, positions = read_all([str(file)])
    assert 1000 < len(lines) < 3000
    for k in (1, 100, 500, 777, 1000, len(lines) - 1):
        assert read_all([str(file)], positions[k])[0] == lines[k:]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_file_without_its_suffix_is_refused(tmp_path, suffix):
    file = tmp_path / "0.jsonl"
    file.write_bytes(compressed(b"one\ntwo\n", suffix))
    with pytest.raises(UserError, match=rf"0\.jsonl is compressed: name it .*0\.jsonl\{suffix}") as caught:
        read_all([str(file)])
    assert "\n" not in str(caught.value) and caught.value.exit_status == 2
