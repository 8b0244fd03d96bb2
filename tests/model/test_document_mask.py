"""Attention inside documents: a packed sequence gives the results of each of its documents alone."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from noloco_jax.config import ModelConfig
from noloco_jax.labels import IGNORED_LABEL
from noloco_jax.model import attention
from noloco_jax.model.kind import loss
from support.model_makers import random_params
from support.packed import apart, loss_apart, packed_batch

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
