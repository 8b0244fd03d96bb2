"""Families of Llama against figures of transformers, and their parts on every layout.

`golden/README.md` says how the figures were made.
"""

import dataclasses
import functools
import json
import os
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from noloco_jax.config import ModelConfig, from_dict
from noloco_jax.errors import UserError
from noloco_jax.model import architecture
from noloco_jax.model.attention import causal_attention
from noloco_jax.model.huggingface import config_from_folder, load_params, save_folder
from noloco_jax.model.llama import Llama
from support.model_makers import random_params
from support.paths import GOLDEN

FAMILIES = GOLDEN / "families"
NAMES = ("llama2", "llama3", "llama3_1", "smollm", "mistral", "qwen2", "qwen2_window", "qwen3")
NAMES += ("qwen3_moe", "qwen3_moe_plain")
# All parts that can be combined.
EVERYTHING = ModelConfig(
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=64,
    head_dim=12,
    qkv_bias=True,
    qk_norm=True,
    sliding_window=5,
)


@functools.cache
def golden(name: str) -> dict[str, np.ndarray]:
    return load_file(FAMILIES / name / "golden.safetensors")


@functools.cache
def model_of(name: str) -> ModelConfig:
    return from_dict({"model": config_from_folder(FAMILIES / name)}).model


def in_our_layout(name: str) -> Any:
    """Convert gradients from transformers' names and kernels [out, in] to our layout, without the importer."""
    theirs = {path.removeprefix("grad.model."): x for path, x in golden(name).items() if path.startswith("grad.")}
    for path in [path for path in theirs if path.endswith("gate_up_proj")]:  # (E, 2F, D)
        gate, up = np.split(theirs.pop(path), 2, axis=1)
        theirs |= {path.replace("gate_up", part): x for part, x in {"gate": gate, "up": up}.items()}
    blocks: dict[str, list[np.ndarray]] = {}
    for layer in range(2):
        for path, x in sorted(theirs.items()):
            if path.startswith(f"layers.{layer}."):
                *_, module, part = path.split(".")
                module = part if module == "experts" else "router" if module == "gate" else module
                ours = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}.get(module)
                ours = ours or module.removesuffix("_proj") + ("_bias" if part == "bias" else "")
                blocks.setdefault(ours, []).append(x.swapaxes(-1, -2) if x.ndim > 1 else x)
    ours = {"embed": theirs["embed_tokens.weight"], "norm": theirs["norm.weight"]}
    if "grad.lm_head.weight" in theirs:
        ours["head"] = theirs["grad.lm_head.weight"].T
    return ours | {"blocks": {part: np.stack(layers) for part, layers in blocks.items()}}


@functools.cache
def ours(name: str) -> Any:
    """Return the logits, the loss and the gradient of a family's weights and batch, by one program."""

    @jax.jit
    def results(params, batch):
        (value, _), gradient = jax.value_and_grad(functools.partial(architecture.loss, model_of(name)), has_aux=True)(
            params, batch
        )
        return architecture.from_params(model_of(name), params)(batch["input_ids"]), value, gradient

    batch = {part: golden(name)[part] for part in ("input_ids", "labels")}
    return results(load_params(FAMILIES / name, model_of(name)), batch)


