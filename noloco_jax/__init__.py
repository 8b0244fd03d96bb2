"""NoLoCo for JAX: train model replicas that average with one random other instead of all-reducing.

The outer optimizers work in any Optax loop; importing them pulls in jax and optax only.
"""

from noloco_jax.outer.neighbours import RandomNeighbours
from noloco_jax.outer.pairing import ExplicitPairing, RandomPairing
from noloco_jax.transforms import diloco, epidemic, noloco, sparseloco

__all__ = ["ExplicitPairing", "RandomNeighbours", "RandomPairing", "diloco", "epidemic", "noloco", "sparseloco"]
