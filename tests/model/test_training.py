"""The Llama as a module in a user's loop: its gradient against the trainer's."""

import functools

import jax
import numpy as np
import optax
from flax import nnx

from noloco_jax.config import ModelConfig
from noloco_jax.model.kind import loss
from noloco_jax.model.llama import Llama
from support.model_makers import random_params


def test_the_modules_gradient_equals_that_of_the_parameter_dict():
    config = ModelConfig(hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2, num_kv_heads=1, vocab_size=31)
    params = random_params(config, scale=0.1)
    ids_BT = np.random.default_rng(0).integers(0, 31, (2, 9), dtype=np.int32)

    def mean_nll(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(ids_BT[:, :-1]), ids_BT[:, 1:]).mean()

    of_module = jax.jit(lambda params: nnx.to_pure_dict(nnx.grad(mean_nll)(Llama.from_params(config, params))))(params)
    batch = {"input_ids": ids_BT[:, :-1], "labels": ids_BT[:, 1:]}
    of_dict, _ = jax.jit(jax.grad(functools.partial(loss, config), has_aux=True))(params, batch)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-7), of_module, of_dict)
