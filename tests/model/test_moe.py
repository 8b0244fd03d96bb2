"""Mixtures of experts: their sum, their load-balancing loss, and both under every layout.

`test_families` compares logits, loss and gradients with transformers'.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from noloco_jax.config import MeshConfig, ModelConfig, TrainConfig
from noloco_jax.errors import UserError
from noloco_jax.model import architecture
from noloco_jax.model.huggingface import check_has_format
from noloco_jax.model.moe import Moe, MoeBlock, _mixed
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.programs import StepMetrics, build_programs
from noloco_jax.spmd.sharding import hidden_dimension
from support.inner_steps import batch_of, losses, metrics
from support.layouts import some_devices
from support.model_makers import random_params
from support.packed import packed_batch

MODEL = ModelConfig(
    kind="moe",
    hidden_size=32,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=64,
    num_experts=6,
    experts_per_token=2,
    qk_norm=True,
    router_aux_loss_coef=10.0,  # so large that a mesh that omitted it would train differently
)

# With parts of other families that are special on a mesh: biases, and heads wider than the hidden size.
EVERY_PART = dataclasses.replace(MODEL, head_dim=12, qkv_bias=True, sliding_window=5)


def run_of(mesh: MeshConfig, document_mask: bool = True, num_microbatches: int = 2, **model: Any) -> TrainConfig:
    config = TrainConfig(num_replicas=4, num_steps=6, mesh=mesh, num_microbatches=num_microbatches)
    data = dataclasses.replace(config.data, sequence_length=24, batch_size=4, document_mask=document_mask)
    return dataclasses.replace(config, model=dataclasses.replace(EVERY_PART, **model), data=data)


def start() -> Any:
    return random_params(EVERY_PART, scale=0.1)


@functools.cache
def on_one_device() -> StepMetrics:
    return metrics(run_of(MeshConfig(replica=1)), 1, start(), optimizer="muon")


@functools.cache
def block_of(crowded: bool) -> MoeBlock:
    """Return a block; one that is crowded sends all tokens to the same expert."""
    block = MoeBlock(MODEL, rngs=nnx.Rngs(params=0))
    if crowded:
        block.router[...] = jnp.zeros_like(block.router[...]).at[:, 3].set(1.0)
    return block


@pytest.mark.parametrize(("num_tokens", "backend"), [(1, "cpu"), (40, "cpu"), (700, "cpu"), (3100, "gpu")], ids=str)
@pytest.mark.parametrize("crowded", [False, True])
def test_mixtures_of_experts_match_a_loop_over_tokens(monkeypatch, num_tokens, backend, crowded):
    """No token is dropped, even where all are sent to the same expert."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)  # blocks may be larger on a GPU
    rng = np.random.default_rng(0)
    block = block_of(crowded)
    x_NTD = np.abs(rng.standard_normal((1, num_tokens, 32))).astype(np.float32)
    router, gate, up, down = (np.asarray(x[...], np.float64) for x in (block.router, block.gate, block.up, block.down))
    expected = np.zeros((num_tokens, 32))
    for n, x in enumerate(x_NTD[0].astype(np.float64)):
        probabilities = np.exp(x @ router) / np.exp(x @ router).sum()
        chosen = np.argsort(-probabilities, kind="stable")[:2]
        for e in chosen:
            a = x @ gate[e]
            expert = (a / (1 + np.exp(-a)) * (x @ up[e])) @ down[e]
            expected[n] += probabilities[e] / probabilities[chosen].sum() * expert
    np.testing.assert_allclose(jax.jit(MoeBlock.mlp)(block, jnp.asarray(x_NTD))[0][0], expected, atol=1e-8, rtol=1e-4)


def test_training_is_alike_on_stages_that_are_sharded():
    """Train by Muon, which takes experts separately."""
    config = run_of(MeshConfig(replica=1, stage=2, fsdp=2, tensor=2, routing="fixed"))
    np.testing.assert_allclose(losses(config, 8, start(), optimizer="muon"), on_one_device().loss, rtol=2e-4)


@functools.cache
def gradient(remat: str) -> Any:
    """Return the loss, with its load-balancing part, and the gradient of a batch."""
    config = dataclasses.replace(EVERY_PART, remat=remat)
    batch = packed_batch([[5, 11], [16]], config.vocab_size)
    return jax.jit(jax.value_and_grad(functools.partial(architecture.loss, config), has_aux=True))(start(), batch)


def test_rematerialization_changes_no_gradient():
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)
    jax.tree.map(close, gradient("full"), gradient("none"))


def test_an_inner_step_in_bfloat16_on_shards_has_consistent_dtypes():
    """Of a trace: compiling takes ten times as long, and is the same as in float32."""
    config = run_of(MeshConfig(replica=2, fsdp=2, tensor=2), dtype="bfloat16")
    programs = build_programs(config, make_mesh(config.mesh, config.num_replicas, some_devices(8)))
    params, inner, _ = programs.state
    step = jax.ShapeDtypeStruct((), jnp.int32)
    assert jax.eval_shape(programs.inner_step, params, inner, programs.batch, step)[2].loss.dtype == jnp.float32


