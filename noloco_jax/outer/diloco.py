"""DiLoCo's rule (arXiv 2311.08105), the baseline that averages over all replicas."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from noloco_jax.outer.momentum import Momentum, initial, kept, moved
from noloco_jax.outer.rule import Number, added, at, computed, scaled

PyTree = Any


@dataclass(frozen=True)
class DiLoCo:
    """Δ = θ − φ; δ ← α δ + β mean(Δ); φ ← φ + δ (heavy ball) or φ ← φ + α δ + β mean(Δ) (Nesterov); θ ← φ.

    The message is m = βΔ.

    Attributes:
      outer_lr: β.
      outer_momentum: α.
      nesterov: true Nesterov momentum, instead of heavy ball.
      state_dtype: dtype in which φ and δ are kept; they are computed in float32.
    """

    outer_lr: Number
    outer_momentum: Number
    nesterov: bool
    state_dtype: jnp.dtype

    def init(self, params: PyTree) -> Momentum:
        """Slow weights equal to the parameters, no momentum."""
        return initial(params, self.state_dtype)

    def message(self, state: Momentum, theta: PyTree, round: Any) -> PyTree:
        """m = βΔ."""
        beta = at(self.outer_lr, round)
        return jax.tree.map(lambda th, phi: scaled(beta, th - phi), theta, computed(state.slow))

    def movement(self, state: Momentum, theta: PyTree, round: Any) -> PyTree:
        """sqrt(Δ² + δ²)."""
        del round
        return moved(state, theta)

    def receive(self, state: Momentum, message: PyTree, mean: PyTree, round: Any) -> tuple[PyTree, Momentum]:
        """δ ← αδ + mean; φ ← φ + δ, or φ ← φ + αδ + mean; θ ← φ."""
        del message
        alpha = at(self.outer_momentum, round)
        momentum = jax.tree.map(lambda delta, m: scaled(alpha, delta) + m, computed(state.momentum), mean)
        step = jax.tree.map(lambda delta, m: scaled(alpha, delta) + m, momentum, mean) if self.nesterov else momentum
        slow = added(computed(state.slow), step)
        return slow, kept(slow, momentum, self.state_dtype, round)

    def correct(self, state: Momentum, theta: PyTree, correction: PyTree, round: Any) -> tuple[PyTree, Momentum]:
        """Add c to δ, and c (with Nesterov (1 + α) c) to φ and θ."""
        gain = 1 + at(self.outer_momentum, round) if self.nesterov else 1
        step = jax.tree.map(lambda c: scaled(gain, c), correction)
        slow, momentum = added(computed(state.slow), step), added(computed(state.momentum), correction)
        return added(computed(theta), step), kept(slow, momentum, self.state_dtype, round)
