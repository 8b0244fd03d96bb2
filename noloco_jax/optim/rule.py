"""The rule of an outer step, with settings for NoLoCo, DiLoCo and Epidemic Learning, and the outer state.

Replica i maps its fast weights θ_i to a message m_i and continues from the mean of its group's messages. Alone it
continues from its own message: that is its *local step*. A mean that arrives later is applied as the correction
c_i = mean_g(m) − m_i. The corrections of a group sum to zero, so that a correction which is late, rounded or lost on
all sides does not move the replicas' mean, only the spread between them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any
Number = float | jax.Array | Callable[[Any], Any]  # a number, or an optax.Schedule of the fragment's round
MOMENTUM_OF = ("steps", "corrections")


class Momentum(NamedTuple):
    """State of `Rule`, trees of the parameters' shapes: φ, the slow weights, and δ, the outer momentum."""

    slow: PyTree
    momentum: PyTree


class Delayed(NamedTuple):
    """Corrections that are applied some inner steps after their outer step.

    Attributes:
      num_applied: int32 scalar, corrections applied so far, in the order of their outer steps: after every outer step
        num_outer_steps − F ≤ num_applied ≤ num_outer_steps. Equal on every replica.
      correction: float32 tree of the parameters' shapes, the stored correction of every fragment's last outer step.
    """

    num_applied: Any
    correction: PyTree


class OuterState(NamedTuple):
    """State of an outer optimizer, per replica.

    Attributes:
      count: int32 scalar, inner steps that passed through `update`; the same on every replica.
      num_outer_steps: int32 scalar, outer steps taken, of all fragments together; the same on every replica.
      rule: the rule's own state, a tuple of trees like the parameters: `Momentum`, `Feedback` or ().
      windows: state of a wire format whose window follows the replicas' distance: uint8, a tree like the parameters,
        one value a block (`exchange.modulo`). None for every other wire format.
      delayed: corrections that are still pending; None without a delay.
    """

    count: Any
    num_outer_steps: Any
    rule: Any
    windows: PyTree = None
    delayed: Delayed | None = None


class Outgoing(NamedTuple):
    """Outgoing data of a fragment in an outer step, trees of the fragment's shapes.

    Attributes:
      message: m, float32.
      movement: estimated movement of every number since the replica's last exchange; None without windows.
      windows: the fragment's part of `OuterState.windows`; None without.
    """

    message: PyTree
    movement: PyTree = None
    windows: PyTree = None


class Arrived(NamedTuple):
    """Result of an exchange: the correction c = mean − m, float32, and the windows to remember, or None."""

    correction: PyTree
    windows: PyTree = None


