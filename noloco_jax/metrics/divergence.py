"""Signs that a run diverges: a loss that rises, replicas that move far, and values that are not finite."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Decay of the running mean per step: about a hundred steps. A mean of twenty rises by a fifth without cause where a
# step has few tokens: with 256 bytes, whose losses vary by a quarter, twice in 2,400 steps.
_MEMORY = 0.99
_STEPS_FIRST = 100  # steps before the first warning
_RISE_FACTOR = 1.2  # multiple of the lowest mean that triggers a warning
_FAR = 10.0  # multiple of the usual; a warm-up or decay changes less than that in `_REMEMBERED` outer steps
_REMEMBERED = 16  # outer steps that define the usual
_FEWEST = 4  # the fewest values that define the usual


class Rise:
    """Monitor of a running mean of all replicas' loss, whose rise a comparison between replicas cannot detect."""

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


class Proportion:
    """Comparison of replicas' movement between outer steps with that of the others and of earlier steps.

    One that moves much farther than usual may be diverging, and pulls its partners along.
    """

    def __init__(self) -> None:
        self._usual: deque[float] = deque()

    def unusual(self, moved: Mapping[int, float]) -> list[str]:
        """Return a warning for replicas that moved ten times as far as usual, and one for non-finite replicas.

        Args:
          moved: replica -> root-mean-square movement of its weights by its inner steps and its last outer step.
        """
        values = [*self._usual, *moved.values()]
        usual = median(values) if len(values) >= _FEWEST else float("inf")
        lost = [replica for replica, value in moved.items() if not math.isfinite(value)]
        far = {replica: value for replica, value in moved.items() if _FAR * usual < value < math.inf}
        lines = []
        if lost:
            lines.append(
                f"{_named(lost)} moved to weights that are not finite, which its next partner averages with: resume "
                "from an earlier checkpoint with a lower inner.lr"
            )
        if far:
            longest = max(far.values())
            lines.append(
                f"{_named(list(far))} moved {longest / usual:.0f} times as far as usual since the last "
                f"outer step (root mean square {longest:.2g}, usually {usual:.2g}), half of which passes to a partner: "
                "lower inner.lr if the loss rises"
            )
        self._usual.extend(value for value in moved.values() if value <= _FAR * usual)
        while len(self._usual) > _REMEMBERED * len(moved):
            self._usual.popleft()
        return lines


def _named(replicas: Sequence[int]) -> str:
    """Format replicas by their numbers, which ascend."""
    *others, last = replicas
    if not others:
        return f"replica {last}"
    if len(replicas) == last - others[0] + 1 > 2:
        return f"replicas {others[0]} to {last}"
    return f"replicas {', '.join(map(str, others))} and {last}"


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
