"""SparseLoCo's rule (arXiv 2508.15706): top-k sparsified, quantized messages with error feedback."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from noloco_jax.outer.momentum import initial, kept
from noloco_jax.outer.rule import Number, added, at, computed, scaled

PyTree = Any


class Feedback(NamedTuple):
    """State of the rule.

    Attributes:
      slow: φ, the weights after the last outer step, equal on all replicas, of the parameters' shapes.
      error: e, the error feedback not sent yet, of the parameters' shapes.
    """

    slow: PyTree
    error: PyTree


class Split(NamedTuple):
    """Message of two trees like the parameters; the exchange averages the first.

    Attributes:
      sent: Q(TOP-k(e)).
      rest: e − Q(TOP-k(e)), which stays on the replica.
    """

    sent: PyTree
    rest: PyTree


@dataclass(frozen=True)
class SparseLoCo:
    """e ← βe + Δ with Δ = θ − φ; Δ̂ = Q(TOP-k(e)); e ← e − Δ̂; φ ← φ + α mean(Δ̂); θ ← φ (Algorithm 1).

    The paper's Δ is φ − θ, which it subtracts. The error takes the place of an outer momentum.

    Attributes:
      outer_lr: α.
      error_decay: β.
      sparsify: Q(TOP-k(x)) of a tree of one replica's arrays, of their shapes and dtypes.
      state_dtype: dtype in which φ and e are kept; they are computed in float32.
    """

    outer_lr: Number
    error_decay: Number
    sparsify: Callable[[PyTree], PyTree]
    state_dtype: jnp.dtype

    def init(self, params: PyTree) -> Feedback:
        """Return slow weights equal to the parameters and zero error."""
        return Feedback(*initial(params, self.state_dtype))

    def message(self, state: Feedback, theta: PyTree, round: Any) -> Split:
        """Return Δ̂ and the rest of e ← βe + Δ."""
        beta = at(self.error_decay, round)
        error = jax.tree.map(
            lambda e, th, phi: scaled(beta, e) + (th - phi), computed(state.error), theta, computed(state.slow)
        )
        sent = self.sparsify(error)
        return Split(sent, jax.tree.map(jnp.subtract, error, sent))

    def movement(self, state: Feedback, theta: PyTree, round: Any) -> Split:
        """Return |Δ| for both trees of the message."""
        del round
        moved = jax.tree.map(lambda th, phi: abs(th - phi), theta, computed(state.slow))
        return Split(moved, moved)

    def receive(self, state: Feedback, message: Split, mean: Split, round: Any) -> tuple[PyTree, Feedback]:
        """φ ← φ + α mean(Δ̂); θ ← φ; e is the rest."""
        del message
        slow = added(computed(state.slow), self._step(mean, round))
        return slow, Feedback(*kept(slow, mean.rest, self.state_dtype, round))

    def correct(self, state: Feedback, theta: PyTree, correction: Split, round: Any) -> tuple[PyTree, Feedback]:
        """Add α c to φ and θ."""
        step = self._step(correction, round)
        slow = added(computed(state.slow), step)
        return added(computed(theta), step), Feedback(*kept(slow, computed(state.error), self.state_dtype, round))

    def _step(self, message: Split, round: Any) -> PyTree:
        return jax.tree.map(lambda x: scaled(at(self.outer_lr, round), x), message.sent)
