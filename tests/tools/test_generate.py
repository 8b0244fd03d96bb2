"""`python -m noloco_jax.generate` from a run and from a Hugging Face folder."""

import dataclasses

import jax
import numpy as np
import pytest

from noloco_jax.config import DataConfig, ModelConfig, TrainConfig
from noloco_jax.data import ByteTokenizer
from noloco_jax.errors import UserError
from noloco_jax.model import decode
from noloco_jax.model.huggingface import save_folder
from noloco_jax.tools import generate
from support.model_makers import make_run, random_params

CONFIG = TrainConfig(
    num_replicas=2,
    model=ModelConfig(hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("run")
    return workdir, make_run(workdir, CONFIG)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("folder") / "model"
    save_folder(folder, random_params(CONFIG.model), CONFIG.model, max_position_embeddings=64, bos_id=256, eos_id=257)
    return folder


def printed(capsys, *flags):
    assert generate.main(list(flags)) == 0
    return capsys.readouterr().out.removesuffix("\n")


def continuation(params, text, **kwargs):
    prompt_BP = np.array([[256, *text.encode()]])
    ids_BS = decode.generate(CONFIG.model, params, prompt_BP, max_new_tokens=9, eos_id=257, **kwargs)
    return ByteTokenizer().decode(np.asarray(ids_BS)[0])


def test_a_replica_or_by_default_their_mean_continues_the_prompt(run, capsys):
    workdir, replicas = run
    mean = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *replicas)
    for params, flags in [(replicas[0], ["--replica=0"]), (replicas[1], ["--replica=1"]), (mean, [])]:
        text = printed(capsys, f"--workdir={workdir}", "--prompt=def f", "--max_new_tokens=9", *flags)
        assert text == continuation(params, "def f") and text.startswith("def f")


def test_a_folder_continues_the_prompt_and_the_seed_decides_the_draws(folder, capsys):
    flags = [f"--model={folder}", "--tokenizer=byte", "--prompt=x", "--max_new_tokens=9"]
    assert printed(capsys, *flags) == continuation(random_params(CONFIG.model), "x")
    drawn = [printed(capsys, *flags, "--temperature=5", "--top_k=40", f"--seed={seed}") for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_an_empty_prompt_starts_from_the_beginning_of_text(folder, capsys):
    text = printed(capsys, f"--model={folder}", "--tokenizer=byte", "--max_new_tokens=9")
    assert text == continuation(random_params(CONFIG.model), "")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max_new_tokens=0"], "--max_new_tokens=0 is below 1"),
        (["--temperature=-1"], r"--temperature=-1\.0 is neither 0 nor 1e-06 or more"),
        (["--temperature=nan"], "--temperature=nan is neither 0 nor"),
        (["--temperature=1e-40"], "--temperature=1e-40 is neither 0 nor"),
        (["--top_k=0"], "--top_k=0 is below 1"),
        (["--top_k=260"], "--top_k=260 is more than the vocabulary of 259"),
        (["--seed=-1"], "--seed=-1 is below 0"),
        (["--replica=0"], "--replica=0 is of a run"),
        (["--workdir=x"], "not allowed with argument"),
    ],
)
def test_wrong_flags_are_refused_in_one_line(folder, flags, message):
    with pytest.raises(UserError, match=message) as caught:
        generate.main([f"--model={folder}", "--tokenizer=byte", *flags])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["run", "folder"])
def test_more_tokens_than_a_training_sequence_warn(run, folder, capsys, source):
    length = CONFIG.data.sequence_length if source == "run" else 64
    flags = [f"--workdir={run[0]}"] if source == "run" else [f"--model={folder}", "--tokenizer=byte"]
    prompt = "x" * (length - 3)  # and a BOS
    for new in ([], ["--max_new_tokens=2"]):  # by default as many as fit
        assert len(printed(capsys, *flags, f"--prompt={prompt}", *new)) >= len(prompt)
    with pytest.warns(UserWarning, match=f"{length - 2} tokens and --max_new_tokens=3 are more than the {length} tok"):
        printed(capsys, *flags, f"--prompt={prompt}", "--max_new_tokens=3")


def test_a_model_smaller_than_the_tokenizer_is_refused(tmp_path):
    model = dataclasses.replace(CONFIG.model, vocab_size=100)
    save_folder(tmp_path / "m", random_params(model), model, max_position_embeddings=64, bos_id=256, eos_id=257)
    with pytest.raises(UserError, match=r"vocab_size=100 is smaller than the 259 ids"):
        generate.main([f"--model={tmp_path / 'm'}", "--tokenizer=byte"])


def test_a_run_on_token_ids_asks_for_a_tokenizer(tmp_path, capsys):
    tokens = dataclasses.replace(CONFIG, data=DataConfig(kind="parquet", path=str(tmp_path / "no longer there")))
    [first, second] = make_run(tmp_path / "run", tokens)
    with pytest.raises(UserError, match="read token ids, or its data are no longer there to tell: give --tokenizer"):
        generate.main([f"--workdir={tmp_path / 'run'}", "--prompt=def f"])
    flags = f"--workdir={tmp_path / 'run'}", "--replica=1", "--tokenizer=byte", "--prompt=def f", "--max_new_tokens=9"
    assert printed(capsys, *flags) == continuation(second, "def f") != continuation(first, "def f")


def test_a_run_without_beginning_of_text_needs_a_prompt(tmp_path):
    config = dataclasses.replace(CONFIG, data=DataConfig(add_bos=False))
    make_run(tmp_path, config)
    with pytest.raises(UserError, match="--prompt='' is no token"):
        generate.main([f"--workdir={tmp_path}"])