@pytest.mark.parametrize("name", NAMES)
def test_logits_match_transformers(name):
    logits_BTV, _, _ = ours(name)
    np.testing.assert_allclose(logits_BTV, golden(name)["logits"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_and_every_gradient_match_transformers(name):
    _, value, gradient = ours(name)
    np.testing.assert_allclose(value, golden(name)["loss"], rtol=1e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-6), gradient, in_our_layout(name))


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_round_trips_bit_for_bit_and_transformers_reads_it_alike(name, tmp_path):
    config = model_of(name)
    save_folder(tmp_path / "out", load_params(FAMILIES / name, config), config, max_position_embeddings=256)
    theirs, ours = (load_file(folder / "model.safetensors") for folder in (FAMILIES / name, tmp_path / "out"))
    assert ours.keys() == theirs.keys()
    for path, x in theirs.items():
        assert x.tobytes() == ours[path].tobytes() and x.shape == ours[path].shape
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers' own imports
        from transformers import AutoConfig
    given, read = (AutoConfig.from_pretrained(folder) for folder in (FAMILIES / name, tmp_path / "out"))
    assert type(read) is type(given) and read.architectures == given.architectures
    for entry in ("head_dim", "sliding_window", "use_sliding_window", "layer_types", "rope_parameters", "rms_norm_eps"):
        mine, wanted = getattr(read, entry, None), getattr(given, entry, None)
        if entry == "head_dim":
            wanted = wanted or given.hidden_size // given.num_attention_heads
        assert mine == wanted, entry


@pytest.mark.parametrize(
    ("name", "entries", "message"),
    [
        ("mistral", {"num_key_value_heads": None}, "has no num_key_value_heads: it does not describe a mistral"),
        (
            "qwen2_window",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "1 of 2 layers have a sliding window",
        ),
        ("qwen2_window", {"layer_types": None, "max_window_layers": 1}, "1 of 2 layers have a sliding window"),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, "1 of 2 layers have a sliding window"),
        ("mistral", {"layer_types": ["full_attention"] * 2}, "0 of 2 layers have a sliding window"),
        ("qwen3", {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    ],
)
def test_unsupported_features_of_a_family_are_refused(name, entries, message, tmp_path):
    theirs = json.loads((FAMILIES / name / "config.json").read_text()) | entries
    (tmp_path / "config.json").write_text(json.dumps(theirs))
    with pytest.raises(UserError, match=re.escape(message)):
        config_from_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "without", "found"),
    [
        ("mistral", "sliding_window", {"sliding_window": 4096}),
        ("qwen3", "head_dim", {"head_dim": 128}),
        ("qwen2_window", "layer_types", {"sliding_window": 7}),
        ("mistral", "head_dim", {"head_dim": None}),
    ],
)
def test_a_missing_config_entry_has_transformers_default(name, without, found, tmp_path):
    theirs = json.loads((FAMILIES / name / "config.json").read_text())
    del theirs[without]
    (tmp_path / "config.json").write_text(json.dumps(theirs))
    read = from_dict({"model": config_from_folder(tmp_path)}).model
    assert {field: getattr(read, field) for field in found} == found


