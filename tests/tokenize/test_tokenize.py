"""The command `python -m noloco_jax.tokenize`: the trainer's tokens, files that do not depend on how they were made."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from noloco_jax.config import load_config
from noloco_jax.data import RunData, load_tokenizer
from noloco_jax.data.source import IGNORED_LABEL
from noloco_jax.errors import UserError
from noloco_jax.tools import tokenize
from support.paths import ROOT, SHARED
from support.texts import lines_of_words

CONFIG = """
from ml_collections import ConfigDict


def get_config():
    return ConfigDict({{"data": {{"path": {path!r}, "kind": {kind!r}, "tokenizer": {tokenizer!r},
                                  "sequence_length": 32, "batch_size": 2, "shuffle_buffer": 1}},
                        "model": {{"vocab_size": 4096}}}})
"""


def write_config(folder: Path, kind: str, path: Path, tokenizer: str = "byte") -> str:
    file = folder / "config.py"
    file.write_text(CONFIG.format(path=str(path), kind=kind, tokenizer=tokenizer))
    return str(file)


@pytest.fixture
def texts(tmp_path):
    """Return a function that writes 120 documents of a kind and returns their folder."""

    def write(kind: str) -> Path:
        folder, lines = tmp_path / "texts", lines_of_words(120)
        lines[50] = ""  # a document without a token
        folder.mkdir()
        if kind == "jsonl":
            (folder / "a.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
        elif kind == "parquet":
            pq.write_table(pa.table({"text": lines}), folder / "a.parquet")
        else:
            for number, line in enumerate(lines):
                (folder / f"{number:03}.txt").write_text(line)
        return folder

    return write


def batches(config, *flags: str, count: int) -> list[dict[str, np.ndarray]]:
    """Return the first batches that a run of one replica trains on."""
    run = load_config(config, flags)
    data = RunData(run.data, seed=0, vocab_size=run.model.vocab_size)
    tokenizer = load_tokenizer(run.data.tokenizer) if data.needs_tokenizer else None
    streams = data.streams(tokenizer, {0: 0}, 1)
    try:
        return [next(streams)[0] for _ in range(count)]
    finally:
        streams.close()


def check_same_training(config: str, out: Path, count: int) -> None:
    """Assert that batches of the tokens are those of the texts, but for the labels of documents' last tokens."""
    ours = batches(config, "--config.data.kind=parquet", f"--config.data.path={out}", count=count)
    ignored = 0
    for mine, theirs in zip(ours, batches(config, count=count), strict=True):
        np.testing.assert_array_equal(mine["input_ids"], theirs["input_ids"])
        labelled = mine["labels"] != IGNORED_LABEL
        np.testing.assert_array_equal(mine["labels"][labelled], theirs["labels"][labelled])
        ignored += (~labelled).sum()
    lengths, total = [len(row) for row in tokens_of(out / "train")], sum(batch["labels"].size for batch in ours)
    assert ignored == np.searchsorted(np.cumsum(lengths), total, side="right")  # one a document


def tokens_of(folder: Path) -> list[list[int]]:
    return [row for file in sorted(folder.glob("*.parquet")) for row in pq.read_table(file)["input_ids"].to_pylist()]


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_training_reads_the_tokens_that_it_would_make_of_the_texts(kind, texts, tmp_path):
    config, out = write_config(tmp_path, kind, texts(kind)), tmp_path / "tokens"
    assert (
        tokenize.main(
            [
                f"--config={config}",
                f"--out={out}",
                "--workers=0",
                "--shard_tokens=1500",
                "--config.data.shuffle_buffer=50",
            ]
        )
        == 0
    )
    assert len(list((out / "train").glob("*.parquet"))) > 1
    check_same_training(config, out, count=60)
    assert all(tokens_of(out / "validation")), "the held-out documents are there, without empty ones"


@pytest.mark.skipif(not SHARED.exists(), reason="needs ../shared, real data")
def test_real_documents_are_tokenized_as_the_trainer_does_in_the_papers_schema(tmp_path):
    tokenizer = str(SHARED / "data/tokenizers/c4_bpe_4096")
    config, out = write_config(tmp_path, "jsonl", SHARED / "data/c4/en", tokenizer), tmp_path / "tokens"
    assert tokenize.main([f"--config={config}", f"--out={out}", "--workers=2"]) == 0
    check_same_training(config, out, count=500)
    papers = next((SHARED / "data/reddit/readme_schema/train").glob("*.parquet"))
    ours = next((out / "train").glob("*.parquet"))
    assert pq.read_schema(ours).remove_metadata() == pq.read_schema(papers).remove_metadata()
    mask = pq.read_table(ours)["attention_mask"].combine_chunks()
    assert set(mask.flatten().to_pylist()) == {1}


