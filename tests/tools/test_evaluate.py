"""`python -m noloco_jax.evaluate` on a run and on a Hugging Face folder."""

import dataclasses
import json
import math

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from noloco_jax.checkpoint import given_model
from noloco_jax.config import DataConfig, MeshConfig, ModelConfig, SourceConfig, TrainConfig
from noloco_jax.data import ByteTokenizer, RunData
from noloco_jax.errors import UserError
from noloco_jax.model.huggingface import save_folder
from noloco_jax.model.llama import Llama
from noloco_jax.tools import evaluate
from support.data_makers import write_c4
from support.model_makers import make_run, random_params

TEXTS = ("a first document", "Zweites, länger", "3")
MODEL = ModelConfig(hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    for split in ("train", "validation"):
        (path / f"{split}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return TrainConfig(num_replicas=2, model=MODEL, data=DataConfig(kind="jsonl", path=str(path), sequence_length=16))


@pytest.fixture(scope="module")
def run(config, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("run")
    return workdir, make_run(workdir, config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("folder") / "model"
    save_folder(folder, random_params(MODEL, 0.3), MODEL, max_position_embeddings=16, bos_id=256, eos_id=257)
    return folder


def rows(capsys, *flags):
    """Return (perplexity, bits per byte, tokens, name) of each line of the table."""
    assert evaluate.main(list(flags)) == 0
    return [line.split(maxsplit=3) for line in capsys.readouterr().out.splitlines()[2:]]


def expected(params, *texts, length=16):
    """Score the bytes of the texts, each between BOS and EOS, in sequences cut by hand: every token but the first."""
    ids = [i for text in texts for i in (256, *text.encode(), 257)]
    logits = jax.jit(lambda ids: Llama.from_params(MODEL, params)(ids))
    loss = 0.0
    for start in range(0, len(ids) - 1, length):
        row = ids[start : start + length]
        labels = ids[start + 1 : start + length + 1]
        scores = np.asarray(logits(np.array([row])), np.float64)[0][: len(labels)]
        loss -= sum(s[i] - np.log(np.exp(s - s.max()).sum()) - s.max() for s, i in zip(scores, labels, strict=True))
    num_bytes = sum(len(text.encode()) for text in texts)
    return loss / (len(ids) - 1), loss / math.log(2) / num_bytes, len(ids) - 1


def assert_row(row, expectation):
    loss, bits, tokens = expectation
    assert float(row[0]) == pytest.approx(math.exp(loss), rel=1e-3)
    assert float(row[1]) == pytest.approx(bits, rel=1e-3)
    assert int(row[2]) == tokens


def test_a_folder_is_scored_on_every_token_of_a_text_once(folder, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("a text of more than two sequences of sixteen tokens")
    (row,) = rows(capsys, f"--model={folder}", "--tokenizer=byte", f"--data={tmp_path / 'text.txt'}")
    assert_row(row, expected(random_params(MODEL, 0.3), "a text of more than two sequences of sixteen tokens"))
    assert row[3] == str(tmp_path / "text.txt")


def test_a_run_is_scored_on_its_validation_documents_as_the_mean_or_a_replica(run, capsys):
    workdir, replicas = run
    mean = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *replicas)
    for params, flags in [(mean, []), (replicas[1], ["--replica=1"])]:
        (row,) = rows(capsys, f"--workdir={workdir}", *flags)
        assert_row(row, expected(params, *TEXTS))
        assert row[3] == "validation of data"


def test_every_text_has_a_line_in_the_format_of_its_name(run, tmp_path, capsys):
    workdir, replicas = run
    (tmp_path / "text.txt").write_text(TEXTS[0])
    (tmp_path / "lines.jsonl").write_text(json.dumps({"text": TEXTS[1]}))
    tokens = [7, 8, 9, 10]
    pq.write_table(pa.table({"input_ids": [tokens[:-1]], "label": [tokens[1:]]}), tmp_path / "ids.parquet")
    paths = [str(tmp_path / name) for name in ("text.txt", "lines.jsonl", "ids.parquet")]
    found = rows(capsys, f"--workdir={workdir}", "--replica=0", *(f"--data={path}" for path in paths))
    assert [row[3] for row in found] == paths
    for row, text in zip(found[:2], TEXTS[:2], strict=True):
        assert_row(row, expected(replicas[0], text))
    assert int(found[2][2]) == 3


def test_a_folder_of_files_is_read_whole_in_the_run_s_format(run, tmp_path, capsys):
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.jsonl").write_text(json.dumps({"body": text}))
    (row,) = rows(capsys, f"--workdir={run[0]}", "--replica=0", f"--data={tmp_path}", "--text_column=body")
    assert_row(row, expected(run[1][0], *TEXTS))


def test_each_source_of_a_mixture_has_a_line(config, tmp_path, capsys):
    one = SourceConfig(kind="jsonl", path=config.data.path, weight=1.0)
    mixture = dataclasses.replace(config.data, kind="mixture", path="", mixture={"web": one, "books": one})
    [first, _] = make_run(tmp_path, dataclasses.replace(config, data=mixture))
    found = rows(capsys, f"--workdir={tmp_path}", "--replica=0")
    assert [row[3] for row in found] == ["validation of data.mixture.books", "validation of data.mixture.web"]
    for row in found:
        assert_row(row, expected(first, *TEXTS))


def test_tokens_end_a_long_text_after_about_as_many(folder, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("x" * 30_000)
    flags = [f"--model={folder}", "--tokenizer=byte", f"--data={tmp_path / 'text.txt'}"]
    ((_, _, tokens, _),) = rows(capsys, *flags, "--tokens=1000")
    assert int(tokens.replace(",", "")) == 992


def test_bits_per_byte_of_short_documents_count_the_bytes_that_were_scored_where_tokens_end_early(
    folder, tmp_path, capsys
):
    """A document of six bytes has eight tokens, BOS and EOS among them."""
    (tmp_path / "short.jsonl").write_text((json.dumps({"text": "abcdef"}) + "\n") * 1000)
    flags = [f"--model={folder}", "--tokenizer=byte", f"--data={tmp_path / 'short.jsonl'}"]
    ((perplexity, bits, _, _),) = rows(capsys, *flags, "--tokens=100")
    assert float(bits) == pytest.approx(math.log2(float(perplexity)) * 8 / 6, rel=5e-3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "what to evaluate on is missing: give --data=PATH"),
        (["--data=nowhere.txt"], "--data='nowhere.txt': there is no such file or folder"),
        (["--data=empty.txt"], "--data='empty.txt' holds no text"),
        (["--data=text.txt", "--kind=jsonl"], "text.txt"),
        (["--data=text.txt", "--tokens=0"], "--tokens=0 is below 1"),
        (["--data=text.txt", "--sequence_length=0"], "--sequence_length=0 is below 1"),
        (["--data=text.txt", "--replica=0"], "--replica=0 is of a run"),
        (["--data=large.parquet"], "259"),
        (["--data=lines.jsonl"], "give --text_column the name of the text's"),
    ],
)
def test_wrong_input_is_refused_in_one_line_before_weights_are_read(folder, tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(given_model, "load_params", lambda *_: pytest.fail("weights are read"))
    (tmp_path / "text.txt").write_text("a text that is no JSON")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "lines.jsonl").write_text(json.dumps({"body": "a text"}))
    pq.write_table(pa.table({"input_ids": [[1, 300]], "label": [[300, 1]]}), tmp_path / "large.parquet")
    with pytest.raises(UserError, match=message) as caught:
        evaluate.main([f"--model={folder}", "--tokenizer=byte", *flags])
    assert "\n" not in str(caught.value)


def test_a_text_needs_a_tokenizer_and_token_ids_do_not(folder, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("a text")
    with pytest.raises(UserError, match="has no tokenizer: give --tokenizer"):
        evaluate.main([f"--model={folder}", f"--data={tmp_path / 'text.txt'}"])
    pq.write_table(pa.table({"text": ["a text"]}), tmp_path / "text.parquet")
    with pytest.raises(UserError, match="has no tokenizer: give --tokenizer"):
        evaluate.main([f"--model={folder}", f"--data={tmp_path / 'text.parquet'}"])
    pq.write_table(pa.table({"input_ids": [[1, 2]], "label": [[2, 3]]}), tmp_path / "ids.parquet")
    ((_, bits, tokens, _),) = rows(capsys, f"--model={folder}", f"--data={tmp_path / 'ids.parquet'}")
    assert (bits, tokens) == ("unknown", "2")


@pytest.fixture
def text_run(tmp_path):
    """A run of one text, a fiftieth of whose pieces of 256 bytes is held out."""
    (tmp_path / "book.txt").write_text("".join(f"{number:07}\n" for number in range(6400)))
    data = DataConfig(kind="text", path=str(tmp_path / "book.txt"), sequence_length=16, add_bos=False, add_eos=False)
    config = TrainConfig(num_replicas=2, model=MODEL, data=data)
    make_run(tmp_path / "run", config, **RunData(data, seed=config.seed).facts(ByteTokenizer()))
    return tmp_path


def test_another_sequence_length_evaluates_on_the_same_documents(text_run, capsys):
    """Pieces that follow the new length would take training text for held out."""
    found = [rows(capsys, f"--workdir={text_run / 'run'}", *flags)[0] for flags in ([], ["--sequence_length=160"])]
    assert [tokens for _, _, tokens, _ in found] == ["1,023"] * 2  # 4 pieces
    assert found[0][0] != found[1][0]


def test_data_that_have_changed_since_training_are_told(text_run, capsys):
    evaluate.main([f"--workdir={text_run / 'run'}"])
    assert "warning" not in capsys.readouterr().err
    (text_run / "book.txt").write_text("".join(f"{number:07}\n" for number in range(6500)))
    evaluate.main([f"--workdir={text_run / 'run'}"])
    assert "warning: the data are not those that the run last trained on (bytes: 51200 then, 52000" in (
        capsys.readouterr().err
    )


def test_a_text_is_one_document_whatever_the_sequence_length_and_the_tokenizer(run, folder, text_run, capsys):
    flags = [f"--data={text_run / 'book.txt'}", "--tokens=1000000"]
    for length, model in ((16, [f"--workdir={run[0]}"]), (48, [f"--model={folder}", "--tokenizer=byte"])):
        (row,) = rows(capsys, *model, *flags, f"--sequence_length={length}")
        assert row[2] == "51,201"


def test_c4_is_read_by_its_name_and_a_file_without_suffix_is_text(run, tmp_path, capsys):
    write_c4(tmp_path / "c4", [["a shard"]])
    (shard,) = (tmp_path / "c4").iterdir()
    (tmp_path / "LICENSE").write_text("a licence")
    found = rows(capsys, f"--workdir={run[0]}", "--replica=0", f"--data={shard}", f"--data={tmp_path / 'LICENSE'}")
    for row, text in zip(found, ("a shard", "a licence"), strict=True):
        assert_row(row, expected(run[1][0], text))


def test_the_model_s_settings_of_training_do_not_stand_in_the_way(config, tmp_path, capsys):
    model, mesh = dataclasses.replace(MODEL, remat="stage"), MeshConfig(stage=2)
    stages = dataclasses.replace(config, model=model, mesh=mesh)
    [first, _] = make_run(tmp_path, stages)
    (row,) = rows(capsys, f"--workdir={tmp_path}", "--replica=0")
    assert_row(row, expected(first, *TEXTS))
