"""The merged model of an own loop: the mean of its replicas."""

from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


def merged(replicas: PyTree) -> PyTree:
    """Return one model: the mean over the replicas, the leading axis, of every array of floating-point numbers.

    Other arrays, such as the keys and counters of a dropout in Flax NNX, are those of the first replica.

    Args:
      replicas: any pytree of arrays with the replicas in front: parameters, an `nnx.State`, a registered dataclass.

    Returns:
      A tree like it without that axis; means are computed in float32 at least and keep the array's dtype.

    Raises:
      ValueError: for an array without that axis, by its name.
    """

    def one(path: Any, x: Any) -> Any:
        if not jnp.ndim(x):
            name = jax.tree_util.keystr(path) or "the array"
            raise ValueError(
                f"{name} is a scalar and has no axis of replicas: give the replicas in front, or leave it out"
            )
        return jnp.mean(x, axis=0) if jnp.issubdtype(x.dtype, jnp.inexact) else x[0]

    return jax.tree.map_with_path(one, replicas)
