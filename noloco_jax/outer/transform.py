"""The frame that outer optimizers share: slow weights, momentum, and when the outer step happens."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from noloco_jax.exchange.group import AxisName, unbatched

PyTree = Any
# (round, θ, φ, δ) -> (φ, δ), all trees float32
OuterStep = Callable[[jax.Array, PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]


class OuterState(NamedTuple):
    """State of `noloco` and `diloco`, per replica.

    Attributes:
      count: int32 scalar, inner steps taken; the same on every replica.
      slow: φ, the slow weights, of the parameters' shapes.
      momentum: δ, the outer momentum, of the parameters' shapes.
    """

    count: Any
    slow: PyTree
    momentum: PyTree


def outer_transform(
    outer_step: OuterStep, sync_every: int, axis_name: AxisName, state_dtype: jax.typing.DTypeLike
) -> optax.GradientTransformationExtraArgs:
    """An Optax transform that lets `sync_every` - 1 updates pass and lands the next one on the new slow weights."""
    if sync_every < 1:
        raise ValueError(f"sync_every is {sync_every}: it must be at least 1")

    def init_fn(params: PyTree) -> OuterState:
        # Copies: a caller that donates both the parameters and this state must not delete one with the other.
        return OuterState(
            count=jnp.zeros([], jnp.int32),
            slow=jax.tree.map(lambda p: jnp.array(p, state_dtype, copy=True), params),
            momentum=jax.tree.map(lambda p: jnp.zeros_like(p, state_dtype), params),
        )

    def update_fn(
        updates: PyTree,
        state: Any,  # an OuterState; Optax's own type admits any tree
        params: PyTree | None = None,
        *,
        sync: bool | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, OuterState]:
        del extra_args
        if params is None:
            raise ValueError("the outer update needs the parameters: call update(updates, state, params)")
        count = jnp.asarray(optax.safe_increment(state.count))
        if sync is False:
            return updates, state._replace(count=count)
        now = unbatched(count, axis_name)

        def skip(updates: PyTree, slow: PyTree, momentum: PyTree) -> tuple[PyTree, PyTree, PyTree]:
            return updates, slow, momentum

        def step(updates: PyTree, slow: PyTree, momentum: PyTree) -> tuple[PyTree, PyTree, PyTree]:
            theta = _float32(optax.apply_updates(params, updates))
            new_slow, new_momentum = outer_step(now // sync_every - 1, theta, _float32(slow), _float32(momentum))
            landing = jax.tree.map(lambda u, phi, p: (phi - p).astype(u.dtype), updates, new_slow, _float32(params))
            return landing, _like(new_slow, slow), _like(new_momentum, momentum)

        if sync:
            updates, slow, momentum = step(updates, state.slow, state.momentum)
        else:
            is_due = now % sync_every == 0
            updates, slow, momentum = jax.lax.cond(is_due, step, skip, updates, state.slow, state.momentum)
        return updates, OuterState(count, slow, momentum)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _float32(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def _like(tree: PyTree, other: PyTree) -> PyTree:
    return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, other)
