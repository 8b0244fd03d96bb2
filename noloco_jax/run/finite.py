"""Check of a state before it is saved and after it is restored: nothing follows from values that are not finite."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_finite(state: Any) -> bool:
    """Return whether all of this process's part of a state is finite; only numbers are copied from a device."""
    leaves = (x for x in jax.tree.leaves(state) if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact))
    return all(_is_finite(shard.data) for x in leaves for shard in x.addressable_shards if shard.replica_id == 0)


def _is_finite(x: jax.Array) -> bool:
    if x.sharding.memory_kind == "device" and next(iter(x.devices())).platform != "cpu":
        return bool(jnp.isfinite(x).all())
    return bool(np.isfinite(np.asarray(x)).all())  # in the host's memory, which needs no program
