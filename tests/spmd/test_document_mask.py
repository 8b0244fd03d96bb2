"""Document masks on every layout: losses and gradients equal those of each document alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from noloco_jax.config import from_dict
from noloco_jax.metrics.evaluate import Validation, evaluate
from noloco_jax.spmd.batches import place_batch
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.programs import build_programs
from support.initial import initial_state
from support.model_makers import random_params
from support.packed import apart, loss_apart, packed_batch

V = 32
# The documents' lengths in each of a replica's sequences of 16: four sequences in two micro-batches.
LENGTHS = {0: [[4, 6, 6], [16], [6, 6], [4, 4, 4, 4]], 1: [[6, 4, 6], [4, 6, 4], [6, 6], [4, 6]]}
BATCHES = {replica: packed_batch(lengths, V, seed=replica) for replica, lengths in LENGTHS.items()}


def run_config(routing="fixed", **mesh):
    return from_dict(
        {
            "num_replicas": 2,
            "num_microbatches": 2,
            "model": {
                "vocab_size": V,
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_layers": 2,
                "num_heads": 2,
                "num_kv_heads": 2,
            },
            "mesh": {"routing": routing, **mesh},
            "data": {"batch_size": 4, "sequence_length": 16, "document_mask": True},
        }
    )


@functools.cache
def params_of_one():
    return jax.tree.map(jnp.asarray, random_params(run_config().model, scale=0.2))


@functools.cache
def oracle():
    """Return each replica's mean loss and gradient norm, computed from documents in sequences of their own."""
    losses, norms = [], []
    value_and_gradient = jax.jit(jax.value_and_grad(functools.partial(loss_apart, run_config().model)))
    for replica, lengths in LENGTHS.items():
        num_labels = (BATCHES[replica]["labels"] != -100).sum()
        loss, gradient = value_and_gradient(params_of_one(), apart(BATCHES[replica], lengths))
        losses.append(float(loss) / num_labels)
        norms.append(np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(gradient))) / num_labels)
    return np.array(losses), np.array(norms)


def first_step(config, num_devices):
    """Return the metrics of an inner step from `params_of_one`."""
    programs = build_programs(config, make_mesh(config, jax.devices()[:num_devices]))
    params, inner, _ = initial_state(programs, params_of_one())
    batch = place_batch(BATCHES, programs.batch)
    return programs.inner_step(params, inner, batch, np.int32(1))[2]


def test_loss_and_gradient_of_stages_equal_those_of_each_document_alone():
    metrics = first_step(run_config(stage=2), 1)
    losses, norms = oracle()
    np.testing.assert_allclose(metrics.loss, losses, rtol=1e-5)
    np.testing.assert_allclose(metrics.grad_norm, norms, rtol=1e-4)


@pytest.mark.parametrize("num_devices", [1, 4])
def test_segment_ids_follow_their_micro_batch_to_another_replica(num_devices):
    metrics = first_step(run_config("random", stage=2), num_devices)
    losses, _ = oracle()
    assert np.abs(metrics.loss - losses).max() > 1e-3  # some went to the other replica, which has equal weights
    np.testing.assert_allclose(np.sum(metrics.loss), losses.sum(), rtol=1e-5)


def test_an_evaluation_scores_each_document_alone():
    config = run_config(stage=2)
    programs = build_programs(config, make_mesh(config, jax.devices()[:4]))
    found = evaluate(programs, initial_state(programs, params_of_one()).params, Validation(list(BATCHES.values())))
    num_labels = np.array([(batch["labels"] != -100).sum() for batch in BATCHES.values()])
    expected = np.exp(np.average(oracle()[0], weights=num_labels))
    np.testing.assert_allclose(found["perplexity_replicas"], [expected] * 2, rtol=1e-5)
    np.testing.assert_allclose(found["perplexity_merged"], expected, rtol=1e-5)