def test_an_entry_of_null_has_transformers_default(tmp_path):
    theirs = json.loads((FAMILIES / "qwen3_moe" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(theirs | {"mlp_only_layers": None}))
    assert config_from_folder(tmp_path) == config_from_folder(FAMILIES / "qwen3_moe")


@pytest.mark.parametrize(
    ("name", "entries", "without"),
    [
        ("llama3_1", {"original_max_position_embeddings": 5}, ""),
        ("llama3_1", {"original_max_position_embeddings": 5}, "original_max_position_embeddings"),
        ("qwen2_window", {"sliding_window": None, "layer_types": None}, ""),
        ("qwen3", {"hidden_act": "swish"}, ""),
    ],
)
def test_entries_are_read_as_transformers_reads_them(name, entries, without, tmp_path):
    theirs = json.loads((FAMILIES / name / "config.json").read_text())
    theirs["rope_parameters"].pop(without, None)
    (tmp_path / "config.json").write_text(json.dumps(theirs | entries))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers' own imports
        from transformers import AutoConfig
    expected: Any = AutoConfig.from_pretrained(tmp_path)
    expected.standardize_rope_params()  # as its model does, with another result than at loading
    read = config_from_folder(tmp_path)
    assert read["sliding_window"] == getattr(expected, "sliding_window", None)
    original = expected.rope_parameters.get("original_max_position_embeddings")
    assert (read["rope_scaling"] or {}).get("original_max_position_embeddings") == original


def test_a_llama_whose_heads_do_not_divide_its_width_is_exported_as_a_mistral_that_transformers_loads(tmp_path):
    """LlamaConfig of transformers 5 refuses it; a Mistral without a window computes the same."""
    config = dataclasses.replace(model_of("llama3"), hidden_size=30, num_heads=4, num_kv_heads=2, head_dim=8)
    params = random_params(config)
    save_folder(tmp_path / "m", params, config, max_position_embeddings=64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers' own imports
        from transformers import AutoConfig
    theirs: Any = AutoConfig.from_pretrained(tmp_path / "m")
    assert (theirs.hidden_size, theirs.num_attention_heads, theirs.head_dim) == (30, 4, 8)
    assert theirs.model_type == "mistral" and theirs.sliding_window is None
    assert from_dict({"model": config_from_folder(tmp_path / "m")}).model == config


@pytest.mark.parametrize("documents", [False, True])
def test_window_attention_on_other_devices_equals_the_cpus(monkeypatch, documents):
    """Run JAX's own attention, which other devices use, on the CPU."""
    rng = np.random.default_rng(0)
    q_BTHK, k_BTHK, v_BTHK = (jnp.asarray(rng.standard_normal((2, 20, 2, 8)), jnp.float32) for _ in range(3))
    segments_BT = jnp.asarray(np.arange(40).reshape(2, 20) // 7, jnp.int32) if documents else None
    on_cpus, elsewhere = (jax.jit(lambda *arguments: causal_attention(*arguments, window=4)) for _ in range(2))
    expected_BTHK = on_cpus(q_BTHK, k_BTHK, v_BTHK, segments_BT)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    np.testing.assert_allclose(elsewhere(q_BTHK, k_BTHK, v_BTHK, segments_BT), expected_BTHK, atol=2e-6)


def test_cudnn_gets_the_window_as_a_length_or_with_documents_in_the_mask(monkeypatch):
    given: dict[str, Any] = {}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *_, **options: given.update(options))
    x_BTHK = jnp.zeros((1, 4, 2, 8), jnp.bfloat16)
    causal_attention(x_BTHK, x_BTHK, x_BTHK, None, 2)
    assert (given["implementation"], given["local_window_size"], given["mask"]) == ("cudnn", (1, 0), None)
    causal_attention(x_BTHK, x_BTHK, x_BTHK, jnp.zeros((1, 4), jnp.int32), 2)
    assert given["local_window_size"] is None
    np.testing.assert_array_equal(given["mask"][0, 0] & np.tri(4, dtype=bool), np.tri(4) - np.tri(4, k=-2))


def test_the_memory_estimate_grows_by_four_arrays_of_the_heads_extra_width():
    plain = dataclasses.replace(EVERYTHING, head_dim=None)
    assert Llama.kept_numbers(dataclasses.replace(EVERYTHING, head_dim=8)) == Llama.kept_numbers(plain)
    wider = dataclasses.replace(EVERYTHING, head_dim=8 + 6)
    assert Llama.kept_numbers(wider) - Llama.kept_numbers(plain) == 2 * 4 * (4 * 6)  # layers, arrays, heads x width


# Entries of config.json files on the hub that decide the family, as their owners wrote them before transformers 5.
ON_THE_HUB = {
    "mistralai/Mistral-7B-v0.1": (
        {"model_type": "mistral", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
        | {"intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 32000, "rms_norm_eps": 1e-05}
        | {"rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False, "hidden_act": "silu"},
        {"head_dim": None, "sliding_window": 4096, "qkv_bias": False, "qk_norm": False},
    ),
    "Qwen/Qwen2.5-0.5B": (
        {"model_type": "qwen2", "hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2}
        | {"intermediate_size": 4864, "num_hidden_layers": 24, "vocab_size": 151936, "rms_norm_eps": 1e-06}
        | {"rope_theta": 1000000.0, "sliding_window": 32768, "use_sliding_window": False, "max_window_layers": 24}
        | {"tie_word_embeddings": True, "hidden_act": "silu"},
        {"head_dim": None, "sliding_window": None, "qkv_bias": True, "qk_norm": False, "tie_embeddings": True},
    ),
    "Qwen/Qwen3-0.6B": (
        {"model_type": "qwen3", "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8}
        | {"intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 151936, "rms_norm_eps": 1e-06}
        | {"rope_theta": 1000000, "rope_scaling": None, "sliding_window": None, "use_sliding_window": False}
        | {"head_dim": 128, "attention_bias": False, "max_window_layers": 28, "tie_word_embeddings": True},
        {"head_dim": 128, "sliding_window": None, "qkv_bias": False, "qk_norm": True, "rope_theta": 1e6},
    ),
}


@pytest.mark.parametrize("name", ON_THE_HUB)
def test_configs_in_the_form_before_transformers_5_are_read(name, tmp_path):
    entries, expected = ON_THE_HUB[name]
    (tmp_path / "config.json").write_text(json.dumps(entries))
    read = from_dict({"model": config_from_folder(tmp_path)}).model
    assert {field: getattr(read, field) for field in expected} == expected
