"""Hugging Face folders: every stored form loads as the same weights, and a bad folder is one error line."""

import functools
import json
import os
import shutil
import tracemalloc
import warnings

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from noloco_jax.config import ModelConfig, RopeScaling, from_dict
from noloco_jax.errors import UserError
from noloco_jax.model.huggingface import config_from_folder, load_params, save_folder
from support.model_makers import random_params

CONFIG = ModelConfig(
    hidden_size=16, intermediate_size=24, num_layers=3, num_heads=4, num_kv_heads=2, vocab_size=31, rope_theta=5e5
)
LLAMA3 = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)


def assert_bitwise_equal(actual, expected):
    def check(a, b):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype and a.shape == b.shape
        assert a.tobytes() == b.tobytes()

    jax.tree.map(check, actual, expected)


@pytest.fixture
def folder(tmp_path):
    save_folder(tmp_path / "model", random_params(CONFIG), CONFIG, max_position_embeddings=64, bos_id=1, eos_id=2)
    return tmp_path / "model"


def change_config(folder, **entries):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def change_weights(folder, change):
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_model_loads_bit_for_bit(tmp_path, tied, dtype):
    config = ModelConfig(**{**vars(CONFIG), "tie_embeddings": tied, "param_dtype": dtype, "rope_scaling": LLAMA3})
    params = random_params(config)
    save_folder(tmp_path / "model", jax.tree.map(jax.numpy.asarray, params), config, max_position_embeddings=64)
    assert from_dict({"model": config_from_folder(tmp_path / "model") | {"param_dtype": dtype}}).model == config
    assert_bitwise_equal(load_params(tmp_path / "model", config), params)


def test_transformers_reads_sizes_special_tokens_and_dtype_of_the_saved_config(folder):
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers' own imports
        from transformers import AutoConfig, GenerationConfig
    theirs = AutoConfig.from_pretrained(folder)
    assert (theirs.hidden_size, theirs.intermediate_size, theirs.num_hidden_layers) == (16, 24, 3)
    assert (theirs.num_attention_heads, theirs.num_key_value_heads, theirs.head_dim) == (4, 2, 4)
    assert (theirs.vocab_size, theirs.max_position_embeddings, theirs.tie_word_embeddings) == (31, 64, False)
    assert (theirs.hidden_act, str(theirs.dtype)) == ("silu", "float32")
    assert (theirs.bos_token_id, theirs.eos_token_id) == (1, 2)
    assert GenerationConfig.from_pretrained(folder).eos_token_id == 2


def test_shards_with_an_index_load_like_one_file(folder):
    expected = load_params(folder, CONFIG)
    tensors = sorted(load_file(folder / "model.safetensors").items())
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for number, part in enumerate([tensors[:7], tensors[7:20], tensors[20:]], start=1):
        name = f"model-{number:05}-of-00003.safetensors"
        save_file(dict(part), folder / name, metadata={"format": "pt"})
        weight_map |= {tensor: name for tensor, _ in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert_bitwise_equal(load_params(folder, CONFIG), expected)

    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-00002-of-00003\.safetensors is missing"):
        load_params(folder, CONFIG)


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.float16], ids=["bfloat16", "float16"])
def test_half_precision_weights_load_as_the_same_numbers(folder, stored):
    expected = jax.tree.map(lambda leaf: leaf.astype(stored).astype(np.float32), random_params(CONFIG))
    change_weights(folder, lambda tensors: {name: tensor.astype(stored) for name, tensor in tensors.items()})
    assert_bitwise_equal(load_params(folder, CONFIG), expected)


def test_a_stored_tied_head_and_old_rotary_buffers_are_ignored(tmp_path):
    config = ModelConfig(**{**vars(CONFIG), "tie_embeddings": True})
    params = random_params(config)
    save_folder(tmp_path / "m", params, config, max_position_embeddings=64)
    extra = {
        "lm_head.weight": params["embed"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32),
    }
    change_weights(tmp_path / "m", lambda tensors: tensors | extra)
    assert_bitwise_equal(load_params(tmp_path / "m", config), params)


