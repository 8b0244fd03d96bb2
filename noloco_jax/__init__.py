"""NoLoCo for JAX: train model replicas that average with one random other instead of all-reducing.

The outer optimizers work in any Optax loop; using them pulls in jax and optax only. Importing the package alone
pulls in neither, so that its commands answer at once.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from noloco_jax.config.config_file import default_config
    from noloco_jax.islands.island import Island
    from noloco_jax.optim.merged import merged
    from noloco_jax.optim.neighbours import RandomNeighbours
    from noloco_jax.optim.pairing import ExplicitPairing, RandomPairing
    from noloco_jax.optim.transforms import diloco, epidemic, noloco, sparseloco

__version__ = "0.1.0"  # pyproject.toml reads it from here, without importing
__all__ = [
    "ExplicitPairing",
    "Island",
    "RandomNeighbours",
    "RandomPairing",
    "default_config",
    "diloco",
    "epidemic",
    "merged",
    "noloco",
    "sparseloco",
]
_HOMES = {
    "Island": "islands.island",
    "default_config": "config.config_file",
    "RandomNeighbours": "optim.neighbours",
    "merged": "optim.merged",
    **dict.fromkeys(("ExplicitPairing", "RandomPairing"), "optim.pairing"),
    **dict.fromkeys(("diloco", "epidemic", "noloco", "sparseloco"), "optim.transforms"),
}


def __getattr__(name: str) -> Any:
    """Return a public name from the module that defines it, which is imported at its first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """Return the public names and those that Python gives a module."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
