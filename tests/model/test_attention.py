"""Causal attention against its formula: float32 by numpy in float64, 16 bits with gradients by JAX in float32.

A packed sequence gives the results of each of its documents alone.
"""

import dataclasses
import functools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from noloco_jax.config import ModelConfig
from noloco_jax.data.source import IGNORED_LABEL
from noloco_jax.model import attention
from noloco_jax.model.architecture import loss
from noloco_jax.model.attention import causal_attention
from support.model_makers import random_params
from support.packed import apart, loss_apart, packed_batch

# Lengths within and beyond a block of 128 queries, and windows within and beyond both.
WHOLE = [(7, 4, None), (128, 2, None), (130, 1, None), (300, 2, None)]
WINDOWS = [(7, 2, 1), (7, 2, 3), (130, 4, 5), (300, 1, 128), (300, 4, 140), (50, 2, 60)]


@pytest.mark.parametrize("documents", [False, True], ids=["whole sequences", "documents"])
@pytest.mark.parametrize(("length", "kv_heads", "window"), [*WHOLE, *WINDOWS])
def test_attention_is_the_softmax_over_the_positions_that_are_seen(length, kv_heads, window, documents):
    rng = np.random.default_rng(0)
    q_BTHK, k_BTGK, v_BTGK = (rng.standard_normal((2, length, heads, 8)) for heads in (4, kv_heads, kv_heads))
    segments_BT = np.cumsum(rng.random((2, length)) < 0.05, axis=1, dtype=np.int32) if documents else None
    seen_BTS = np.zeros((2, length, length))
    for t in range(length):
        for s in range(0 if window is None else max(0, t - window + 1), t + 1):
            seen_BTS[:, t, s] = 1 if segments_BT is None else segments_BT[:, t] == segments_BT[:, s]
    k_BTHK, v_BTHK = (np.repeat(x, 4 // kv_heads, axis=2) for x in (k_BTGK, v_BTGK))
    weights_BHTS = np.exp(np.einsum("bthk,bshk->bhts", q_BTHK, k_BTHK) / math.sqrt(8)) * seen_BTS[:, None]
    weights_BHTS /= weights_BHTS.sum(axis=-1, keepdims=True)
    expected_BTHK = np.einsum("bhts,bshk->bthk", weights_BHTS, v_BTHK)
    q, k, v = (x.astype(np.float32) for x in (q_BTHK, k_BTGK, v_BTGK))
    actual_BTHK = jax.jit(causal_attention, static_argnums=4)(q, k, v, segments_BT, window)
    np.testing.assert_allclose(actual_BTHK, expected_BTHK, atol=2e-6)


def softmax_attention(q_BTHK, k_BTGK, v_BTGK, segments_BT):
    """Return the formula's attention, in float32."""
    repeats = q_BTHK.shape[2] // k_BTGK.shape[2]
    k_BTHK, v_BTHK = (jnp.repeat(x, repeats, axis=2) for x in (k_BTGK, v_BTGK))
    scores_BHTS = jnp.einsum("bthk,bshk->bhts", q_BTHK, k_BTHK, precision="highest") / math.sqrt(q_BTHK.shape[-1])
    seen_BTS = np.tri(q_BTHK.shape[1], dtype=bool)[None]
    if segments_BT is not None:
        seen_BTS = seen_BTS & (segments_BT[:, :, None] == segments_BT[:, None, :])
    weights_BHTS = jax.nn.softmax(jnp.where(seen_BTS[:, None], scores_BHTS, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshk->bthk", weights_BHTS, v_BTHK, precision="highest")


@pytest.mark.parametrize("documents", [False, True], ids=["whole sequences", "documents"])
@pytest.mark.parametrize(("length", "kv_heads", "head_dim"), [(64, 4, 64), (256, 2, 64), (130, 1, 128)])
def test_16_bit_attention_and_its_gradients_match_the_formula_within_rounding(length, kv_heads, head_dim, documents):
    """A GPU runs cuDNN here. bfloat16 rounds numbers by up to 0.2 %; results must be within 1 % of their norm."""
    rng = np.random.default_rng(0)
    shapes = [(2, length, heads, head_dim) for heads in (4, kv_heads, kv_heads, 4)]
    *arguments, cotangent = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes)
    segments_BT = None
    if documents:
        segments_BT = jnp.asarray(np.cumsum(rng.random((2, length)) < 0.05, axis=1, dtype=np.int32))

    def with_gradients(attention, cotangent, *arguments):
        out, pull_back = jax.vjp(lambda q, k, v: attention(q, k, v, segments_BT), *arguments)
        return out, *pull_back(cotangent)

    actual = jax.jit(functools.partial(with_gradients, causal_attention))
    expected = jax.jit(functools.partial(with_gradients, softmax_attention))
    in_float32 = [x.astype(jnp.float32) for x in (cotangent, *arguments)]
    for mine, formula in zip(actual(cotangent, *arguments), expected(*in_float32), strict=True):
        assert mine.dtype == jnp.bfloat16
        difference = np.asarray(mine, np.float32) - np.asarray(formula)
        assert np.linalg.norm(difference) < 0.01 * np.linalg.norm(formula)
        assert np.abs(difference).max() < 0.03 * np.abs(formula).max()


@pytest.mark.skipif("jax.default_backend() != 'gpu'", reason="needs a GPU")
def test_16_bit_attention_on_this_gpu_uses_cudnn():
    x_BTHK = jnp.zeros((1, 64, 4, 64), jnp.bfloat16)
    program = jax.jit(causal_attention).lower(x_BTHK, x_BTHK, x_BTHK).compile().as_text()
    assert program and "cudnn" in program


@pytest.mark.parametrize(
    ("gpu", "used"),
    [
        ({"compute_capability": "7.0"}, "xla"),
        ({"compute_capability": "7.5"}, "xla"),
        ({"compute_capability": "8.0"}, "cudnn"),
        ({"compute_capability": "12.0"}, "cudnn"),
        ({"compute_capability": "gfx90a"}, "xla"),
        ({}, "cudnn"),
    ],
    ids=["V100", "T4", "A100", "RTX 5090", "MI250", "compiled without one"],
)
def test_16_bit_attention_uses_cudnn_from_ampere_on(monkeypatch, gpu, used):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [types.SimpleNamespace(**gpu)])
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *_, implementation, **__: implementation)
    x_BTHK = jnp.zeros((1, 4, 2, 8), jnp.bfloat16)
    assert causal_attention(x_BTHK, x_BTHK, x_BTHK) == used


CONFIG = ModelConfig(
    hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=61, norm_eps=1e-6
)
LENGTHS = [[5, 1, 7, 3], [16], [2, 9]]  # the last ends in padding
BATCH = packed_batch(LENGTHS, CONFIG.vocab_size)


def test_the_gradient_of_a_packed_batch_equals_that_of_its_documents_alone():
    """Documents alone each have a row, without a mask; causal attention hides the padding after them."""
    params = jax.tree.map(jnp.asarray, random_params(CONFIG, scale=0.1))
    num_labels, rows = (BATCH["labels"] != IGNORED_LABEL).sum(), apart(BATCH, LENGTHS)
    gradient_alone = jax.jit(jax.grad(lambda params: loss_apart(CONFIG, params, rows) / num_labels))(params)
    config = dataclasses.replace(CONFIG, remat="full")
    actual = jax.jit(jax.grad(lambda params, batch: loss(config, params, batch)[0]))(params, BATCH)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-7), actual, gradient_alone)


@pytest.mark.parametrize(("length", "used"), [(6, "cudnn"), (5, "xla")])
def test_gpu_attention_masks_other_documents_and_uses_cudnn_for_even_lengths(monkeypatch, length, used):
    given = {}

    def library(q_BTHK, k_BTGK, v_BTGK, *, implementation, **arguments):
        given.update(arguments, implementation=implementation)
        return q_BTHK

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [types.SimpleNamespace(compute_capability="9.0")])
    monkeypatch.setattr(jax.nn, "dot_product_attention", library)
    x_BTHK = jnp.zeros((1, length, 2, 8), jnp.bfloat16)
    segments_T = np.array([1, 1, 1, 2, 2, 0])[:length]
    attention.causal_attention(x_BTHK, x_BTHK, x_BTHK, jnp.asarray(segments_T)[None])
    assert given["is_causal"] and given["implementation"] == used
    np.testing.assert_array_equal(given["mask"], (segments_T[:, None] == segments_T)[None, None])
