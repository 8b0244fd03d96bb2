"""One replica's gradient of its batch, when the replica is not cut into pipeline stages.

Axes: L replicas, M micro-batches, B sequences, T positions.
"""

from typing import Any

import jax
import jax.numpy as jnp

from noloco_jax.config.fields import ModelConfig
from noloco_jax.labels import IGNORED_LABEL
from noloco_jax.model.llama import final_hidden, head_kernel
from noloco_jax.model.loss import token_nll

PyTree = Any
Batch = dict[str, jax.Array]


def split_microbatches(x_LBT: jax.Array, num_microbatches: int) -> jax.Array:
    """(..., M·B, T) -> (M, ..., B, T)."""
    *lead, batch, length = x_LBT.shape
    return jnp.moveaxis(x_LBT.reshape(*lead, num_microbatches, batch // num_microbatches, length), -3, 0)


def merge_microbatches(x_MLB: jax.Array) -> jax.Array:
    """(M, L, B, ...) -> (L, B·M, ...): one batch of every replica.

    The sequences of a micro-batch stay the major axis, over which `fsdp` shards them.
    """
    num_microbatches, replicas, batch = x_MLB.shape[:3]
    return jnp.moveaxis(x_MLB, 0, 2).reshape(replicas, batch * num_microbatches, *x_MLB.shape[3:])


def token_share(batch: Batch) -> jax.Array:
    """Weight of one label in its replica's mean loss, one over their number: float32 (...,), of labels (..., B, T)."""
    return 1.0 / jnp.maximum(jnp.sum(batch["labels"] != IGNORED_LABEL, axis=(-2, -1), dtype=jnp.float32), 1.0)


def nll_sum(model: ModelConfig, params: PyTree, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Returns the summed negative log-likelihood of a batch's labels and their number."""
    return token_nll(final_hidden(model, params, batch["input_ids"]), head_kernel(params), batch["labels"])


def replica_gradient(
    model: ModelConfig, num_microbatches: int, params: PyTree, batch: Batch
) -> tuple[PyTree, jax.Array]:
    """Returns the gradient of the mean loss over a replica's batch, and that loss.

    Micro-batches are run one after another, for less memory: the result is that of the whole batch.
    """
    share = token_share(batch)

    def part_of_mean(params: PyTree, part: Batch) -> jax.Array:
        return nll_sum(model, params, part)[0] * share

    if num_microbatches == 1:
        loss, gradient = jax.value_and_grad(part_of_mean)(params, batch)
        return gradient, loss

    def add(total: tuple[PyTree, jax.Array], part: Batch) -> tuple[tuple[PyTree, jax.Array], None]:
        loss, gradient = jax.value_and_grad(part_of_mean)(params, part)
        return jax.tree.map(jnp.add, total, (gradient, loss)), None

    parts_MBT = jax.tree.map(lambda x: split_microbatches(x, num_microbatches), batch)
    start = (jax.tree.map(jnp.zeros_like, params), jnp.zeros([], jnp.float32))
    return jax.lax.scan(add, start, parts_MBT)[0]
