"""JSON lines of any name and compression, read as one data set, from the start or from a position."""

import gzip
import itertools
import json
import re
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from backports import zstd

from noloco_jax.config import DataConfig, SourceConfig
from noloco_jax.config.schema import Entries
from noloco_jax.data import ByteTokenizer
from noloco_jax.data.json_lines import LinePosition, LineReader, parse_text
from noloco_jax.data.run_data import open_source
from noloco_jax.errors import UserError
from support.data_makers import (
    OPTIONS,
    check_data,
    compressed,
    documents,
    open_streams,
    read_through,
    validation_batches,
    write_counting,
    write_json_lines,
)

BYTE = ByteTokenizer()


def config_for(path, **fields):
    plain = {"add_bos": False, "add_eos": False, "sequence_length": 4, "batch_size": 1}
    return DataConfig(kind="jsonl", path=str(path), **plain | fields)


def test_plain_and_compressed_files_are_read_in_sorted_order(tmp_path):
    write_json_lines(tmp_path / "b.jsonl.gz", ["wo", "rl"])
    write_json_lines(tmp_path / "a.jsonl", ["hel"])
    write_json_lines(tmp_path / "a b.jsonl.zst", ["lo ", ""])
    write_json_lines(tmp_path / "deep" / "c.json.gz", ["d"])
    write_json_lines(tmp_path / "deep" / "d.NDJSON", ["!"])
    write_json_lines(tmp_path / "notes.json", ["not this"])
    config = config_for("elsewhere", validation_path=str(tmp_path), sequence_length=11)
    (batch,) = validation_batches(config, BYTE, num_batches=5)
    assert BYTE.decode(batch["input_ids"][0]) == "lo helworld"


@pytest.mark.parametrize(
    ("names", "read"),
    [
        (("RC_2015-01.zst", "RC_2015.02.zst", "info.json"), ("RC_2015-01.zst", "RC_2015.02.zst")),
        (("RC_2015-01.zst", "LICENSE.txt"), ("RC_2015-01.zst",)),
        (("0.json", "1.json", "README.md"), ("0.json", "1.json")),
        (("part-0.gz", "part-1.gz"), ("part-0.gz", "part-1.gz")),
        (("a.jsonl", "b.json", "c.zst"), ("a.jsonl",)),
    ],
)
def test_a_folder_without_usual_names_is_read_by_rarer_ones(tmp_path, names, read):
    for name in names:
        write_json_lines(tmp_path / name, [f"{name};"])
    config = config_for("elsewhere", validation_path=str(tmp_path), sequence_length=200)
    (batch,) = validation_batches(config, BYTE, num_batches=1)
    expected = "".join(f"{name};" for name in read)
    assert BYTE.decode(batch["input_ids"][0]).rstrip("\0") == expected[:-1]  # the last token is a label


@pytest.mark.parametrize(
    ("kind", "names", "told"),
    [
        ("jsonl", ("a.txt", "settings.json"), "give data.kind=text"),
        ("jsonl", ("a.parquet", "info.json"), "give data.kind=parquet"),
        ("parquet", ("a.jsonl", "a.md"), "give data.kind=jsonl or text"),
        ("text", ("a.json.gz",), "give data.kind=jsonl"),
    ],
)
def test_a_folder_of_another_kind_is_refused_by_its_name(tmp_path, kind, names, told):
    for name in names:
        (tmp_path / name).write_bytes(b"content")
    with pytest.raises(UserError, match=rf"holds no file \*\..*, but files of another kind: {told}$"):
        check_data(replace(config_for(tmp_path), kind=kind))


def test_a_single_file_of_another_kind_is_refused_by_its_name(tmp_path):
    for name, kind in {"a.txt": "text", "b.parquet": "parquet"}.items():
        (tmp_path / name).write_bytes(b"PAR1 or prose\n\n")
        with pytest.raises(UserError, match=f"line 1 is not a JSON object .*give data.kind={kind}"):
            check_data(config_for(tmp_path / name, validation_path="elsewhere"))


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("held_out", ["", "elsewhere"])
def test_a_json_array_is_named(tmp_path, capfd, indent, held_out):
    (tmp_path / "0.jsonl").write_text(json.dumps([{"text": "a"}, {"text": "b"}], indent=indent))
    with pytest.raises(UserError, match=r"0\.jsonl, line 1 .*: the file is a JSON array: write each of its objects"):
        check_data(config_for(tmp_path, validation_path=held_out))
    assert not capfd.readouterr().err


def test_zstandard_windows_of_two_gib_are_read(tmp_path):
    """Such a frame, as `zstd --long=31` writes, needs more memory than decoders allow by default."""
    texts = random_texts(500, 900)
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    options: dict[int, int] = {zstd.CompressionParameter.window_log: 31}
    compressor = zstd.ZstdCompressor(options=options)  # without the size, the frame states the window
    frame = compressor.compress(content) + compressor.flush()
    with pytest.raises(zstd.ZstdError, match="too much memory"):
        zstd.decompress(frame)
    (tmp_path / "0.jsonl.zst").write_bytes(frame)
    lines, positions = read_all([str(tmp_path / "0.jsonl.zst")])
    assert [json.loads(line.content)["text"] for line in lines] == texts
    assert read_all([str(tmp_path / "0.jsonl.zst")], positions[300])[0] == lines[300:]


