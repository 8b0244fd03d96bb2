"""The state of a momentum rule: slow weights and outer momentum, in full or rounded at random to 16 bits."""

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
    """The dtype, if state can be kept in it.

    Raises:
      ValueError: if not.
    """
    name = jnp.dtype(dtype).name
    if name not in STATE_DTYPES:
        raise ValueError(f"state_dtype is {name!r}: choose from {', '.join(map(repr, STATE_DTYPES))}")
    return jnp.dtype(dtype)


def initial(params: PyTree, state_dtype: jnp.dtype) -> Momentum:
    """Slow weights equal to the parameters, and no momentum; copies, so that a caller may donate both."""
    return Momentum(
        slow=jax.tree.map(lambda p: jnp.array(p, _kept_dtype(p.dtype, state_dtype), copy=True), params),
        momentum=jax.tree.map(lambda p: jnp.zeros_like(p, _kept_dtype(p.dtype, state_dtype)), params),
    )


def moved(state: Momentum, theta: PyTree) -> PyTree:
    """sqrt(Δ² + δ²), elementwise: what the inner steps have done since the last round, and what that round did."""

    def one(phi: jax.Array, delta: jax.Array, th: jax.Array) -> jax.Array:
        return jnp.sqrt(jnp.square(th - phi.astype(th.dtype)) + jnp.square(delta.astype(th.dtype)))

    return jax.tree.map(one, state.slow, state.momentum, theta)


def kept(slow: PyTree, momentum: PyTree, state_dtype: jnp.dtype, round: Any) -> Momentum:
    """The state as it is kept after a round, from what was computed in float32 (or wider).

    Float32 values are rounded to bfloat16 stochastically: up or down with the probabilities that make the mean right.
    Rounded to the nearest, a weight that moves by less than half a step of bfloat16 a round would never move. The draws
    are a function of round, leaf and position alone, so that replicas with equal values keep equal ones.
    """
    leaves, structure = jax.tree.flatten(Momentum(slow, momentum))
    rounded = [
        x if _kept_dtype(x.dtype, state_dtype) == x.dtype else _stochastic_bfloat16(x, round, number)
        for number, x in enumerate(leaves)
    ]
    return structure.unflatten(rounded)


def _kept_dtype(dtype: jax.typing.DTypeLike, state_dtype: jnp.dtype) -> jnp.dtype:
    """The state's dtype for leaves that are computed in float32; wider and complex ones keep their own."""
    computed = compute_dtype(dtype)
    return state_dtype if computed == jnp.float32 else computed


def _stochastic_bfloat16(x: jax.Array, round: Any, leaf: int) -> jax.Array:
    position = jnp.zeros(x.shape, jnp.uint32)
    for dim, size in enumerate(x.shape):  # wraps around above 2**32 positions, which does no harm
        position = position * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim)
    noise = uint32s(0, ROUNDING, round, leaf, position) & np.uint32(0xFFFF)
    bits = (jax.lax.bitcast_convert_type(x, jnp.uint32) + noise) & np.uint32(0xFFFF0000)
    truncated = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(jnp.isfinite(x), truncated, x).astype(jnp.bfloat16)
