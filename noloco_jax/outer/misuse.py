"""Checks, while a program is traced, that the outer optimizer is used where it can work."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


def check_params(params: PyTree, axis_names: Sequence[str]) -> None:
    """Check that the parameters are floating-point arrays whose type lets them differ between replicas.

    Args:
      params: parameters of one replica.
      axis_names: the axes of replicas.

    Raises:
      TypeError: if a leaf holds integers or booleans.
      ValueError: if the parameters are typed as equal on all replicas in `shard_map`.
    """
    for path, leaf in jax.tree.leaves_with_path(params):
        name = jax.tree_util.keystr(path) or "the parameter"
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise TypeError(
                f"{name} is of {leaf.dtype} and has no mean over replicas: keep it out of the parameters, or wrap the "
                "outer optimizer in optax.masked"
            )
        fixed = [axis for axis in axis_names if _is_tracked(axis) and axis not in _varying(leaf)]
        if fixed:
            raise ValueError(
                f"{name} is the same on all devices of axis {fixed[0]!r} by its type, so that jax.grad sums its "
                f"gradient over them at every step: pass parameters and state through shard_map with "
                f"in_specs=P({fixed[0]!r}), replicas leading, or cast them by jax.lax.pcast(..., to='varying') "
                "before the gradient is taken"
            )


def _varying(x: Any) -> frozenset[str]:
    """Return the mesh axes over which a value may differ, as `shard_map` tracks them."""
    return jax.typeof(x).mat.varying


def _is_tracked(axis: str) -> bool:
    """Return True for a mesh axis in a `shard_map` that tracks varying values (`check_vma`)."""
    if axis not in jax.sharding.get_abstract_mesh().manual_axes:
        return False
    return axis in _varying(jax.lax.axis_index(axis))