def test_gradients_of_bfloat16_kernels_are_summed_in_float32():
    """Gradients are partial sums over blocks of tokens and experts; summed in bfloat16 they were off by 1 %."""
    random = np.random.default_rng(0)
    x, scores = random.normal(size=(4096, 16)), random.uniform(0.2, 0.8, (4096, 1))
    experts = jnp.asarray(random.integers(0, 2, (4096, 1)), jnp.int32)
    kernels = [random.normal(size=shape) / 4 for shape in ((2, 16, 24), (2, 16, 24), (2, 24, 16))]

    def gradients(dtype) -> list[np.ndarray]:
        def total(kernels):
            mixed = _mixed(jnp.asarray(x, dtype), jnp.asarray(scores, jnp.float32), experts, *kernels)
            return jnp.sum(mixed * jnp.asarray(x, jnp.float32))

        found = jax.jit(jax.grad(total))([jnp.asarray(kernel, dtype) for kernel in kernels])
        return [np.asarray(gradient, np.float32) for gradient in found]

    for found, exact in zip(gradients(jnp.bfloat16), gradients(jnp.float32), strict=True):
        assert np.linalg.norm(found - exact) < 6e-3 * np.linalg.norm(exact)


def test_the_load_balancing_loss_is_trained_but_neither_logged_nor_evaluated():
    """An inner step's gradient has it, with a large coefficient; the losses that it and an evaluation report do not."""
    batch = {name: x[0] for name, x in batch_of(run_of(MeshConfig(replica=1))).items()}
    parts = {name: x.reshape(2, 2, -1) for name, x in batch.items()}  # its micro-batches, each with its own load

    @jax.jit
    def results(params):
        evaluated, num_labels = architecture.from_params(EVERY_PART, params).loss_sum(batch)
        without, _ = architecture.loss(dataclasses.replace(EVERY_PART, router_aux_loss_coef=0.0), params, batch)
        trained = jax.value_and_grad(lambda params, part: architecture.loss(EVERY_PART, params, part)[0])
        values, gradients = jax.lax.map(lambda part: trained(params, part), parts)
        return evaluated / num_labels, without, values.mean(), jax.tree.map(lambda x: x.mean(axis=0), gradients)

    evaluated, without, trained, gradient = results(start())
    step = on_one_device()
    np.testing.assert_allclose([step.loss[0, 0], without], evaluated, rtol=1e-6)
    assert trained > evaluated + 10.0
    norm = np.sqrt(sum(np.square(x, dtype=np.float64).sum() for x in jax.tree.leaves(gradient)))
    np.testing.assert_allclose(step.grad_norm[0, 0], norm, rtol=1e-5)


def test_the_load_balancing_loss_is_a_term_of_the_mean_loss_whatever_labels_are_left_out():
    """The load is of all positions: without three quarters of the labels the term is the same."""
    batch: dict = packed_batch([[16], [16]], EVERY_PART.vocab_size)
    without = dataclasses.replace(EVERY_PART, router_aux_loss_coef=0.0)

    @jax.jit
    def term(labels_BT):
        value, plain = (
            architecture.loss(config, start(), {**batch, "labels": labels_BT})[0] for config in (EVERY_PART, without)
        )
        return value - plain

    masked = np.where(np.arange(batch["labels"].shape[1]) < 4, batch["labels"], -100)
    np.testing.assert_allclose(term(masked), term(batch["labels"]), rtol=1e-5)


def test_fragments_cut_experts_biases_and_norms_along_their_hidden_dimension():
    """The embedding (vocabulary, hidden) along its columns; what has no hidden dimension along its last."""
    cuts = jax.tree.map_with_path(
        lambda path, x: hidden_dimension(EVERY_PART, path, x.shape), architecture.param_shapes(EVERY_PART)
    )
    last = dict.fromkeys(("q_bias", "k_bias", "v_bias", "q_norm", "k_norm", "attention_norm", "mlp_norm"), 1)
    blocks = last | {"q": 1, "k": 1, "v": 1, "o": 2, "router": 1, "gate": 2, "up": 2, "down": 3}
    assert cuts == {"embed": 1, "blocks": blocks, "norm": 0, "head": 0}


def test_active_parameters_and_operations_count_only_a_tokens_experts():
    expert, router, layers = 3 * 32 * 24, 32 * 6, 2
    total, _ = architecture.num_params(MODEL)
    assert total - architecture.num_active_params(MODEL) == layers * (6 - 2) * expert
    dense = dataclasses.replace(MODEL, kind="llama")
    assert Moe.forward_flops(MODEL, 16) - architecture.architecture_of(dense).forward_flops(dense, 16) == 2 * layers * (
        expert + router
    )
    assert architecture.num_active_params(dense) == architecture.num_params(dense)[0]


def test_expert_weights_are_sharded_along_their_inner_dimensions():
    config = run_of(MeshConfig(replica=1, fsdp=2, tensor=2))
    programs = build_programs(config, make_mesh(config.mesh, config.num_replicas, some_devices(4)))
    blocks = programs.state.params["blocks"]
    whole = {name: blocks[name].shape for name in ("gate", "down", "router")}
    held = {name: blocks[name].sharding.shard_shape(shape) for name, shape in whole.items()}
    assert held == {"gate": (4, 2, 6, 16, 12), "down": (4, 2, 6, 12, 16), "router": (4, 2, 16, 6)}


def test_an_export_requires_a_combination_that_transformers_has():
    check_has_format(MODEL)
    with pytest.raises(UserError, match=r"has model\.qk_norm=True and model\.qkv_bias=False, and here they are False"):
        check_has_format(dataclasses.replace(MODEL, qk_norm=False))
