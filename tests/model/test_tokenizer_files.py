"""The tokenizer of an exported folder, loaded by `AutoTokenizer`, against the one in training, for every family."""

import functools
import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from noloco_jax.config import ModelConfig
from noloco_jax.data import ByteTokenizer, load_tokenizer
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
    save_folder(folder, params, model, own, max_position_embeddings=32, bos_id=own.bos_id, eos_id=own.eos_id)
    return folder


def ids_of_texts(name):
    return [trained_with(name).encode(text).tolist() for text in TEXTS]


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *((family, "byte") for family in FAMILIES if family != "qwen2"),
        *(("llama", name) for name in BPES),
    ],
)
def test_transformers_makes_the_ids_of_training(family, name, tmp_path):
    name = found(name)
    loaded = AutoTokenizer.from_pretrained(export(tmp_path / "m", name, family))
    bos = trained_with(name).bos_id
    assert [loaded(text)["input_ids"] for text in TEXTS] == [[bos, *ids] for ids in ids_of_texts(name)]


@pytest.mark.parametrize(("family", "name"), [("llama", "mistral_v1"), ("qwen3", "byte")])
def test_every_version_of_transformers_knows_the_class_of_the_tokenizer(family, name, tmp_path):
    """4.57.6 lacks the class TokenizersBackend and fails on a list of `extra_special_tokens`."""
    saved = json.loads((export(tmp_path / "m", found(name), family) / "tokenizer_config.json").read_bytes())
    assert saved["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "extra_special_tokens" not in saved


def test_qwen2s_own_tokenizer_is_read_back_as_it(tmp_path):
    """It is what AutoTokenizer makes of a Qwen 2 model's folder by itself."""
    Qwen2Tokenizer.from_pretrained(export(tmp_path / "bytes", "byte", "llama")).save_pretrained(tmp_path / "given")
    folder = export(tmp_path / "m", str(tmp_path / "given"))
    assert type(AutoTokenizer.from_pretrained(folder)).__name__ == "Qwen2Tokenizer"


@pytest.mark.parametrize("name", ["byte", *BPES])
def test_a_qwen2_model_with_another_tokenizer_is_told_how_to_load_it(tmp_path, name):
    """AutoTokenizer makes a Qwen2Tokenizer of any tokenizer beside a Qwen 2 model, with other ids."""
    name = found(name)
    with pytest.warns(UserWarning, match="as Qwen2Tokenizer, which makes other token ids .*PreTrainedTokenizerFast"):
        export(tmp_path / "m", name)
    advised = PreTrainedTokenizerFast.from_pretrained(tmp_path / "m")
    assert [advised(text, add_special_tokens=False)["input_ids"] for text in TEXTS] == ids_of_texts(name)


def test_a_tokenizer_that_is_read_back_without_its_bos_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_files, "_config_entries", lambda *_: {})
    with pytest.warns(UserWarning, match="as TokenizersBackend, which makes other token ids"):
        export(tmp_path / "m", "byte", "llama")


def test_an_export_keeps_special_tokens_and_template_and_adds_no_id(tmp_path):
    given = Path(export(tmp_path / "given", "byte", "llama"))
    saved = json.loads((given / "tokenizer_config.json").read_bytes())
    saved |= {"unk_token": "<not in the file>", "mask_token": "<|pad|>", "auto_map": {"AutoTokenizer": [None, "a.B"]}}
    (given / "tokenizer_config.json").write_text(json.dumps(saved | {"extra_special_tokens": ["<|pad|>", "<none>"]}))
    (given / "chat_template.jinja").write_text("{{ messages }}")
    loaded = AutoTokenizer.from_pretrained(export(tmp_path / "m", str(given), "llama"))
    assert (loaded.mask_token, loaded.extra_special_tokens, loaded.chat_template) == (
        "<|pad|>",
        ["<|pad|>"],
        "{{ messages }}",
    )
    assert len(loaded) == ByteTokenizer.vocab_size
