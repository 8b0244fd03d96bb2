"""Interfaces of an outer step: a rule computes the message and applies the group's mean; an exchange computes the mean.

Replica i maps its fast weights θ_i to a message m_i and continues from the mean of its group's messages. Alone it
continues from its own message: that is its *solo step*. A mean that arrives later is applied as the correction
c_i = mean_g(m) − m_i. The corrections of a group sum to zero, so that a correction which is late, rounded or lost on
all sides does not move the replicas' mean, only the spread between them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any
Number = float | jax.Array | Callable[[Any], Any]  # a number, or an optax.Schedule of the round


class Exchange(Protocol):
    """Averaging of a replica's message over its group, and the bytes it sends."""

    def __call__(
        self, message: PyTree, round: Any, movement: PyTree, windows: PyTree, cuts: PyTree
    ) -> tuple[PyTree, PyTree]:
        """Return the mean of the group's messages as this replica receives it, and the windows to keep.

        Args:
          message: message of this replica.
          round: round of the pairing.
          movement: a tree like the message: the movement of each number since the replica's last exchange.
          windows: the wire format's state for this fragment, or None: see `OuterState`.
          cuts: the hidden dimension of every array, along which wire formats cut blocks.
        """
        ...

    def sent(self, message: PyTree, cuts: PyTree, num_replicas: int, parts: int) -> Callable[[int], int]:
        """Map a round to the bytes that all replicas together send to others in it.

        Args:
          message: shapes of the averaged part of one replica's message.
          cuts: as above.
          num_replicas: N.
          parts: number of devices over which the partitioner may shard the arrays of a replica.
        """
        ...


class Rule(Protocol):
    """Update of one replica in an outer step, independent of the pairing. `round` counts from 0.

    The state is a pytree that only the rule interprets. Subtrees with the parameters' structure belong to the replica;
    every other leaf is a scalar that is equal on all replicas. Shardings, `vmap` axes, offloading, checkpoints and
    elastic restores are derived from that.
    """

    def init(self, params: PyTree) -> PyTree:
        """Return the state before the first round."""
        ...

    def message(self, state: PyTree, theta: PyTree, round: Any) -> PyTree:
        """Return the message m, a tree like the parameters, in the precision of `compute_dtype`."""
        ...

    def movement(self, state: PyTree, theta: PyTree, round: Any) -> PyTree:
        """Estimate the movement of every number of the message, in the inner steps and in the last round."""
        ...

    def receive(self, state: PyTree, message: PyTree, mean: PyTree, round: Any) -> tuple[PyTree, PyTree]:
        """Return (new θ, new state) from the own message and the group's mean; the two are equal in a solo step."""
        ...

    def correct(self, state: PyTree, theta: PyTree, correction: PyTree, round: Any) -> tuple[PyTree, PyTree]:
        """Apply the correction of `round` after its solo step and possibly further inner steps: (θ, state).

        Directly after the solo step the result equals that of `receive` with the mean, up to rounding.
        """
        ...


class OuterState(NamedTuple):
    """State of an outer optimizer, per replica.

    Attributes:
      count: int32 scalar, inner steps that passed through `update`; the same on every replica.
      round: int32 scalar, outer steps taken; the same on every replica.
      rule: the rule's own state; for `noloco` and `diloco` a `Momentum`, with the slow weights.
      windows: state of a wire format whose window follows the replicas' distance: uint8, a tree like the parameters,
        one value a block (`exchange.modulo`). None for every other wire format.
    """

    count: Any
    round: Any
    rule: Any
    windows: PyTree = None


def at_round(state: OuterState, round: int) -> OuterState:
    """Return a fresh state as that of a replica which has taken `round` outer steps."""
    before = state.round
    return state._replace(round=jax.device_put(np.full(before.shape, round, before.dtype), before.sharding))


def at(value: Number, round: Any) -> Any:
    """Return a number as it is, or a schedule's value in this round."""
    number = value(round) if callable(value) else value
    return number.item() if isinstance(number, np.generic) else number  # whose dtype would count, unlike a float's


def scaled(number: Any, x: jax.Array) -> jax.Array:
    """Return number · x in the dtype of `x`: under `jax_enable_x64` a schedule's value may be wider."""
    return (number.astype(x.dtype) if hasattr(number, "astype") else number) * x


def compute_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """Return the dtype in which a leaf's outer step is computed: float32, or its own if wider or complex."""
    return common_dtype(dtype, jnp.float32)


def common_dtype(*dtypes: jax.typing.DTypeLike) -> jnp.dtype:
    """Return the dtype that JAX promotes these to, also if `jax_numpy_dtype_promotion` is "strict"."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*dtypes)


def computed(tree: PyTree) -> PyTree:
    """Convert every leaf to a JAX array in its `compute_dtype`."""
    return jax.tree.map(lambda x: x.astype(compute_dtype(x.dtype)), jax.tree.map(jnp.asarray, tree))


def added(tree: PyTree, other: PyTree) -> PyTree:
    """Return the leafwise sum in the dtypes of `tree`."""
    return jax.tree.map(lambda x, y: x + y.astype(x.dtype), tree, other)
