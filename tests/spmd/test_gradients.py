"""One replica's gradient, for any number of micro-batches and any dtype of the parameters."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from noloco_jax.config import ModelConfig
from noloco_jax.labels import IGNORED_LABEL
from noloco_jax.model.kind import loss
from noloco_jax.spmd.gradients import label_weights, replica_gradient
from support.model_makers import random_params

CONFIG = ModelConfig(hidden_size=8, intermediate_size=8, num_layers=1, num_heads=2, num_kv_heads=2, vocab_size=11)

jitted_gradient = jax.jit(replica_gradient, static_argnums=(0, 1))


def weight_of(batch):
    return label_weights(jax.tree.map(lambda x: x[None], batch))[0]


@functools.cache
def batch():
    rng = np.random.default_rng(0)
    labels_BT = rng.integers(0, 11, (4, 5))
    labels_BT[0, 1:] = labels_BT[3, :2] = IGNORED_LABEL  # micro-batches with different numbers of labels
    return {"input_ids": jnp.asarray(rng.integers(0, 11, (4, 5)), jnp.int32), "labels": jnp.asarray(labels_BT)}


@functools.cache
def expected_of_whole_batch():
    """Return parameters, and the loss and gradient of all sequences at once."""
    params = random_params(CONFIG, scale=0.3)
    (value, _), gradient = jax.jit(jax.value_and_grad(functools.partial(loss, CONFIG), has_aux=True))(params, batch())
    return params, value, gradient


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_gradient_and_loss_do_not_depend_on_the_number_of_micro_batches(num_microbatches):
    params, expected_loss, expected = expected_of_whole_batch()
    gradient, value = jitted_gradient(CONFIG, num_microbatches, params, batch(), weight_of(batch()))
    np.testing.assert_allclose(value, expected_loss, rtol=1e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), gradient, expected)


def test_each_label_weighs_one_over_the_number_of_labels():
    assert weight_of(batch()) == pytest.approx(1 / (4 * 5 - 4 - 2))
    assert weight_of({"labels": jnp.full((2, 3), IGNORED_LABEL)}) == 1


def test_micro_batches_of_bfloat16_parameters_are_summed_in_float32():
    # The micro-batches are equal: a bfloat16 sum of 1024 would stop growing at a quarter of them.
    config = dataclasses.replace(CONFIG, param_dtype="bfloat16")
    params = jax.tree.map(jnp.asarray, random_params(config, scale=0.3))
    one = jax.tree.map(lambda x: x[1:2], batch())
    equal = jax.tree.map(lambda x: jnp.tile(x, (1024, 1)), one)
    expected, _ = jitted_gradient(config, 1, params, one, weight_of(one))
    gradient, _ = jitted_gradient(config, 1024, params, equal, weight_of(equal))
    for actual, its_expected in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        assert actual.dtype == its_expected.dtype == jnp.float32
        np.testing.assert_allclose(actual, its_expected, rtol=0.02, atol=1e-3 * np.abs(its_expected).max())
