"""DiLoCo's outer optimizer (arXiv 2311.08105), the baseline that averages over all replicas."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from noloco_jax.exchange.group import AxisName, all_mean
from noloco_jax.outer.transform import outer_transform

PyTree = Any


def diloco(
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    nesterov: bool = True,
    sync_every: int = 100,
    axis_name: AxisName = "replica",
    state_dtype: jax.typing.DTypeLike = jnp.float32,
) -> optax.GradientTransformationExtraArgs:
    """Every `sync_every` inner steps, a momentum step along the outer gradient averaged over all replicas.

        Δ = θ − φ
        δ ← α δ + β mean(Δ)
        φ ← φ + δ            heavy ball: the baseline of the NoLoCo paper (α 0.3, β 0.7, 100 inner steps)
        φ ← φ + α δ + β mean(Δ)    Nesterov: the DiLoCo paper (α 0.9, β 0.7)
        θ ← φ

    Used as `noloco` is: last in a chain, where `axis_name` is bound, with the same `update(..., sync=None)`.

    Args:
      outer_lr: β, outer learning rate.
      outer_momentum: α, in [0, 1).
      nesterov: true Nesterov momentum, instead of heavy ball.
      sync_every: inner steps between outer steps.
      axis_name: name of the axis of replicas, or (mesh axis, vmap axis).
      state_dtype: dtype in which slow weights and momentum are kept; they are computed in float32.

    Returns:
      A transform whose state is an `OuterState`.

    Raises:
      ValueError: if a number is out of its range.
    """
    if not 0 <= outer_momentum < 1:
        raise ValueError(f"outer_momentum is {outer_momentum}: it must be in [0, 1)")

    def outer_step(round: jax.Array, theta: PyTree, slow: PyTree, momentum: PyTree) -> tuple[PyTree, PyTree]:
        del round
        delta = all_mean(jax.tree.map(jnp.subtract, theta, slow), axis_name)
        momentum = jax.tree.map(lambda d, x: outer_momentum * d + outer_lr * x, momentum, delta)
        step = momentum
        if nesterov:
            step = jax.tree.map(lambda d, x: outer_momentum * d + outer_lr * x, momentum, delta)
        return jax.tree.map(jnp.add, slow, step), momentum

    return outer_transform(outer_step, sync_every, axis_name, state_dtype)
