"""Epidemic Learning's rule (arXiv 2310.01972): the plain mean of the weights, with no slow weights and no momentum."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from noloco_jax.outer.rule import added, computed

PyTree = Any


@dataclass(frozen=True)
class Epidemic:
    """θ ← mean(θ) over the replica and those that sent to it (Algorithm 1, line 8).

    The message is m = θ.
    """

    def init(self, params: PyTree) -> tuple[()]:
        """Return an empty state: nothing is kept between outer steps."""
        del params
        return ()

    def message(self, state: tuple[()], theta: PyTree, round: Any) -> PyTree:
        """Return m = θ, copied to JAX arrays: under a `vmap` that is not compiled, numpy arrays have no sharding."""
        del state, round
        return jax.tree.map(lambda x: jnp.array(x, copy=True), theta)

    def movement(self, state: tuple[()], theta: PyTree, round: Any) -> PyTree:
        """Return |θ| as a rough upper bound: the movement is unknown, since no earlier weights are kept."""
        del state, round
        return jax.tree.map(abs, theta)

    def receive(self, state: tuple[()], message: PyTree, mean: PyTree, round: Any) -> tuple[PyTree, tuple[()]]:
        """θ ← mean."""
        del message, round
        return mean, state

    def correct(self, state: tuple[()], theta: PyTree, correction: PyTree, round: Any) -> tuple[PyTree, tuple[()]]:
        """Add c to θ."""
        del round
        return added(computed(theta), correction), state
