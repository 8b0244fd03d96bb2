"""Parameters in F fragments of equal bytes: every outer step sends one fragment, in turn.

A fragment is a stripe of every array: of the runs of neighbouring indices along a dimension, it holds those whose
number has the same remainder modulo F. All fragments therefore have the same shapes, and one compiled program serves
them all, with the fragment's number as a value. The assignment of weights to fragments does not depend on the number of
devices. Cutting a dimension that lies on up to 8 devices needs no communication, since each holds its part of every
stripe.

Outer step number = 0, 1, ... exchanges fragment number mod F, and is round number // F of that fragment.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

PyTree = Any

# Version of the assignment of weights to fragments, for checkpoints and islands; 1 had no runs.
LAYOUT = 2
# A GPU moves memory in sectors of 32 bytes, 8 float32 numbers, and reads or writes whole ones.
_RUNS = (8, 4, 2)
_SHARDS = 8  # devices on which a dimension may lie with whole runs of every fragment on each

# Path and shape of a parameter -> the dimension along which it is cut; FLAT: as a vector, padded with zeros.
Dimension = Callable[[tuple, tuple[int, ...]], int]
FLAT = -1


def smallest_dimension(shape: tuple[int, ...], count: int) -> int:
    """Return the smallest dimension of at least 64 elements that `count` divides, else the largest such, else FLAT.

    In most arrays of a language model this is the hidden dimension: it is larger than the stacked layers in front and
    smaller than the vocabulary, both of which a pipeline may divide.
    """
    fitting = [dim for dim, size in enumerate(shape) if size and size % count == 0]
    wide = [dim for dim in fitting if shape[dim] >= 64]
    if wide:
        return min(wide, key=lambda dim: shape[dim])
    return max(fitting, key=lambda dim: shape[dim], default=FLAT)


def described(count: int) -> str:
    """Return what islands compare of their fragments: the number of them, and if there are several, their layout."""
    return f"{count} fragments" + (f", layout {LAYOUT}" if count > 1 else "")


@dataclass(frozen=True)
class Fragments:
    """Assignment of the parameters to fragments.

    Attributes:
      count: F; 1 leaves them whole.
      dimension: path and shape of an array of one replica -> the dimension to cut; None: `smallest_dimension`.
    """

    count: int = 1
    dimension: Dimension | None = None

    def of(self, number: Any) -> tuple[Any, Any]:
        """Return the fragment that outer step `number` exchanges, and its round."""
        return number % self.count, number // self.count

    def dims(self, params: PyTree) -> PyTree:
        """Return the dimension along which each array is cut into fragments, a tree like the parameters."""
        return jax.tree.map_with_path(lambda path, x: self._dim(path, x.shape), params)

    def block_dims(self, message: PyTree) -> PyTree:
        """Return the hidden dimension of each array of a fragment, along which weights belong to one unit.

        Wire formats cut blocks along it.
        """
        whole = Fragments(1, self.dimension)
        return jax.tree.map_with_path(lambda path, x: 0 if x.ndim == 1 else whole._dim(path, x.shape), message)

    def take(self, tree: PyTree, number: Any, like: PyTree = None) -> PyTree:
        """Return the fragment of outer step `number` from a tree like the parameters.

        Args:
          tree: arrays of the parameters' number of dimensions.
          number: int32 scalar.
          like: arrays or shapes of the parameters, if `tree` has others.
        """
        if self.count == 1:
            return tree
        fragment = number % self.count
        dims = self.dims(tree if like is None else like)
        return jax.tree.map(lambda x, dim: _take(x, dim, self.count, fragment), tree, dims)

    def put(self, tree: PyTree, part: PyTree, number: Any, like: PyTree = None) -> PyTree:
        """Return the tree with that fragment replaced, in the dtypes of `tree`; arguments as for `take`."""
        if self.count == 1:
            return jax.tree.map(lambda x, y: y.astype(x.dtype), tree, part)
        fragment = number % self.count
        dims = self.dims(tree if like is None else like)
        return jax.tree.map(lambda x, y, dim: _put(x, y, dim, self.count, fragment), tree, part, dims)

    def _dim(self, path: tuple, shape: tuple[int, ...]) -> int:
        if self.dimension is None or not shape:
            return smallest_dimension(shape, self.count)
        return self.dimension(path, shape)


def _take(x: jax.Array, dim: int, count: int, fragment: jax.Array) -> jax.Array:
    if dim == FLAT:
        return lax.dynamic_index_in_dim(_rows(x, count), fragment, 0, keepdims=False)
    runs = lax.dynamic_index_in_dim(_stripes(x, dim, count), fragment, dim + 1, keepdims=False)
    return runs.reshape(*x.shape[:dim], x.shape[dim] // count, *x.shape[dim + 1 :])


def _put(x: jax.Array, part: jax.Array, dim: int, count: int, fragment: jax.Array) -> jax.Array:
    part = part.astype(x.dtype)
    if dim == FLAT:
        rows = lax.dynamic_update_index_in_dim(_rows(x, count), part, fragment, 0)
        return jnp.ravel(rows)[: x.size].reshape(x.shape)
    stripes = _stripes(x, dim, count)
    runs = part.reshape(*stripes.shape[: dim + 1], *stripes.shape[dim + 2 :])
    return lax.dynamic_update_index_in_dim(stripes, runs, fragment, dim + 1).reshape(x.shape)


def _stripes(x: jax.Array, dim: int, count: int) -> jax.Array:
    """Reshape a dimension of n · F · r elements to three, (n, F, r), for runs of r."""
    size = x.shape[dim]
    run = next((run for run in _RUNS if size % (_SHARDS * count * run) == 0), 1)
    return x.reshape(*x.shape[:dim], size // (count * run), count, run, *x.shape[dim + 1 :])


def _rows(x: jax.Array, count: int) -> jax.Array:
    """Return the elements as F rows, padded with zeros at the end."""
    return jnp.pad(jnp.ravel(x), (0, -x.size % count)).reshape(count, -1)
