"""Losses and gradients of replicas that are cut into pipeline stages."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from noloco_jax.config import ModelConfig
from noloco_jax.spmd.gradients import Batch
from noloco_jax.spmd.pipeline import on_one_device, over_devices
from noloco_jax.spmd.pipeline.routes import draw_routes, num_ticks, route_pool
from noloco_jax.spmd.stages import sum_copies

PyTree = Any


def build_routed(
    model: ModelConfig,
    mesh: Mesh | AbstractMesh,
    label_weights: Callable[[Batch], jax.Array],
    num_replicas: int,
    num_microbatches: int,
    num_stages: int,
    routing: str,
    seed: int,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Build (gradient, evaluate) as `losses.Losses` describes them; stages that share a device run in turn.

    Args:
      model: the model.
      mesh: the devices.
      label_weights: batch -> the weight of a label of each of the device's replicas (L,).
      num_replicas, num_microbatches, num_stages: of the run.
      routing, seed: of micro-batches between stages, see `MeshConfig`.
    """
    ticks = num_ticks(num_microbatches, num_stages)
    routed_nll = partial(over_devices.routed_nll, model, num_microbatches)
    if mesh.shape["stage"] == 1:
        routed_nll = partial(on_one_device.routed_nll, model, num_stages, num_microbatches)
    pool, fixed = (route_pool(num_replicas, num_stages, seed, routes) for routes in (routing, "fixed"))

    def gradient(params: PyTree, batch: Batch, step: jax.Array) -> tuple[PyTree, jax.Array]:
        weight_L, routes = label_weights(batch), draw_routes(len(pool), ticks, seed, step)

        def objective(params: PyTree) -> tuple[jax.Array, jax.Array]:
            weighted_L, _, auxiliary_L = routed_nll(pool, params, batch, weight_L, routes)
            # JAX differentiates the sum over devices, and every stage returns its replica's loss, hence the division.
            # Of the auxiliary loss it returns its own layers' share.
            return jnp.sum(weighted_L) / jax.lax.axis_size("stage") + jnp.sum(auxiliary_L), weighted_L

        gradients, loss_L = jax.grad(objective, has_aux=True)(params)
        return sum_copies(model, gradients), loss_L

    def evaluate(params: PyTree, batch: Batch) -> tuple[jax.Array, jax.Array]:
        one_L = jnp.ones(len(batch["labels"]), jnp.float32)
        total_L, number_L, _ = routed_nll(fixed, params, batch, one_L, jnp.zeros(ticks, jnp.int32))
        return total_L, number_L

    return gradient, evaluate
