"""States that are not finite, from which no run continues."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_finite(state: Any) -> bool:
    """Return True if all of this process's part of a state is finite; only numbers are copied from a device.

    Asked before a state is saved and after it is restored: nothing follows from values that are not finite.
    """
    leaves = (x for x in jax.tree.leaves(state) if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact))
    return all(_is_shard_finite(shard.data) for x in leaves for shard in x.addressable_shards if shard.replica_id == 0)


def _is_shard_finite(x: jax.Array) -> bool:
    device = next(iter(x.devices()))
    if device.platform == "cpu":
        return bool(np.isfinite(np.asarray(x)).all())  # without a program to compile
    own = device.default_memory().kind
    if x.sharding.memory_kind != own:  # offloaded: copied one by one, as the device is faster than the host
        x = jax.device_put(x, x.sharding.with_memory_kind(own))
    return bool(jnp.isfinite(x).all())
