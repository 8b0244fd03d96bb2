"""Losses and gradients of a device's replicas: whole models, or stages with routing between replicas."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from noloco_jax.config import ModelConfig, TrainConfig
from noloco_jax.methods import method_of
from noloco_jax.model.kind import kind_of
from noloco_jax.model.loss import logits_at_once
from noloco_jax.spmd import pipeline, virtual_pipeline
from noloco_jax.spmd.gradients import Batch, label_weights, loss_sum, replica_gradient
from noloco_jax.spmd.routing import draw_routes, num_ticks, route_pool
from noloco_jax.spmd.sharding import REPLICAS
from noloco_jax.spmd.stages import sum_copies

PyTree = Any

# A layer of fewer FLOPs takes a GPU about as long as starting its kernels, some 3 microseconds each.
_SHORT_LAYER_FLOPS = 2e10
_BYTES_AT_ONCE = 2**32  # most activations of replicas that are computed at once


class Losses(NamedTuple):
    """Functions of the L replicas of a device, for use inside `shard_map` over `replica` and `stage`.

    Attributes:
      gradient: (params, batch, step) -> (gradients, loss (L,)) of the training step `step`: the mean over a replica's
        labels. If gradients are averaged, the labels of all replicas weigh alike.
      evaluate: (params, batch) -> (summed loss (L,), number of labels (L,)), every replica through its own stages.
    """

    gradient: Callable[[PyTree, Batch, jax.Array], tuple[PyTree, jax.Array]]
    evaluate: Callable[[PyTree, Batch], tuple[jax.Array, jax.Array]]


def build_losses(config: TrainConfig, mesh: Mesh | AbstractMesh) -> Losses:
    """Build the functions for a run on a mesh; stages without devices of their own run one after another."""
    model, num_microbatches, num_stages = config.model, config.num_microbatches, config.mesh.stage
    weights = partial(label_weights, mean_over=REPLICAS if method_of(config).averages_gradients else None)
    if num_stages == 1:
        over_slots = jax.lax.map if replicas_at_once(config, mesh) == 1 else _at_once
        gradient = partial(_whole_gradient, model, num_microbatches, over_slots, weights)
        return Losses(gradient, partial(_whole_evaluate, model))
    routed_nll = partial(pipeline.routed_nll, model, num_microbatches)
    if mesh.shape["stage"] == 1:
        routed_nll = partial(virtual_pipeline.routed_nll, model, num_stages, num_microbatches)
    pool, fixed = (
        route_pool(config.num_replicas, num_stages, config.seed, routing) for routing in (config.mesh.routing, "fixed")
    )
    ticks = num_ticks(num_microbatches, num_stages)
    return Losses(
        partial(
            _routed_gradient, model, routed_nll, weights, pool, partial(draw_routes, len(pool), ticks, config.seed)
        ),
        partial(_routed_evaluate, routed_nll, fixed, ticks),
    )


def replicas_at_once(config: TrainConfig, mesh: Mesh | AbstractMesh) -> int:
    """Return how many of a device's replicas have their gradients computed at once: all of them, or 1.

    All where a GPU would wait for kernels to start: whole Llamas on devices of their own, so small that a layer of a
    micro-batch has few FLOPs and the activations of all replicas fit.
    """
    model, shape = config.model, mesh.shape
    is_on_gpu = not isinstance(mesh, AbstractMesh) and mesh.devices.flat[0].platform == "gpu"
    is_whole = shape["stage"] == shape["fsdp"] == shape["tensor"] == config.mesh.stage == 1
    if not is_on_gpu or model.kind != "llama" or not is_whole:
        return 1
    num_replicas = config.num_replicas // shape["replica"]
    weights_of_layer = 4 * model.hidden_size**2 + 3 * model.hidden_size * model.intermediate_size
    is_short = 2 * weights_of_layer * tokens_at_once(config) < _SHORT_LAYER_FLOPS
    fits = num_replicas * sum(activation_bytes(config, "gpu")) <= _BYTES_AT_ONCE
    return num_replicas if is_short and fits else 1


def tokens_at_once(config: TrainConfig) -> int:
    """Return the tokens of a replica's micro-batch."""
    return config.data.batch_size // config.num_microbatches * config.data.sequence_length


def activation_bytes(config: TrainConfig, platform: str) -> tuple[int, int]:
    """Estimate the bytes that a whole replica's micro-batch keeps for the backward pass, and those of its logits."""
    width = {"float32": 4, "bfloat16": 2}[config.model.dtype]
    tokens = tokens_at_once(config)
    kept = tokens * kind_of(config.model).kept_numbers(config.model) * width
    return kept, 4 * min(tokens * config.model.vocab_size, logits_at_once(platform))


def _at_once(function: Callable[[Any], Any], slots: Any) -> Any:
    """Apply the function as `lax.map` does, to all slots in one batch."""
    return jax.vmap(function)(slots)


def _whole_gradient(
    model: ModelConfig, num_microbatches: int, over_slots, weights, params: PyTree, batch: Batch, step: jax.Array
):
    del step
    slots = (params, batch, weights(batch))
    return over_slots(lambda slot: replica_gradient(model, num_microbatches, *slot), slots)


def _whole_evaluate(model: ModelConfig, params: PyTree, batch: Batch):
    return jax.lax.map(lambda slot: loss_sum(model, *slot), (params, batch))


def _routed_gradient(
    model: ModelConfig, routed_nll, weights, pool: np.ndarray, routes_of, params: PyTree, batch: Batch, step: jax.Array
):
    weight_L = weights(batch)

    def objective(params: PyTree):
        weighted_L, _, auxiliary_L = routed_nll(pool, params, batch, weight_L, routes_of(step))
        # JAX differentiates the sum over devices, and every stage returns its replica's loss, hence the division. Of
        # the auxiliary loss it returns its own layers' share.
        return jnp.sum(weighted_L) / jax.lax.axis_size("stage") + jnp.sum(auxiliary_L), weighted_L

    gradients, loss_L = jax.grad(objective, has_aux=True)(params)
    return sum_copies(model, gradients), loss_L


def _routed_evaluate(routed_nll, pool: np.ndarray, num_ticks: int, params: PyTree, batch: Batch):
    one_L = jnp.ones(len(batch["labels"]), jnp.float32)
    return routed_nll(pool, params, batch, one_L, jnp.zeros(num_ticks, jnp.int32))[:2]
