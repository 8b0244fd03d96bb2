"""Document masks: losses of routed micro-batches and of evaluations equal those of each document alone.

`test_moe` trains with masks on stages.
"""

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
    """Return each replica's mean loss, computed from documents in sequences of their own."""
    of_documents = functools.partial(loss_apart, run_config().model, params_of_one())
    sums = [of_documents(apart(BATCHES[replica], lengths)) for replica, lengths in LENGTHS.items()]
    return np.array(
        [total / (batch["labels"] != -100).sum() for total, batch in zip(sums, BATCHES.values(), strict=True)]
    )


@pytest.mark.parametrize("num_devices", [1, 4])
def test_segment_ids_follow_their_micro_batch_to_another_replica(num_devices):
    config, losses = run_config("random", stage=2), oracle()
    programs = build_programs(config, make_mesh(config.mesh, config.num_replicas, jax.devices()[:num_devices]))
    params, inner, _ = initial_state(programs, params_of_one())
    _, _, metrics = programs.inner_step(params, inner, place_batch(BATCHES, programs.batch), np.int32(1))
    assert np.abs(metrics.loss - losses).max() > 1e-3  # some went to the other replica, which has equal weights
    np.testing.assert_allclose(np.sum(metrics.loss), losses.sum(), rtol=1e-5)


def test_an_evaluation_scores_each_document_alone():
    config = run_config(stage=2)
    programs = build_programs(config, make_mesh(config.mesh, config.num_replicas, jax.devices()[:4]))
    found = evaluate(programs, initial_state(programs, params_of_one()).params, Validation(list(BATCHES.values())))
    num_labels = np.array([(batch["labels"] != -100).sum() for batch in BATCHES.values()])
    expected = np.exp(np.average(oracle(), weights=num_labels))
    np.testing.assert_allclose(found["perplexity_replicas"], [expected] * 2, rtol=1e-5)
    np.testing.assert_allclose(found["perplexity_merged"], expected, rtol=1e-5)
