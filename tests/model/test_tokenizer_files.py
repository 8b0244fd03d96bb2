"""The tokenizer of an exported folder, loaded by `AutoTokenizer`, against the one in training, for every family."""

import functools
import json
import os
import subprocess
import sys

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from noloco_jax.config import ModelConfig
from noloco_jax.data import load_tokenizer, makes_same_ids
from noloco_jax.errors import UserError
from noloco_jax.model import tokenizer_files
from noloco_jax.model.huggingface import save_folder
from support.model_makers import random_params
from support.paths import SHARED

TOKENIZERS = SHARED / "data" / "tokenizers"
# Letters with accents of their own, which NFC composes, and what pre-tokenizers split in different ways.
TEXTS = ["abc def", "cafe\u0301 nai\u0308ve", " two  spaces\n\nx 12345", "\u65e5\u672c \U0001f98a"]
BPES = ("c4_bpe_4096", "mistral_v1")
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "qwen3_moe": {"kind": "moe", "qk_norm": True, "num_experts": 2},
}
IDS_OF_TEXTS = """
import json, sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
print(json.dumps([tokenizer(text, add_special_tokens=False)["input_ids"] for text in json.loads(sys.argv[2])]))
"""


def found(name):
    """Return a tokenizer's name or folder; the test skips where it is not there."""
    if name == "byte":
        return name
    if not (TOKENIZERS / name).is_dir():
        pytest.skip("needs ../shared/data/tokenizers")
    return str(TOKENIZERS / name)


@functools.cache
def trained_with(name):
    """Load a tokenizer of training once: a vocabulary of 32,000 takes half a second."""
    return load_tokenizer(name)


def export(folder, name, family="qwen2"):
    """Export a tiny model of the family with a tokenizer; return the folder."""
    own = trained_with(name)
    model = ModelConfig(
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        vocab_size=own.vocab_size,
        **FAMILIES[family],
    )
    params = random_params(model)
    save_folder(folder, params, model, name, max_position_embeddings=32, bos_id=own.bos_id, eos_id=own.eos_id)
    return folder


def ids_of_texts(name):
    return [trained_with(name).encode(text).tolist() for text in TEXTS]


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *((family, "byte") for family in FAMILIES),
        *(("llama", name) for name in BPES),
        *(("qwen2", name) for name in BPES),
    ],
)
def test_transformers_makes_the_ids_of_training(family, name, tmp_path):
    name = found(name)
    loaded = AutoTokenizer.from_pretrained(export(tmp_path / "m", name, family))
    bos = trained_with(name).bos_id
    assert [loaded(text)["input_ids"] for text in TEXTS] == [[bos, *ids] for ids in ids_of_texts(name)]


@pytest.mark.parametrize(("family", "name"), [("llama", "mistral_v1"), ("llama", "byte"), ("qwen2", "c4_bpe_4096")])
def test_versions_of_transformers_before_5_know_the_names_in_a_tokenizer_configuration(family, name, tmp_path):
    """4.57.6 loads such folders; it lacks the class TokenizersBackend and fails on a list of `extra_special_tokens`."""
    saved = json.loads((export(tmp_path / "m", found(name), family) / "tokenizer_config.json").read_bytes())
    assert saved["tokenizer_class"] in ("PreTrainedTokenizerFast", "LlamaTokenizer")
    assert isinstance(saved.get("extra_special_tokens", {}), dict)


def test_own_commands_make_the_ids_of_training_from_a_qwen2_folder(tmp_path):
    name = found("c4_bpe_4096")
    assert makes_same_ids(load_tokenizer(str(export(tmp_path / "m", name))), trained_with(name))


def test_a_qwen2_folder_makes_the_ids_of_training_where_its_code_is_trusted(tmp_path):
    folder = export(tmp_path / "m", "byte")
    run = subprocess.run(  # transformers keeps the code in HF_HOME, which it reads once
        [sys.executable, "-c", IDS_OF_TEXTS, str(folder), json.dumps(TEXTS)],
        env=os.environ | {"HF_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(run.stdout) == ids_of_texts("byte")


def test_the_exported_tokenizer_of_a_qwen2_model_brings_its_code_into_another_family(tmp_path):
    given = export(tmp_path / "qwen2", "byte")
    assert (export(tmp_path / "llama", str(given), "llama") / "tokenization_from_file.py").exists()


def test_qwen2s_own_tokenizer_is_saved_without_code(tmp_path):
    """It is what AutoTokenizer makes of a Qwen 2 model's folder by itself."""
    given = export(tmp_path / "given", "byte")
    (given / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))
    assert type(AutoTokenizer.from_pretrained(given)).__name__ == "Qwen2Tokenizer"
    assert not (export(tmp_path / "m", str(given)) / "tokenization_from_file.py").exists()


def test_a_tokenizer_that_transformers_reads_back_with_other_ids_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_files, "_load_file_unchanged", lambda folder: None)
    with pytest.warns(UserWarning, match="other token ids from the exported tokenizer than data.tokenizer='byte'"):
        export(tmp_path / "m", "byte")
    advised = PreTrainedTokenizerFast.from_pretrained(tmp_path / "m")
    assert [advised(text, add_special_tokens=False)["input_ids"] for text in TEXTS] == ids_of_texts("byte")


def test_a_tokenizer_that_is_read_back_with_other_ids_is_saved_with_code_for_any_family(tmp_path, monkeypatch):
    answers = iter([False, True])
    monkeypatch.setattr(tokenizer_files, "_is_read_back", lambda trained, folder: next(answers))
    assert (export(tmp_path / "m", "byte", "llama") / "tokenization_from_file.py").exists()


def test_a_qwen2_model_has_code_whatever_the_exporting_version_of_transformers_makes_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_files, "_is_read_back", lambda trained, folder: True)
    assert (export(tmp_path / "m", "byte") / "tokenization_from_file.py").exists()


def test_a_tokenizer_that_transformers_does_not_read_back_is_told(tmp_path, monkeypatch):
    def load(name):
        raise UserError(f"{name} cannot be loaded")

    monkeypatch.setattr("noloco_jax.data.tokenizers.load_tokenizer", load)
    with pytest.warns(UserWarning, match="give --tokenizer=byte to commands"):
        export(tmp_path / "m", "byte", "llama")
