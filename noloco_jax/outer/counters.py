"""Counters that are equal on all replicas, as one value whatever batches them."""

import jax
from jax.custom_batching import custom_vmap


@custom_vmap
def shared(counter: jax.Array) -> jax.Array:
    """`counter`, unbatched: under `vmap` over replicas or seeds, all of which must have the same value, their maximum.

    A `lax.cond` or `lax.switch` on it then stays a branch; on a batched value it would compute every branch and select.
    Over a mesh axis it sends nothing: every device decides by its own.
    """
    return counter


@shared.def_vmap
def _shared_under_vmap(axis_size: int, is_batched: list[bool], counter: jax.Array) -> tuple[jax.Array, bool]:
    del axis_size
    return shared(counter.max(axis=0) if is_batched[0] else counter), False
