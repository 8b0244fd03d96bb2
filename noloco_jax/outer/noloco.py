"""NoLoCo's rule (arXiv 2506.10911, Section 3): a momentum step that also pulls a replica towards its group."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from noloco_jax.outer.momentum import Momentum, initial, kept, moved
from noloco_jax.outer.rule import Number, added, at, computed, scaled

PyTree = Any
MOMENTUM_OF = ("steps", "corrections")


@dataclass(frozen=True)
class NoLoCo:
    """Δ = θ − φ; δ ← α δ + β mean(Δ) + γ (mean(φ) − φ); φ ← φ + δ; θ ← φ (Eqs. 1 to 3, with the sign of Eq. 32).

    Since β mean(Δ) + γ mean(φ) = mean(βΔ + γφ), the message is the one tensor m = βΔ + γφ, and δ ← α δ + mean(m) − γφ.

    Attributes:
      outer_lr: β.
      outer_momentum: α.
      consensus: γ.
      state_dtype: dtype in which φ and δ are kept; they are computed in float32.
      of_corrections: accumulate only corrections in the momentum: φ ← φ + αδ + mean(m) − γφ; δ ← αδ + mean(m) − m. The
        corrections of a group sum to zero, so that the replicas' mean moves as without momentum.
    """

    outer_lr: Number
    outer_momentum: Number
    consensus: Number
    state_dtype: jnp.dtype
    of_corrections: bool = False

    def init(self, params: PyTree) -> Momentum:
        """Slow weights equal to the parameters, no momentum."""
        return initial(params, self.state_dtype)

    def message(self, state: Momentum, theta: PyTree, round: Any) -> PyTree:
        """m = βΔ + γφ."""
        beta, gamma = at(self.outer_lr, round), at(self.consensus, round)
        return jax.tree.map(lambda th, phi: scaled(beta, th - phi) + scaled(gamma, phi), theta, computed(state.slow))

    def movement(self, state: Momentum, theta: PyTree, round: Any) -> PyTree:
        """sqrt(Δ² + δ²)."""
        del round
        return moved(state, theta)

    def receive(self, state: Momentum, message: PyTree, mean: PyTree, round: Any) -> tuple[PyTree, Momentum]:
        """φ ← φ + αδ + mean − γφ; θ ← φ; δ is that step, or its corrections alone (`of_corrections`)."""
        alpha, gamma = at(self.outer_momentum, round), at(self.consensus, round)
        slow, carried = computed(state.slow), jax.tree.map(lambda delta: scaled(alpha, delta), computed(state.momentum))
        step = jax.tree.map(lambda before, m, phi: before + (m - scaled(gamma, phi)), carried, mean, slow)
        momentum = added(carried, jax.tree.map(jnp.subtract, mean, message)) if self.of_corrections else step
        slow = added(slow, step)
        return slow, kept(slow, momentum, self.state_dtype, round)

    def correct(self, state: Momentum, theta: PyTree, correction: PyTree, round: Any) -> tuple[PyTree, Momentum]:
        """Add c to δ, φ and θ."""
        slow, momentum = added(computed(state.slow), correction), added(computed(state.momentum), correction)
        return added(computed(theta), correction), kept(slow, momentum, self.state_dtype, round)
