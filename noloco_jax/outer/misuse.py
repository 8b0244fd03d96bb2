"""Checks, while a program is traced, that parameters can be averaged over replicas."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any
_DTYPES = ("float32", "bfloat16", "float16")


def check_leaves(params: PyTree) -> None:
    """Check that the parameters are arrays of floating-point numbers that outer steps can compute in float32.

    Raises:
      TypeError: for another leaf, by its name.
    """
    for path, leaf in jax.tree.leaves_with_path(params):
        name = jax.tree_util.keystr(path) or "the parameter"
        dtype = getattr(leaf, "dtype", None)
        if dtype is None:
            raise TypeError(f"{name} is a Python {type(leaf).__name__}: give an array, such as jnp.asarray({leaf!r})")
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            raise TypeError(f"{name} is a PRNG key and has no mean over replicas: keep it out of the parameters")
        if dtype.name in _DTYPES:
            continue
        if jnp.issubdtype(dtype, jnp.inexact):
            raise TypeError(f"{name} is of {dtype} and outer steps compute in float32: convert it to float32")
        raise TypeError(
            f"{name} is of {dtype} and has no mean over replicas: keep it out of the parameters, or wrap the outer "
            "optimizer in optax.masked"
        )


def check_varying(params: PyTree, axis_names: Sequence[str]) -> None:
    """Check that the type of the parameters in `shard_map` lets them differ between replicas.

    Args:
      params: parameters of one replica.
      axis_names: the axes of replicas.

    Raises:
      ValueError: if they are typed as equal on all replicas.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    tracked = [axis for axis in axis_names if axis in manual and axis in _varying(jax.lax.axis_index(axis))]
    for path, leaf in jax.tree.leaves_with_path(params) if tracked else ():
        fixed = [axis for axis in tracked if axis not in _varying(leaf)]
        if fixed:
            raise ValueError(
                f"{jax.tree_util.keystr(path) or 'the parameter'} is the same on all devices of axis {fixed[0]!r} by "
                "its type, so that jax.grad sums its gradient over them at every step: pass parameters and state "
                f"through shard_map with in_specs=P({fixed[0]!r}), replicas leading, or cast them by "
                "jax.lax.pcast(..., to='varying') before the gradient is taken"
            )


def _varying(x: Any) -> frozenset[str]:
    """Return the mesh axes over which a value may differ, as `shard_map` tracks them (`check_vma`)."""
    return jax.typeof(x).mat.varying
