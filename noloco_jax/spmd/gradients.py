"""Gradient of one replica on its batch, when the replica is not cut into pipeline stages.

Axes: L replicas, M micro-batches, B sequences, T positions.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from noloco_jax.config import ModelConfig
from noloco_jax.data.source import IGNORED_LABEL
from noloco_jax.model.architecture import from_params
from noloco_jax.optim.exchange.all_reduce import all_mean
from noloco_jax.optim.exchange.axes import AxisName, names_of

PyTree = Any
Batch = dict[str, jax.Array]  # input_ids, labels and, where attention stays inside documents, segment_ids


def split_microbatches(x_LBT: jax.Array, num_microbatches: int) -> jax.Array:
    """Split (..., M·B, T) into micro-batches (M, ..., B, T)."""
    *lead, batch, length = x_LBT.shape
    return jnp.moveaxis(x_LBT.reshape(*lead, num_microbatches, batch // num_microbatches, length), -3, 0)


def merge_microbatches(x_MLB: jax.Array) -> jax.Array:
    """Merge micro-batches (M, L, B, ...) into one batch of every replica, (L, B·M, ...).

    The sequences of a micro-batch stay the major axis, over which `fsdp` shards them.
    """
    num_microbatches, replicas, batch = x_MLB.shape[:3]
    return jnp.moveaxis(x_MLB, 0, 2).reshape(replicas, batch * num_microbatches, *x_MLB.shape[3:])


def widened(tree: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """Return parameters in float32, and a function that gives a tree of their structure the dtypes of the parameters.

    A loop sums the gradient of what it does not carry, in its dtype: it takes the first and computes with the second.
    """
    dtypes = jax.tree.map(lambda x: x.dtype, tree)
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree), partial(jax.tree.map, lambda d, x: x.astype(d), dtypes)


def label_weights(batch: Batch, mean_over: AxisName | None = None) -> jax.Array:
    """Return the weight of a label of each replica in its training loss: one over the replica's number of labels.

    Args:
      batch: `labels` (L, B, T), of the L replicas of a device.
      mean_over: the axes of all replicas, if their gradients are averaged: the weight is then one over the mean number
        of labels, so that the mean of the gradients is that of one large batch.

    Returns:
      float32 (L,); 1 without labels.
    """
    number_L = num_labels(batch["labels"])
    if mean_over is not None:
        number_L = jax.vmap(partial(all_mean, axis_name=mean_over), axis_name=names_of(mean_over)[-1])(number_L)
    return 1.0 / jnp.where(number_L > 0, number_L, 1.0)


def num_labels(labels: jax.Array) -> jax.Array:
    """Return the number of labels of batches (..., B, T), float32 (...,)."""
    return jnp.sum(labels != IGNORED_LABEL, axis=(-2, -1), dtype=jnp.float32)


def loss_sum(config: ModelConfig, params: PyTree, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Return the summed loss of a batch's labels and their number."""
    return from_params(config, params).loss_sum(batch)


def replica_gradient(
    config: ModelConfig, num_microbatches: int, params: PyTree, batch: Batch, weight: jax.Array
) -> tuple[PyTree, jax.Array]:
    """Return the gradient of a replica's training loss, and the loss of its labels, both in float32.

    The loss is a sum over labels, each with the weight `weight` (`label_weights`).

    Micro-batches are run one after another, which takes less memory than the whole batch and gives its result. Their
    gradients are summed in float32, whatever the dtype of the parameters. An auxiliary loss has a part in the gradient
    alone, and is of each micro-batch by itself.
    """

    def objective(params: PyTree, part: Batch) -> tuple[jax.Array, jax.Array]:
        total, _, auxiliary = from_params(config, params).training_loss_sum(part)
        return (total + auxiliary) * weight, total * weight

    def gradient_of(part: Batch) -> tuple[PyTree, jax.Array]:
        gradient, loss = jax.grad(objective, has_aux=True)(params, part)
        return jax.tree.map(lambda x: x.astype(jnp.float32), gradient), loss

    if num_microbatches == 1:
        return gradient_of(batch)

    def add(total: tuple[PyTree, jax.Array], part: Batch) -> tuple[tuple[PyTree, jax.Array], None]:
        return jax.tree.map(jnp.add, total, gradient_of(part)), None

    parts_MBT = jax.tree.map(lambda x: split_microbatches(x, num_microbatches), batch)
    zeros = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), params)
    return jax.lax.scan(add, (zeros, jnp.zeros([], jnp.float32)), parts_MBT)[0]
