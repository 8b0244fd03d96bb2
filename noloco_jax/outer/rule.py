"""An outer step: a rule says what a replica sends and what it makes of its group's mean; an exchange brings the mean.

Replica i takes fast weights θ_i to a message m_i, and goes on from the mean of its group's messages. Alone it goes on
from its own message: that is its *solo step*. A mean that comes later enters as the correction c_i = mean_g(m) − m_i.
The corrections of a group sum to zero, so that one which is late, rounded or lost on all sides moves no replica's
mean, only the spread between them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

PyTree = Any
Number = float | jax.Array | Callable[[Any], Any]  # of a round: a number, or an optax.Schedule of the round

# (message, round, movement, windows, cuts) -> (the mean of the group's messages as this replica is to see it, windows).
# `movement` is a tree like the message: how far each of its numbers has moved since the replica last met others.
# `windows` is what the exchange's code remembers of this fragment, or None: see `OuterState`. `cuts` has the dimension
# of hidden states of every array, along which codes cut blocks.
Exchange = Callable[[PyTree, Any, PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]


class Rule(Protocol):
    """What a replica does in an outer step, whoever it meets. Values are arrays of one replica; `round` counts from 0.

    The state is the rule's own: a pytree in which whatever has the parameters' structure belongs to the replica, and
    everything else is a scalar that is equal on all replicas. Shardings, `vmap` axes, offloading, checkpoints and
    elastic restores are derived from that.
    """

    def init(self, params: PyTree) -> PyTree:
        """The state before the first round."""
        ...

    def message(self, state: PyTree, theta: PyTree, round: Any) -> PyTree:
        """m, what the replica sends: a tree like the parameters, in the precision of `compute_dtype`."""
        ...

    def movement(self, state: PyTree, theta: PyTree, round: Any) -> PyTree:
        """How far every number of the message has moved, nearly: in the inner steps and in the last round."""
        ...

    def receive(self, state: PyTree, message: PyTree, mean: PyTree, round: Any) -> tuple[PyTree, PyTree]:
        """(new θ, new state) from the own message and the group's mean; where they are one, it is the solo step."""
        ...

    def correct(self, state: PyTree, theta: PyTree, correction: PyTree, round: Any) -> tuple[PyTree, PyTree]:
        """(θ, state) once the correction of `round` comes, after its solo step and perhaps further inner steps.

        Right after the solo step the result is that of `receive` with the mean, to rounding.
        """
        ...


class OuterState(NamedTuple):
    """State of an outer optimizer, per replica.

    Attributes:
      count: int32 scalar, inner steps that passed through `update`; the same on every replica.
      round: int32 scalar, outer steps taken; the same on every replica.
      rule: the rule's own state; for `noloco` and `diloco` a `Momentum`, with the slow weights.
      windows: what a code that follows the replicas' distance remembers of it: uint8, a tree like the parameters, one
        value a block (`exchange.modulo`). None for every other wire.
    """

    count: Any
    round: Any
    rule: Any
    windows: PyTree = None


def at(value: Number, round: Any) -> Any:
    """A number, or a schedule's value in this round."""
    return value(round) if callable(value) else value


def compute_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """The dtype in which a leaf's outer step is computed: float32, or the leaf's own if it is wider or complex."""
    return common_dtype(dtype, jnp.float32)


def common_dtype(*dtypes: jax.typing.DTypeLike) -> jnp.dtype:
    """The dtype that JAX promotes these to, also where `jax_numpy_dtype_promotion` is "strict"."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*dtypes)


def computed(tree: PyTree) -> PyTree:
    """Every leaf as a JAX array in its `compute_dtype`."""
    return jax.tree.map(lambda x: x.astype(compute_dtype(x.dtype)), jax.tree.map(jnp.asarray, tree))


def added(tree: PyTree, other: PyTree) -> PyTree:
    """Leaf by leaf sum, in the dtypes of `tree`."""
    return jax.tree.map(lambda x, y: x + y.astype(x.dtype), tree, other)
