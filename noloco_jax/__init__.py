"""NoLoCo for JAX: train model replicas that average with one random other instead of all-reducing.

The outer optimizers work in any Optax loop; importing them pulls in jax and optax only.
"""

from noloco_jax.outer.diloco import diloco
from noloco_jax.outer.noloco import noloco
from noloco_jax.outer.pairing import ExplicitPairing, RandomPairing

__all__ = ["ExplicitPairing", "RandomPairing", "diloco", "noloco"]
