"""NoLoCo's rule (arXiv 2506.10911, Section 3): a momentum step towards and along with the group."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from noloco_jax.outer.momentum import Momentum, initial, kept, moved
from noloco_jax.outer.rule import Number, added, at, computed

PyTree = Any


@dataclass(frozen=True)
class NoLoCo:
    """Δ = θ − φ; δ ← α δ + β mean(Δ) + γ (mean(φ) − φ); φ ← φ + δ; θ ← φ (Eqs. 1 to 3, with the sign of Eq. 32).

    Since β mean(Δ) + γ mean(φ) = mean(βΔ + γφ), the message is the one tensor m = βΔ + γφ, and δ ← α δ + mean(m) − γφ.

    Attributes:
      outer_lr: β.
      outer_momentum: α.
      consensus: γ.
      state_dtype: in which φ and δ are kept; they are computed in float32.
    """

    outer_lr: Number
    outer_momentum: Number
    consensus: Number
    state_dtype: jnp.dtype

    def init(self, params: PyTree) -> Momentum:
        """Slow weights equal to the parameters, no momentum."""
        return initial(params, self.state_dtype)

    def message(self, state: Momentum, theta: PyTree, round: Any) -> PyTree:
        """m = βΔ + γφ."""
        beta, gamma = at(self.outer_lr, round), at(self.consensus, round)
        return jax.tree.map(lambda th, phi: beta * (th - phi) + gamma * phi, theta, computed(state.slow))

    def movement(self, state: Momentum, theta: PyTree, round: Any) -> PyTree:
        """sqrt(Δ² + δ²)."""
        del round
        return moved(state, theta)

    def receive(self, state: Momentum, mean: PyTree, round: Any) -> tuple[PyTree, Momentum]:
        """δ ← αδ + mean − γφ; φ ← φ + δ; θ ← φ."""
        alpha, gamma = at(self.outer_momentum, round), at(self.consensus, round)
        slow = computed(state.slow)
        momentum = jax.tree.map(
            lambda delta, m, phi: alpha * delta + (m - gamma * phi), computed(state.momentum), mean, slow
        )
        slow = added(slow, momentum)
        return slow, kept(slow, momentum, self.state_dtype, round)

    def correct(self, state: Momentum, theta: PyTree, correction: PyTree, round: Any) -> tuple[PyTree, Momentum]:
        """δ, φ and θ gain c."""
        slow, momentum = added(computed(state.slow), correction), added(computed(state.momentum), correction)
        return added(computed(theta), correction), kept(slow, momentum, self.state_dtype, round)
