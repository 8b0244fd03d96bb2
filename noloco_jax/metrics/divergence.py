"""Signs that a run diverges: a loss that rises, and values that are not finite."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Decay of the running mean per step: about a hundred steps. A mean of twenty rises by a fifth without cause where a
# step has few tokens: with 256 bytes, whose losses vary by a quarter, twice in 2,400 steps.
_MEMORY = 0.99
_STEPS_FIRST = 100  # steps before the first warning
_RISE_FACTOR = 1.2  # multiple of the lowest mean that triggers a warning


class Rise:
    """Monitor of a running mean of all replicas' loss."""

    def __init__(self) -> None:
        self._steps = 0
        self._mean = 0.0
        self._lowest = float("inf")
        self._lowest_step = 0

    def told(self, step: int, loss: float) -> str | None:
        """Return a warning when the mean rises 20 % above its minimum, and again for every further 20 %."""
        self._steps += 1
        self._mean = loss if self._steps == 1 else _MEMORY * self._mean + (1 - _MEMORY) * loss
        if self._steps < _STEPS_FIRST:
            return None
        if self._mean < self._lowest:
            self._lowest, self._lowest_step = self._mean, step
        if self._mean <= _RISE_FACTOR * self._lowest:
            return None
        line = (
            f"the loss rises: {self._mean:.2f} on average, {self._lowest:.2f} at step {self._lowest_step}; the "
            "replicas may be diverging: lower inner.lr, outer.momentum, outer.lr or outer.consensus"
        )
        self._lowest, self._lowest_step = self._mean, step
        return line


def is_finite(state: Any) -> bool:
    """Return True if all of this process's part of a state is finite; only numbers are copied from a device.

    Asked before a state is saved and after it is restored: nothing follows from values that are not finite.
    """
    leaves = (x for x in jax.tree.leaves(state) if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact))
    return all(_is_finite(shard.data) for x in leaves for shard in x.addressable_shards if shard.replica_id == 0)


def _is_finite(x: jax.Array) -> bool:
    device = next(iter(x.devices()))
    if device.platform == "cpu":
        return bool(np.isfinite(np.asarray(x)).all())  # without a program to compile
    own = device.default_memory().kind
    if x.sharding.memory_kind != own:  # offloaded: copied one by one, as the device is faster than the host
        x = jax.device_put(x, x.sharding.with_memory_kind(own))
    return bool(jnp.isfinite(x).all())
