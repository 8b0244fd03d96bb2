"""Spec of a user's tree: kinds and places of its leaves, to which arrays from a peer or a checkpoint return."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from noloco_jax.islands.payload import ArraySpec

PyTree = Any


class _Leaf(NamedTuple):
    """Spec of one leaf.

    Attributes:
      name: its path.
      spec: shape and dtype of the array that stands for it.
      kind: the type of a number; None for an array.
      sharding: of a JAX array; None for others.
      committed: True for a JAX array that was placed explicitly.
      key: implementation of a typed random key; None for others.
    """

    name: str
    spec: ArraySpec
    kind: type | None = None
    sharding: Any = None
    committed: bool = False
    key: Any = None


def summary(arrays: PyTree) -> str:
    """Return the norm of real arrays, and their sum as a multiple of it: two random draws have different ones.

    It is rounded, so that equal weights have one summary although two machines' last bits differ.
    """
    squares = total = 0.0
    for leaf in jax.tree.leaves(arrays):
        x = jnp.asarray(leaf, np.float32)
        squares, total = squares + float(jnp.sum(x * x)), total + float(jnp.sum(x))
    norm = math.sqrt(squares)
    return f"norm {norm:.3g} and sum {total / (norm or 1.0):.2f} x norm"


class TreeSpec:
    """Structure, shapes, dtypes and places of a tree of arrays, numbers and random keys; it keeps none of them.

    Args:
      tree: leaves of JAX or NumPy arrays, Python numbers, and typed random keys.
      what: what the tree is, for errors.
      is_computed: True for leaves that programs compute with, in a dtype that JAX has.

    Raises `ValueError` for other leaves, empty arrays, and arrays that lie on several processes.
    """

    def __init__(self, tree: PyTree, what: str, is_computed: bool = False):
        self._what, self._is_computed = what, is_computed
        named, self.structure = jax.tree.flatten_with_path(tree)
        self._leaves = [self._leaf(jax.tree_util.keystr(path), x) for path, x in named]

    @property
    def specs(self) -> dict[str, ArraySpec]:
        """Return the spec of the array of every leaf, by its path."""
        return {leaf.name: leaf.spec for leaf in self._leaves}

    @property
    def mesh(self) -> Mesh | AbstractMesh | None:
        """Return the mesh of the arrays; None where no array is sharded by name."""
        found = (leaf.sharding.mesh for leaf in self._leaves if isinstance(leaf.sharding, NamedSharding))
        return next(found, None)

    def shapes(self) -> PyTree:
        """Return shapes, dtypes and shardings of the arrays on their devices; no sharding: the default device."""
        return self.structure.unflatten(
            jax.ShapeDtypeStruct(leaf.spec.shape, leaf.spec.dtype, sharding=self._place(leaf)) for leaf in self._leaves
        )

    def arrays(self, tree: PyTree) -> PyTree:
        """Return the tree with an array for every leaf; JAX arrays are on their devices.

        Raises `ValueError` for a tree of another form.
        """
        leaves, structure = jax.tree.flatten(tree)
        if structure != self.structure:
            raise ValueError(f"{self._what} changed its structure from {self.structure} to {structure}: keep it")
        return structure.unflatten(map(self._array, self._leaves, leaves))

    def given(self, arrays: PyTree) -> PyTree:
        """Return the tree that the user knows, from arrays as of `arrays`."""
        return self.structure.unflatten(map(self._given, self._leaves, jax.tree.leaves(arrays)))

    def _place(self, leaf: _Leaf) -> Any:
        """Return the sharding of a leaf's array for computations, on the devices of all others; None: the default.

        Numbers and NumPy arrays that nothing computes with stay on the host: None.
        """
        if leaf.sharding is None and not self._is_computed:
            return None
        if isinstance(leaf.sharding, NamedSharding):
            return leaf.sharding
        if (mesh := self.mesh) is not None:
            return NamedSharding(mesh, P())
        return leaf.sharding if leaf.committed else None

    def _leaf(self, name: str, x: Any) -> _Leaf:
        where = f"{self._what}{name}"
        if isinstance(x, jax.Array):
            if not x.is_fully_addressable:
                raise ValueError(
                    f"{where} lies on several processes, and nj.Island is one process: shard it over this one's "
                    "devices, or train by `python -m noloco_jax.island train`, whose islands may be several processes"
                )
            impl = jax.random.key_impl(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else None
            data = x if impl is None else jax.random.key_data(x)
            return _Leaf(name, _spec(data), sharding=data.sharding, committed=x.committed, key=impl)
        if isinstance(x, np.ndarray | np.generic):
            return _Leaf(name, self._host_spec(where, x), kind=None if isinstance(x, np.ndarray) else type(x))
        if isinstance(x, bool | int | float | complex):
            return _Leaf(name, self._host_spec(where, np.asarray(x)), kind=type(x))
        raise ValueError(f"{where} is {type(x).__name__}: give JAX or NumPy arrays, numbers or random keys")

    def _host_spec(self, where: str, x: Any) -> ArraySpec:
        """Return the spec of a NumPy array or a number; raise `ValueError` for one that would not come back alike."""
        if x.dtype.hasobject or not x.size:
            reason = "has no elements" if not x.size else "holds Python objects, or an integer of more than 64 bits"
            raise ValueError(f"{where} {reason}: keep it outside of params and rest")
        computed = jax.dtypes.canonicalize_dtype(x.dtype)
        if self._is_computed and computed != x.dtype:
            raise ValueError(
                f"{where} is {x.dtype}, and JAX computes it in {computed}: convert it, or set jax_enable_x64"
            )
        return _spec(x)

    def _array(self, leaf: _Leaf, x: Any) -> Any:
        if leaf.key is not None:
            x = jax.random.key_data(x)
        elif leaf.kind is not None:
            number = np.asarray(x)
            if number.shape or not np.can_cast(number.dtype, leaf.spec.dtype, "same_kind"):
                raise ValueError(
                    f"{self._what}{leaf.name} was of {leaf.kind.__name__} at first and is {x!r} now: begin with a "
                    "number of the kind that it will be, such as 0.0 for a mean"
                )
            x = number.astype(leaf.spec.dtype)
        if getattr(x, "shape", None) != leaf.spec.shape or x.dtype != leaf.spec.dtype:
            raise ValueError(f"{self._what}{leaf.name} was {leaf.spec}, and is another array now: keep shape and dtype")
        return jax.device_put(x, self._place(leaf)) if isinstance(x, jax.Array) else x

    def _given(self, leaf: _Leaf, x: Any) -> Any:
        if leaf.kind is not None:
            return leaf.kind(np.asarray(x).item())
        if leaf.sharding is None:
            return np.array(x)  # a copy that may be written to
        if leaf.committed:
            x = jax.device_put(x, leaf.sharding)
        elif self.mesh is not None or not isinstance(x, jax.Array):
            x = jnp.asarray(np.asarray(x))  # may meet arrays of any device, as before
        return x if leaf.key is None else jax.random.wrap_key_data(x, impl=leaf.key)


def _spec(x: Any) -> ArraySpec:
    return ArraySpec(tuple(x.shape), np.dtype(x.dtype))