@dataclass(frozen=True)
class Rule:
    """Update of one replica in an outer step. `k` is the fragment's round, from 0; trees are float32.

        m = βΔ + γφ  with  Δ = θ − φ
        δ ← αδ + mean(m) − γφ;   φ ← φ + δ;   θ ← φ

    NoLoCo uses it as it is (Eqs. 1 to 3, with the sign of Eq. 32), DiLoCo with γ = 0, Epidemic Learning with α = 0 and
    β = γ = 1, where m = θ and θ ← mean(θ).

    Attributes:
      alpha, beta, gamma: outer momentum α, outer learning rate β, consensus γ; γ is the number 0 for DiLoCo.
      nesterov: φ ← φ + αδ + mean(m) − γφ with the new δ.
      of_corrections: accumulate only corrections in the momentum: φ ← φ + αδ + mean(m) − γφ; δ ← αδ + mean(m) − m. The
        corrections of a group sum to zero, so that the replicas' mean moves as without momentum.
      keeps_state: False for α = 0 and β = γ = 1, to keep neither φ nor δ.
    """

    alpha: Number
    beta: Number
    gamma: Number
    nesterov: bool = False
    of_corrections: bool = False
    keeps_state: bool = True

    def init(self, params: PyTree) -> Any:
        """Return slow weights equal to the parameters, in copies, and no momentum."""
        if not self.keeps_state:
            return ()
        slow = jax.tree.map(lambda p: jnp.array(p, jnp.float32, copy=True), params)
        return Momentum(slow, jax.tree.map(jnp.zeros_like, slow))

    def message(self, state: Any, theta: PyTree, k: Any) -> PyTree:
        """Return the message m, a tree like θ."""
        if not self.keeps_state:
            # Copies, as NumPy's arrays have no sharding under a `vmap` that is not compiled.
            return jax.tree.map(lambda x: jnp.array(x, copy=True), theta)
        beta = at(self.beta, k)
        message = jax.tree.map(lambda th, phi: beta * (th - phi), theta, state.slow)
        return self._plus_gamma(1, message, state.slow, k)

    def movement(self, state: Any, theta: PyTree, k: Any) -> PyTree:
        """Estimate the movement of every number, in inner steps and in the last outer step, by sqrt((βΔ)² + δ²)."""
        if not self.keeps_state:
            return jax.tree.map(jnp.abs, theta)  # an upper bound, as no earlier weights are known
        beta = at(self.beta, k)

        def moved(phi: jax.Array, delta: jax.Array, th: jax.Array) -> jax.Array:
            return jnp.sqrt(jnp.square(beta * (th - phi)) + jnp.square(delta))

        return jax.tree.map(moved, *state, theta)

    def receive(self, state: Any, message: PyTree, mean: PyTree, k: Any) -> tuple[PyTree, Any]:
        """Return (new θ, new state) from the own message and the group's mean; the two are equal in a local step."""
        if not self.keeps_state:
            return mean, state
        alpha = at(self.alpha, k)
        carried = jax.tree.map(lambda delta: alpha * delta, state.momentum)
        pull = self._plus_gamma(-1, mean, state.slow, k)
        step = momentum = added(carried, pull)
        if self.of_corrections:
            momentum = added(carried, jax.tree.map(jnp.subtract, mean, message))
        elif self.nesterov:
            step = jax.tree.map(lambda delta, x: alpha * delta + x, momentum, pull)
        slow = added(state.slow, step)
        return slow, Momentum(slow, momentum)

    def correct(self, state: Any, theta: PyTree, correction: PyTree, k: Any) -> tuple[PyTree, Any]:
        """Apply the correction c of round `k` after its local step and possibly further inner steps: (θ, state).

        It adds c to δ, and c (with Nesterov (1 + α) c) to φ and θ. Directly after the local step the result equals that
        of `receive` with the mean, up to rounding.
        """
        if not self.keeps_state:
            return added(theta, correction), state
        gain = 1 + at(self.alpha, k) if self.nesterov else 1
        step = jax.tree.map(lambda c: gain * c, correction)
        return added(theta, step), Momentum(added(state.slow, step), added(state.momentum, correction))

    def _plus_gamma(self, sign: int, tree: PyTree, slow: PyTree, k: Any) -> PyTree:
        """Return tree ± γφ; the tree itself where γ is the number 0."""
        if isinstance(self.gamma, int | float) and self.gamma == 0:
            return tree
        gamma = at(self.gamma, k)
        return jax.tree.map(lambda x, phi: x + gamma * phi if sign > 0 else x - gamma * phi, tree, slow)


def at(value: Number, k: Any) -> Any:
    """Return a number as it is, or a schedule's value in round `k`, such that it leaves float32 arrays float32."""
    number: Any = value(k) if callable(value) else value
    return number.astype(np.float32) if hasattr(number, "astype") else number


def added(tree: PyTree, other: PyTree) -> PyTree:
    """Return the leafwise sum."""
    return jax.tree.map(jnp.add, tree, other)


def computed(tree: PyTree) -> PyTree:
    """Convert every leaf to a float32 JAX array, in which outer steps are computed."""
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


def at_num_outer_steps(state: OuterState, count: int) -> OuterState:
    """Return a fresh state as that of a replica which has taken `count` outer steps."""
    before = state.num_outer_steps
    return state._replace(num_outer_steps=jax.device_put(np.full(before.shape, count, before.dtype), before.sharding))