def test_one_document_in_fifty_is_held_out_of_few_or_many_files(tmp_path):
    for name, files in {"large": 2, "small": 1000}.items():
        spans = documents(1000)
        config, total = write_counting("jsonl", tmp_path / name, len(spans), files)
        config = replace(config, validation_path="", batch_size=1, sequence_length=1)
        (stream,) = open_streams(config, 1)
        trained = set(read_through(stream, 0))
        held_out = [span for span in spans if span[0] not in trained]
        assert 15 <= len(held_out) <= 25, name
        assert len(trained) + sum(count for _, count in held_out) == total


@pytest.mark.parametrize("period", [2, 10, 50])
def test_documents_that_take_turns_are_held_out_alike(tmp_path, period):
    """Held out by number modulo 50, all 40 of 2,000 would be of one turn."""
    texts = [f"{k % period}" for k in range(2000)]
    write_json_lines(tmp_path / "0.jsonl", texts)
    source = open_source(config_for(tmp_path), validation=True, seed=0, vocab_size=None)
    shard = source.open_shard(0, 0, 1, ())
    found = [parse_text(line, OPTIONS) for line in iter(map(shard.get, itertools.count()).__next__, None)]
    assert 35 <= len(found) <= 45
    assert len(set(found)) >= min(period, 20)


def test_some_held_out_document_has_text(tmp_path):
    """All but two lines are empty, and these are not in the middle of the first fifty."""
    write_json_lines(tmp_path / "0.jsonl", ["", "", "train", "", "validation", *[""] * 95])
    (batch,) = validation_batches(config_for(tmp_path, sequence_length=20), BYTE, num_batches=2)
    assert BYTE.decode(batch["input_ids"][0]).startswith("validatio")


def test_one_of_two_documents_is_held_out(tmp_path):
    for name, files in {"one": 1, "two": 2}.items():
        config, _ = write_counting("jsonl", tmp_path / name, 2, files)
        config = replace(config, validation_path="")
        check_data(config, num_replicas=1)
        with pytest.raises(UserError, match=r"num_replicas=3, but .* holds 1 train documents"):
            check_data(config, num_replicas=3)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_the_text_is_read_from_the_configured_field(tmp_path, kind):
    documents = [{"text": f"no {k}", "body": f"b{k}", "input_ids": [k], "labels": [k]} for k in range(9)]
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(documents), tmp_path / "0.parquet")
    else:
        (tmp_path / "0.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    config = replace(config_for("elsewhere", validation_path=str(tmp_path), sequence_length=17), kind=kind)
    config = replace(config, text_column="body")
    (batch,) = validation_batches(config, BYTE, num_batches=5)
    assert BYTE.decode(batch["input_ids"][0]) == "".join(f"b{k}" for k in range(9))[:17]
    missing = replace(config, text_column="content", path=str(tmp_path), validation_path="")
    with pytest.raises(UserError, match="content") as caught:
        check_data(missing)
    assert "text_column" in str(caught.value) and "body" in str(caught.value)


def test_each_source_of_a_mixture_has_its_own_text_field(tmp_path):
    sources = {}
    for name in ("body", "text"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.jsonl").write_text("".join(json.dumps({name: name[0] * 4}) + "\n" for _ in range(9)))
        sources[name] = SourceConfig("jsonl", 1.0, str(tmp_path / name), "elsewhere", text_column=name)
    config = replace(config_for(""), kind="mixture", mixture=Entries(sources))
    (stream,) = open_streams(config, 1, BYTE)
    assert {BYTE.decode(next(stream)["input_ids"][0]) for _ in range(8)} == {"bbbb", "tttt"}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{broken", r"line 3 is not a JSON object with a string \"text\" \(Expecting property name"),
        ("[" * 200_000 + "]" * 200_000, r"line 3 .* recursion"),
        ('["text"]', r"line 3 .* \(it is \['text'\]\)"),
        ('{"body": "a", "url": "b"}', r"line 3 .* \(its fields are \['body', 'url'\]\): .*data\.text_column"),
        ('{"text": "a\0b"}', r"line 3 .* \(Invalid control character"),
        ("\0\0\0{", r"line 3 .* \(Expecting value"),
        ('{"text": 3}', r"line 3 .* \(it is {'text': 3}\)"),
        ('{"text": ["' + "a" * 999 + '"]}', r"line 3 "),
        ('{"text": null}', r"line 3: text is null"),
    ],
)
def test_a_line_without_text_is_an_empty_document_that_is_told(tmp_path, capfd, line, reason):
    good = json.dumps({"text": "abcd"})
    (tmp_path / "0.jsonl").write_text("\n".join([good, good, line, good]) + "\n")
    batches = validation_batches(config_for("elsewhere", validation_path=str(tmp_path)), BYTE, num_batches=5)
    assert "".join(BYTE.decode(batch["input_ids"][0]) for batch in batches)[:11] == "abcdabcdabc"
    [told] = capfd.readouterr().err.splitlines()
    assert re.search(rf"0\.jsonl, {reason}", told) and len(told) < 1000


def test_unreadable_documents_are_counted_rather_than_listed(tmp_path, capfd):
    lines = [json.dumps({"text": "abcd" if k % 2 else None}) for k in range(300)]
    (tmp_path / "0.jsonl").write_text("\n".join(lines) + "\n")
    config = config_for("elsewhere", validation_path=str(tmp_path))
    assert len(validation_batches(config, BYTE, num_batches=500)) == 150
    told = capfd.readouterr().err.splitlines()
    assert [line for line in told if "line 1:" in line] == told[:1]
    assert len(told) == 3 and "100 unreadable documents so far" in told[2]


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
