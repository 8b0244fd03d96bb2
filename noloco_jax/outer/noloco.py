"""NoLoCo's outer optimizer (arXiv 2506.10911, Section 3)."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax

from noloco_jax.exchange.group import AxisName, group_mean
from noloco_jax.outer.pairing import Pairing, consensus_limit
from noloco_jax.outer.transform import outer_transform

PyTree = Any


def noloco(
    pairing: Pairing,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.5,
    consensus: float | None = None,
    sync_every: int = 50,
    axis_name: AxisName = "replica",
    state_dtype: jax.typing.DTypeLike = jnp.float32,
    wire_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Every `sync_every` inner steps, a momentum step towards and along with a random group of replicas.

    With θ the fast weights, φ the slow ones, δ the outer momentum, and the mean over the replica's group:

        Δ = θ − φ                                            (Eq. 1)
        δ ← α δ + β mean(Δ) + γ (mean(φ) − φ)                (Eq. 2, with the sign of Eq. 32 and the authors' code)
        φ ← φ + δ;  θ ← φ                                    (Eq. 3)

    Since β mean(Δ) + γ mean(φ) = mean(βΔ + γφ), a replica sends one tensor of the parameters' size.

    The transform must come last in an `optax.chain`, so that it sees the update that the inner optimizer would make.
    It returns updates that land on φ after an outer step, and its input otherwise. It must run where `axis_name` is
    bound: inside `jax.shard_map` over a mesh axis, inside `jax.vmap(axis_name=...)`, or inside the latter within the
    former with the two axes as a pair (JAX then needs `check_vma=False`, as for any collective over such a `vmap`). The
    outer step after inner step `sync_every` is round 0.

    `update(updates, state, params, *, sync=None)`: `None` decides by the state's counter with `lax.cond`, so that steps
    in between cost nothing, under `vmap` too; `True` and `False` are static, for callers that compile a program with
    and one without the outer step.

    Args:
      pairing: who averages with whom: `RandomPairing`, `ExplicitPairing`.
      outer_lr: β, outer learning rate.
      outer_momentum: α, in [0, 1).
      consensus: γ, the pull towards the group's mean. None: equal to `outer_lr`, as in the authors' code. A value
        outside the interval in which pure consensus is mean-square stable (`consensus_limit`) gives a warning.
      sync_every: inner steps between outer steps.
      axis_name: name of the axis of replicas, or (mesh axis, vmap axis).
      state_dtype: dtype in which slow weights and momentum are kept; they are computed in float32.
      wire_dtype: dtype of the messages; None: float32. bfloat16 halves them, and rounds what a partner contributes.

    Returns:
      A transform whose state is an `OuterState`.

    Raises:
      ValueError: if a number is out of its range.
    """
    if not 0 <= outer_momentum < 1:
        raise ValueError(f"outer_momentum is {outer_momentum}: it must be in [0, 1)")
    gamma = outer_lr if consensus is None else consensus
    group_size = max(len(group) for round_ in pairing.pool for group in round_)
    limit = consensus_limit(outer_momentum, pairing.num_replicas, group_size)
    if pairing.num_replicas > 1 and not 0 < gamma < limit:
        warnings.warn(
            f"consensus {gamma:g} is outside (0, {limit:.3g}): with outer_momentum {outer_momentum:g} and "
            f"{pairing.num_replicas} replicas, their weights do not stay together",
            stacklevel=2,
        )

    def outer_step(round: jax.Array, theta: PyTree, slow: PyTree, momentum: PyTree) -> tuple[PyTree, PyTree]:
        message = jax.tree.map(lambda th, phi: outer_lr * (th - phi) + gamma * phi, theta, slow)
        mean = group_mean(message, pairing, pairing.pool_index(round), axis_name, wire_dtype)
        momentum = jax.tree.map(lambda d, x, phi: outer_momentum * d + (x - gamma * phi), momentum, mean, slow)
        return jax.tree.map(jnp.add, slow, momentum), momentum

    return outer_transform(outer_step, sync_every, axis_name, state_dtype)