def test_a_tied_head_that_differs_from_the_embedding_is_refused(tmp_path):
    """Transformers 5 multiplies by the head, and the config says the embedding."""
    config = ModelConfig(**{**vars(CONFIG), "tie_embeddings": True})
    params = random_params(config)
    save_folder(tmp_path / "m", params, config, max_position_embeddings=64)
    change_weights(tmp_path / "m", lambda tensors: tensors | {"lm_head.weight": 2 * params["embed"]})
    with pytest.raises(UserError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        load_params(tmp_path / "m", config)


def test_weights_beside_an_index_of_other_files_are_refused(folder):
    save_file({"model.norm.weight": np.ones(16, np.float32)}, folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"holds model\.safetensors, which transformers loads, and model\.s"):
        load_params(folder, CONFIG)


def test_a_tensor_in_two_files_is_refused(folder):
    save_file({"model.norm.weight": np.ones(16, np.float32)}, folder / "more.safetensors")
    index = {"weight_map": {"model.norm.weight": "more.safetensors", "lm_head.weight": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"the tensor model\.norm\.weight is in another file of the folder too"):
        load_params(folder, CONFIG)


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
def test_a_row_that_is_not_finite_is_refused_by_tensor_and_row(folder, stored):
    """The row of a token that no text has leaves every loss finite."""

    def with_a_hole(tensors):
        tensors["model.embed_tokens.weight"][17, 3] = np.nan
        tensors["model.embed_tokens.weight"][29] = np.inf
        return {name: tensor.astype(stored) for name, tensor in tensors.items()}

    change_weights(folder, with_a_hole)
    with pytest.raises(UserError, match=r"model\.embed_tokens\.weight has .* not finite in 2 of 31 rows, .* row 17"):
        load_params(folder, CONFIG)


def test_rope_settings_are_read_under_old_and_new_names(folder):
    stored = json.loads((folder / "config.json").read_text())
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    bare = {name: value for name, value in stored.items() if not name.startswith("rope")}
    forms = {
        "new": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}},
        "old": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}},
        "oldest": {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}},
    }
    for form in forms.values():
        (folder / "config.json").write_text(json.dumps(bare | form))
        fields = config_from_folder(folder)
        assert fields["rope_theta"] == 5e5 and fields["rope_scaling"] == scaling
    (folder / "config.json").write_text(json.dumps(bare))
    fields = config_from_folder(folder)
    assert fields["rope_theta"] == 10000.0 and fields["rope_scaling"] is None


def test_neither_loading_nor_saving_holds_a_second_copy(tmp_path):
    config = ModelConfig(hidden_size=128, intermediate_size=512, num_layers=16, vocab_size=500)
    params = random_params(config)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))

    def peak(action):
        tracemalloc.start()
        try:
            action()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    save = functools.partial(save_folder, tmp_path / "m", params, config, max_position_embeddings=64)
    assert peak(save) < 0.1 * size
    assert peak(lambda: load_params(tmp_path / "m", config)) < 1.1 * size


def test_saving_overwrites_nothing_and_leaves_no_partial_folder(folder, tmp_path):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(UserError, match="already holds something"):
        save_folder(folder, random_params(CONFIG), CONFIG, max_position_embeddings=64)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    broken = random_params(CONFIG)
    del broken["blocks"]["down"]
    with pytest.raises(KeyError):
        save_folder(tmp_path / "new", broken, CONFIG, max_position_embeddings=64)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2' cannot be imported: llama, mistral, qwen2, qwen3, qwen3_moe can"),
        ({"attention_bias": True}, "attention_bias=True is not False"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not 'silu'"),
        ({"head_dim": 8}, "its head_dim is 8, and model.head_dim=None"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type='yarn' is neither 'default' nor 'llama3'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "without low_freq_factor, high_freq_factor"),
        ({"hidden_size": 32, "head_dim": 8}, "its hidden_size is 32, and model.hidden_size=16"),
        ({"num_key_value_heads": 4}, "its num_kv_heads is 4, and model.num_kv_heads=2"),
        ({"rope_parameters": None, "rope_theta": 1e4}, "its rope_theta is 10000.0, and model.rope_theta=500000.0"),
    ],
)
def test_another_architecture_or_model_is_refused_by_name_and_numbers(folder, entries, message):
    change_config(folder, **entries)
    with pytest.raises(UserError, match=message):
        load_params(folder, CONFIG)


def test_incomplete_or_foreign_weights_are_refused_by_name(folder):
    whole = load_file(folder / "model.safetensors")
    path = folder / "model.safetensors"

    def refusal(tensors):
        save_file(tensors, path)
        with pytest.raises(UserError) as caught:
            load_params(folder, CONFIG)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    norm, query = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"
    assert "1 of 30 tensors are missing, such as model.norm.weight" in refusal(
        {name: tensor for name, tensor in whole.items() if name != norm}
    )
    assert f"{query} has shape (16, 8), and its config.json makes it (16, 16)" in refusal(
        whole | {query: np.ones((16, 8), np.float32)}
    )
    assert "the tensor extra is not one of a llama with 3 layers" in refusal(whole | {"extra": np.ones(1, np.float32)})
    assert f"the tensor {norm} is I32: convert it" in refusal(whole | {norm: np.ones(16, np.int32)})


def test_missing_and_broken_files_are_refused_by_name(folder, tmp_path):
    with pytest.raises(UserError, match=r"nowhere/config\.json is missing"):
        config_from_folder(tmp_path / "nowhere")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(UserError, match=r"model\.safetensors is not a whole safetensors file"):
        load_params(folder, CONFIG)
    path.unlink()
    with pytest.raises(UserError, match=r"model\.safetensors is missing"):
        load_params(folder, CONFIG)
    shutil.copy(__file__, folder / "config.json")
    with pytest.raises(UserError, match=r"config\.json is not JSON"):
        load_params(folder, CONFIG)


@pytest.mark.parametrize("kind", ["there", "link", "here"])
def test_an_existing_empty_folder_is_filled(tmp_path, monkeypatch, kind):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    monkeypatch.chdir(tmp_path / "there")
    save_folder("." if kind == "here" else tmp_path / kind, random_params(CONFIG), CONFIG, max_position_embeddings=64)
    assert {path.name for path in (tmp_path / "there").iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors")
    }
    assert (tmp_path / "link").is_symlink() and config_from_folder(tmp_path / "there")