def test_a_killed_command_continues_to_the_same_files_with_any_number_of_workers(texts, tmp_path):
    config, whole, killed = write_config(tmp_path, "jsonl", texts("jsonl")), tmp_path / "whole", tmp_path / "killed"
    flags = [f"--config={config}", "--shard_tokens=300"]
    assert tokenize.main([*flags, f"--out={whole}", "--workers=0"]) == 0

    command = [sys.executable, "-m", "noloco_jax.tokenize", *flags, f"--out={killed}", "--workers=1"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()  # of the first file
        process.send_signal(signal.SIGKILL)
    begun = {file.name: file.stat().st_mtime_ns for file in (killed / ".train").glob("*.parquet")}
    assert begun and not (killed / "train").exists()
    assert tokenize.main([*flags, f"--out={killed}", "--workers=2"]) == 0
    files = {file.relative_to(whole): file.read_bytes() for file in whole.rglob("*.parquet")}
    assert {file.relative_to(killed): file.read_bytes() for file in killed.rglob("*.parquet")} == files
    assert len(files) > 5
    assert {name: (killed / "train" / name).stat().st_mtime_ns for name in begun} == begun, "none is written again"
    assert not list(killed.rglob("*.tmp"))


def test_an_output_of_another_tokenizer_or_setting_is_refused_and_unchanged(texts, tmp_path):
    config, out = write_config(tmp_path, "jsonl", texts("jsonl")), tmp_path / "tokens"
    assert tokenize.main([f"--config={config}", f"--out={out}", "--workers=0"]) == 0
    before = {file: file.stat().st_mtime_ns for file in out.rglob("*")}
    for flag, named in (
        ("--config.data.add_eos=False", "data.add_eos True, and now it is False"),
        ("--shard_tokens=5", "--shard_tokens 67108864, and now it is 5"),
        ("--config.data.num_workers=2", None),
    ):
        flags = [f"--config={config}", f"--out={out}", "--workers=0", flag]
        if named is None:
            assert tokenize.main(flags) == 0, "the tokens are the same"
        else:
            with pytest.raises(UserError, match=re.escape(named)):
                tokenize.main(flags)
    with (tmp_path / "texts/a.jsonl").open("a") as file:
        file.write(json.dumps({"text": "one more"}) + "\n")
    with pytest.raises(UserError, match="was begun with train documents"):
        tokenize.main([f"--config={config}", f"--out={out}"])
    assert {file: file.stat().st_mtime_ns for file in out.rglob("*")} == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--workers=-1"], "--workers=-1 is below 0"),
        (["--shard_tokens=0"], "--shard_tokens=0 is below 1"),
        (["--config.data.path=nowhere"], "data.path='nowhere': there is no such file or folder"),
        (["--config.data.tokenizer=./nowhere"], "data.tokenizer='./nowhere': there is no such folder"),
        (["--config.model.vocab_size=100"], "model.vocab_size=100 is smaller than the"),
    ],
)
def test_bad_input_is_refused_in_one_line_before_anything_is_written(flags, message, texts, tmp_path):
    config, out = write_config(tmp_path, "jsonl", texts("jsonl")), tmp_path / "tokens"
    with pytest.raises(UserError, match=re.escape(message)) as refused:
        tokenize.main([f"--config={config}", f"--out={out}", *flags])
    assert "\n" not in str(refused.value) and not out.exists()


def test_tokens_and_folders_with_other_files_are_refused(texts, tmp_path):
    config, out = write_config(tmp_path, "jsonl", texts("jsonl")), tmp_path / "tokens"
    tokenize.main([f"--config={config}", f"--out={out}", "--workers=0"])
    of_tokens = ["--config.data.kind=parquet", f"--config.data.path={out}"]
    with pytest.raises(UserError, match="holds tokens already"):
        tokenize.main([f"--config={config}", *of_tokens, f"--out={tmp_path / 'again'}"])
    with pytest.raises(UserError, match="texts holds other files: give another folder"):
        tokenize.main([f"--config={config}", f"--out={tmp_path / 'texts'}"])
