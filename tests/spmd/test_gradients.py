"""Gradients for any number of micro-batches and dtype, and of replicas of a device at once or one after another."""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from noloco_jax.config import ModelConfig, TrainConfig, from_dict
from noloco_jax.data.source import IGNORED_LABEL
from noloco_jax.model.architecture import loss
from noloco_jax.spmd import losses
from noloco_jax.spmd.gradients import label_weights, replica_gradient
from noloco_jax.spmd.losses import build_losses, replicas_at_once
from noloco_jax.spmd.mesh import make_mesh
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


SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "vocab_size": 11}


def test_replicas_at_once_get_the_gradients_that_each_gets_alone(monkeypatch):
    data = {"batch_size": 4, "sequence_length": 6, "document_mask": True}
    config = from_dict({"num_replicas": 3, "num_microbatches": 2, "model": SMALL, "data": data, "mesh": {"replica": 1}})
    monkeypatch.setattr(losses, "replicas_at_once", lambda model, mesh, num_replicas, tokens: num_replicas)
    mesh = make_mesh(config.mesh, config.num_replicas, jax.devices()[:1])
    gradient = build_losses(config.model, mesh, num_replicas=3, num_microbatches=2, tokens=12).gradient

    params = jax.tree.map(lambda x: jnp.stack([x, 2 * x, -x]), random_params(config.model, scale=0.3))
    rng = np.random.default_rng(0)
    batch = {name: rng.integers(0, 11, (3, 4, 6), np.int32) for name in ("input_ids", "labels")}
    batch["segment_ids"] = 1 + np.cumsum(rng.random((3, 4, 6)) < 0.3, axis=-1, dtype=np.int32)
    actual, actual_loss = jax.jit(gradient)(params, batch, jnp.int32(1))

    for replica in range(3):
        own = jax.tree.map(lambda x, replica=replica: x[replica], (params, batch))
        expected, expected_loss = jax.jit(replica_gradient, static_argnums=(0, 1))(config.model, 2, *own, 1 / 24)
        np.testing.assert_allclose(actual_loss[replica], expected_loss, rtol=1e-6)
        of_replica = jax.tree.map(lambda x, replica=replica: x[replica], actual)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), of_replica, expected)


def on(platform: str, **shape: int) -> Any:
    """Return what `replicas_at_once` reads of a mesh: its shape and its devices' platform."""
    sizes = {"replica": 1, "stage": 1, "fsdp": 1, "tensor": 1} | shape
    return SimpleNamespace(shape=sizes, devices=np.array([SimpleNamespace(platform=platform)]))


def run(num_replicas: int, hidden: int, intermediate: int, layers: int, tokens: int, **model: object):
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_layers": layers}
    return from_dict(
        {
            "num_replicas": num_replicas,
            "model": sizes | model,
            "data": {"batch_size": tokens // 128, "sequence_length": 128},
        }
    )


def at_once(config: TrainConfig, mesh: Any) -> int:
    return replicas_at_once(config.model, mesh, config.num_replicas, config.microbatch_tokens)


def test_small_replicas_of_a_gpu_are_computed_at_once():
    quickstart, eleven_million = run(4, 128, 512, 2, 256), run(8, 384, 1024, 6, 2048)
    assert at_once(quickstart, on("gpu")) == 4
    assert at_once(eleven_million, on("gpu")) == 8
    assert at_once(eleven_million, on("gpu", replica=4)) == 2


@pytest.mark.parametrize(
    ("config", "mesh"),
    [
        (run(4, 128, 512, 2, 256), on("cpu")),  # where one after another is faster
        (run(8, 768, 3072, 12, 8192, vocab_size=128256), on("gpu")),  # kernels of a 125M are long
        (run(8, 128, 512, 2, 2048, vocab_size=128256), on("gpu")),  # 8 times a GB of logits
        (run(64, 384, 1024, 6, 2048), on("gpu")),  # activations of 64 replicas
        (run(4, 128, 512, 2, 256), on("gpu", fsdp=2)),
        (run(4, 128, 512, 2, 256, kind="moe"), on("gpu")),  # whose experts are taken in turn
        (run(4, 128, 512, 2, 256), jax.sharding.AbstractMesh((4, 1, 1, 1), ("replica", "stage", "fsdp", "tensor"))),
    ],
)
def test_all_other_replicas_are_computed_one_after_another(config, mesh):
    assert at_once(config, mesh) == 1
