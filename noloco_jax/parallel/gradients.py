"""One replica's gradient of its batch, when the replica is not cut into pipeline stages.

Axes: M micro-batches, B sequences, T positions.
"""

from typing import Any

import jax
import jax.numpy as jnp

from noloco_jax.config import ModelConfig
from noloco_jax.model.llama import final_hidden, head_kernel
from noloco_jax.model.loss import IGNORED_LABEL, token_nll

PyTree = Any
Batch = dict[str, jax.Array]


def nll_sum(model: ModelConfig, params: PyTree, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Returns the summed negative log-likelihood of a batch's labels and their number."""
    return token_nll(final_hidden(model, params, batch["input_ids"]), head_kernel(params), batch["labels"])


def replica_gradient(
    model: ModelConfig, num_microbatches: int, params: PyTree, batch: Batch
) -> tuple[PyTree, jax.Array]:
    """Returns the gradient of the mean loss over a replica's batch, and that loss.

    Micro-batches are run one after another, for less memory: the result is that of the whole batch.
    """
    num_tokens = jnp.maximum(jnp.sum(batch["labels"] != IGNORED_LABEL, dtype=jnp.float32), 1.0)

    def share(params: PyTree, part: Batch) -> jax.Array:
        return nll_sum(model, params, part)[0] / num_tokens

    if num_microbatches == 1:
        loss, gradient = jax.value_and_grad(share)(params, batch)
        return gradient, loss

    def add(total: tuple[PyTree, jax.Array], part: Batch) -> tuple[tuple[PyTree, jax.Array], None]:
        loss, gradient = jax.value_and_grad(share)(params, part)
        return jax.tree.map(jnp.add, total, (gradient, loss)), None

    parts_MBT = jax.tree.map(lambda x: x.reshape(num_microbatches, -1, x.shape[-1]), batch)
    start = (jax.tree.map(jnp.zeros_like, params), jnp.zeros([], jnp.float32))
    return jax.lax.scan(add, start, parts_MBT)[0]
