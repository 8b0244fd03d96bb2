"""State of a momentum rule: slow weights and outer momentum, in float32 or stochastically rounded to bfloat16."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from noloco_jax.draws import ROUNDING, uint32s
from noloco_jax.outer.rule import compute_dtype

PyTree = Any
STATE_DTYPES = ("float32", "bfloat16")


class Momentum(NamedTuple):
    """State of a momentum rule.

    Attributes:
      slow: φ, the slow weights, of the parameters' shapes.
      momentum: δ, the outer momentum, of the parameters' shapes.
    """

    slow: PyTree
    momentum: PyTree


def check_state_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """Return the dtype, if state can be kept in it.

    Raises:
      ValueError: if it is none of `STATE_DTYPES`.
    """
    name = jnp.dtype(dtype).name
    if name not in STATE_DTYPES:
        raise ValueError(f"state_dtype is {name!r}: choose from {', '.join(map(repr, STATE_DTYPES))}")
    return jnp.dtype(dtype)


def initial(params: PyTree, state_dtype: jnp.dtype) -> Momentum:
    """Return slow weights equal to the parameters and zero momentum; copies, so that a caller may donate both."""
    return Momentum(
        slow=jax.tree.map(lambda p: jnp.array(p, _kept_dtype(p.dtype, state_dtype), copy=True), params),
        momentum=jax.tree.map(lambda p: jnp.zeros_like(p, _kept_dtype(p.dtype, state_dtype)), params),
    )


def moved(state: Momentum, theta: PyTree) -> PyTree:
    """Return sqrt(Δ² + δ²) elementwise: the movement of the inner steps since the last round and of that round."""

    def one(phi: jax.Array, delta: jax.Array, th: jax.Array) -> jax.Array:
        return jnp.sqrt(jnp.square(th - phi.astype(th.dtype)) + jnp.square(delta.astype(th.dtype)))

    return jax.tree.map(one, state.slow, state.momentum, theta)


def kept(slow: PyTree, momentum: PyTree, state_dtype: jnp.dtype, round: Any) -> Momentum:
    """Convert the state, computed in float32 or wider, to the dtype in which it is kept after a round.

    Float32 values are rounded to bfloat16 stochastically: up or down with probabilities that make the expectation
    exact. With rounding to the nearest, a weight that moves less than half a bfloat16 step a round would never move.
    The draws depend on round, leaf and position alone, so that replicas with equal values keep equal ones; where a
    device holds a shard by hand (a pipeline stage), the position is that in the shard.

    Args:
      slow, momentum: φ and δ of one replica.
      state_dtype: dtype in which they are kept.
      round: round of the outer step.
    """
    leaves, structure = jax.tree.flatten(Momentum(slow, momentum))

    def rounded(number: int, x: jax.Array) -> jax.Array:
        return x if _kept_dtype(x.dtype, state_dtype) == x.dtype else _stochastic_bfloat16(x, round, number)

    return structure.unflatten(map(rounded, range(len(leaves)), leaves))


def _kept_dtype(dtype: jax.typing.DTypeLike, state_dtype: jnp.dtype) -> jnp.dtype:
    """Return the kept dtype of a leaf: `state_dtype` if it is computed in float32, else its compute dtype."""
    computed = compute_dtype(dtype)
    return state_dtype if computed == jnp.float32 else computed


def _stochastic_bfloat16(x: jax.Array, round: Any, leaf: int) -> jax.Array:
    position = jnp.zeros(x.shape, jnp.uint32)
    for dim in range(x.ndim):
        position = position * np.uint32(0x9E3779B1) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim)
    noise = uint32s(0, ROUNDING, round, leaf, position) & np.uint32(0xFFFF)
    bits = (jax.lax.bitcast_convert_type(x, jnp.uint32) + noise) & np.uint32(0xFFFF0000)
    truncated = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(jnp.isfinite(x), truncated, x).astype(jnp.bfloat16)
