"""Counters that are equal on all replicas, kept unbatched under `vmap`."""

import jax
from jax.custom_batching import custom_vmap


@custom_vmap
def shared(counter: jax.Array) -> jax.Array:
    """Return `counter` unbatched; it must have the same value in every element of the batch.

    Under `vmap` over replicas or seeds the result is the maximum over the batch, an unbatched scalar. A `lax.cond` or
    `lax.switch` on it therefore stays a branch; on a batched value JAX would compute every branch and select. Over a
    mesh axis nothing is sent: every device decides by its own counter.
    """
    return counter


@shared.def_vmap
def _shared_under_vmap(axis_size: int, is_batched: list[bool], counter: jax.Array) -> tuple[jax.Array, bool]:
    del axis_size
    return shared(counter.max(axis=0) if is_batched[0] else counter), False
