"""Losses and gradients of a device's replicas: whole models, or stages with routing between replicas."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh

from noloco_jax.config import ModelConfig
from noloco_jax.model.architecture import architecture_of
from noloco_jax.model.loss import logits_at_once
from noloco_jax.spmd.gradients import Batch, label_weights, loss_sum, replica_gradient
from noloco_jax.spmd.pipeline.losses import build_routed
from noloco_jax.spmd.sharding import REPLICAS

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


def build_losses(
    model: ModelConfig,
    mesh: Mesh | AbstractMesh,
    *,
    num_replicas: int,
    num_microbatches: int,
    tokens: int,
    averages_gradients: bool = False,
    stages: int = 1,
    routing: str = "fixed",
    seed: int = 0,
) -> Losses:
    """Build the functions for a run on a mesh.

    Args:
      model: the model.
      mesh: the devices.
      num_replicas: of the run.
      num_microbatches: parts of a replica's batch.
      tokens: of a micro-batch.
      averages_gradients: as `Method` says.
      stages: pipeline stages of a replica, of which one device may hold several.
      routing, seed: of micro-batches between stages, see `MeshConfig`.
    """
    weights = partial(label_weights, mean_over=REPLICAS if averages_gradients else None)
    if stages > 1:
        return Losses(*build_routed(model, mesh, weights, num_replicas, num_microbatches, stages, routing, seed))
    over_slots = jax.lax.map if replicas_at_once(model, mesh, num_replicas, tokens) == 1 else _at_once
    gradient = partial(_whole_gradient, model, num_microbatches, over_slots, weights)
    return Losses(gradient, partial(_whole_evaluate, model))


def replicas_at_once(model: ModelConfig, mesh: Mesh | AbstractMesh, num_replicas: int, tokens: int) -> int:
    """Return how many of a device's replicas have their gradients computed at once: all of them, or 1.

    All where a GPU would wait for kernels to start: whole Llamas on devices of their own, so small that a layer of a
    micro-batch of `tokens` has few FLOPs and the activations of all replicas fit. Not for models in stages.
    """
    shape = mesh.shape
    is_on_gpu = not isinstance(mesh, AbstractMesh) and mesh.devices.flat[0].platform == "gpu"
    is_whole = shape["stage"] == shape["fsdp"] == shape["tensor"] == 1
    if not is_on_gpu or model.kind != "llama" or not is_whole:
        return 1
    num_replicas //= shape["replica"]
    weights_of_layer = 4 * model.hidden_size**2 + 3 * model.hidden_size * model.intermediate_size
    is_short = 2 * weights_of_layer * tokens < _SHORT_LAYER_FLOPS
    fits = num_replicas * sum(activation_bytes(model, tokens, "gpu")) <= _BYTES_AT_ONCE
    return num_replicas if is_short and fits else 1


def activation_bytes(model: ModelConfig, tokens: int, platform: str) -> tuple[int, int]:
    """Estimate the bytes that a micro-batch of `tokens` keeps for the backward pass, and those of its logits."""
    width = {"float32": 4, "bfloat16": 2}[model.dtype]
    kept = tokens * architecture_of(model).kept_numbers(model) * width
    return kept, 4 * min(tokens * model.vocab_size, logits_at_once(platform))


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
