"""Parameters in F fragments of equal bytes: every outer step sends one fragment, in turn.

A fragment is a stripe of every array: of the runs of neighbouring indices along a dimension, it holds those whose
number has the same remainder modulo F. All fragments therefore have the same shapes, and one compiled program serves
them all, with the fragment's number as a value. The assignment of weights to fragments does not depend on the number of
devices. Cutting a dimension that lies on up to 8 devices needs no communication, since each holds its part of every
stripe.

Outer step k = 0, 1, ... exchanges fragment k mod F, and is round k // F of that fragment.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
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
WHOLE = -2  # instead of a dimension: a scalar of the state, which is not cut


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
    """Cut of the parameters into fragments.

    Attributes:
      count: F; 1 leaves them whole.
      dimension: path and shape of an array of one replica -> the dimension to cut; None: `smallest_dimension`.
    """

    count: int = 1
    dimension: Dimension | None = None

    def cuts(self, params: PyTree) -> PyTree:
        """Return the dimension along which each array is cut, a tree like the parameters."""
        return jax.tree.map_with_path(lambda path, x: self._cut(path, x.shape), params)

    def hidden(self, part: PyTree) -> PyTree:
        """Return the hidden dimension of each array of a fragment, along which weights belong to one unit."""
        whole = Fragments(1, self.dimension)
        return jax.tree.map_with_path(lambda path, x: 0 if x.ndim == 1 else whole._cut(path, x.shape), part)

    def part(self, tree: PyTree, cuts: PyTree, number: jax.Array) -> PyTree:
        """Return the fragment of outer step `number` from a tree like the parameters."""
        if self.count == 1:
            return tree
        return jax.tree.map(lambda x, cut: _take(x, cut, self.count, number % self.count), tree, cuts)

    def put(self, tree: PyTree, part: PyTree, cuts: PyTree, number: jax.Array) -> PyTree:
        """Return the tree with that fragment replaced, in the dtypes of `tree`."""
        if self.count == 1:
            return jax.tree.map(lambda x, y: y.astype(x.dtype), tree, part)
        return jax.tree.map(lambda x, y, cut: _put(x, y, cut, self.count, number % self.count), tree, part, cuts)

    def part_of_state(self, init: Any, state: PyTree, cuts: PyTree, number: jax.Array) -> PyTree:
        """Return the fragment of a rule's state: a stripe of every tree like the parameters, and all scalars."""
        if self.count == 1:
            return state
        taken: Any = optax.tree.map_params(
            init, lambda x, cut: _take(x, cut, self.count, number % self.count), state, cuts
        )
        return taken

    def put_in_state(self, init: Any, state: PyTree, part: PyTree, cuts: PyTree, number: jax.Array) -> PyTree:
        """Return the rule's state with that fragment replaced, and the scalars of `part`."""
        if self.count == 1:
            return part
        cuts_of_state = optax.tree.map_params(
            init, lambda _, cut: cut, state, cuts, transform_non_params=lambda _: WHOLE
        )
        return jax.tree.map(
            lambda x, y, cut: y if cut == WHOLE else _put(x, y, cut, self.count, number % self.count),
            state,
            part,
            cuts_of_state,
        )

    def _cut(self, path: tuple, shape: tuple[int, ...]) -> int:
        if self.dimension is None or not shape:
            return smallest_dimension(shape, self.count)
        return self.dimension(path, shape)


def _take(x: jax.Array, cut: int, count: int, fragment: jax.Array) -> jax.Array:
    if cut == FLAT:
        return lax.dynamic_index_in_dim(_rows(x, count), fragment, 0, keepdims=False)
    runs = lax.dynamic_index_in_dim(_stripes(x, cut, count), fragment, cut + 1, keepdims=False)
    return runs.reshape(*x.shape[:cut], x.shape[cut] // count, *x.shape[cut + 1 :])


def _put(x: jax.Array, part: jax.Array, cut: int, count: int, fragment: jax.Array) -> jax.Array:
    part = part.astype(x.dtype)
    if cut == FLAT:
        rows = lax.dynamic_update_index_in_dim(_rows(x, count), part, fragment, 0)
        return jnp.ravel(rows)[: x.size].reshape(x.shape)
    stripes = _stripes(x, cut, count)
    runs = part.reshape(*stripes.shape[: cut + 1], *stripes.shape[cut + 2 :])
    return lax.dynamic_update_index_in_dim(stripes, runs, fragment, cut + 1).reshape(x.shape)


def _stripes(x: jax.Array, cut: int, count: int) -> jax.Array:
    """Reshape a dimension of n · F · r elements to three, (n, F, r), for runs of r."""
    size = x.shape[cut]
    run = next((run for run in _RUNS if size % (_SHARDS * count * run) == 0), 1)
    return x.reshape(*x.shape[:cut], size // (count * run), count, run, *x.shape[cut + 1 :])


def _rows(x: jax.Array, count: int) -> jax.Array:
    """Return the elements as F rows, padded with zeros at the end."""
    return jnp.pad(jnp.ravel(x), (0, -x.size % count)).reshape(count, -1)
