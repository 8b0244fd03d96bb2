"""Blocks of weights, and packing of integers of a few bits into bytes.

Blocks lie along the hidden dimension: weights along it belong to one token or one unit and move alike, whereas
neighbouring tokens may be a frequent and a rare one. Block boundaries depend only on the shape of a replica's
parameter (`wire_sizes.block_shape`), so that a message is the same on every mesh.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from noloco_jax.optim.exchange.axes import num_parts
from noloco_jax.optim.fragments import FLAT, Fragments
from noloco_jax.optim.wire_sizes import BLOCK, block_shape

PyTree = Any


def tree_in_blocks(tree: PyTree, dims: PyTree = None, largest: int = BLOCK) -> PyTree:
    """Reshape arrays to blocks (..., blocks, weights of a block), padding rows with zeros.

    Args:
      tree: arrays of any shapes.
      dims: the dimension of each array along which blocks lie, a tree like it; FLAT: the array is raveled. None: the
        last dimension.
      largest: maximum number of weights in a block.
    """

    def one(x: jax.Array, dim: int) -> jax.Array:
        x = jnp.ravel(x) if dim == FLAT else jnp.moveaxis(x, dim, -1)
        rows, count, size = block_shape(x.shape, largest)
        if num_parts() > 1 and (dim == FLAT or largest > BLOCK or rows > 1):
            # Such blocks may straddle shards, on which XLA can abort (jax 0.10.2), so the array is gathered first.
            x = jax.lax.with_sharding_constraint(x, PartitionSpec(*[None] * x.ndim))
        if rows > 1:
            x = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, -x.shape[-2] % rows), (0, 0)])
            x = x.reshape(*x.shape[:-2], x.shape[-2] // rows, rows * x.shape[-1])
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, count * size - x.shape[-1])])
        return x.reshape(*x.shape[:-1], count, size)

    return jax.tree.map(one, tree, _dims_or_last(tree, dims))


def tree_from_blocks(blocks: PyTree, like: PyTree, dims: PyTree = None, largest: int = BLOCK) -> PyTree:
    """Invert `tree_in_blocks`: return arrays of the shapes of `like`, in the dtype of their blocks."""

    def one(like: Any, dim: int, x: jax.Array) -> jax.Array:
        shape = _turned(like.shape, dim)
        rows = block_shape(shape, largest).rows
        x = x.reshape(*x.shape[:-2], math.prod(x.shape[-2:]))[..., : rows * shape[-1]]
        if rows > 1:
            x = x.reshape(*x.shape[:-2], rows * x.shape[-2], shape[-1])[..., : shape[-2], :]
        return x.reshape(like.shape) if dim == FLAT else jnp.moveaxis(x, -1, dim)

    return jax.tree.map(one, like, _dims_or_last(like, dims), blocks)


def _dims_or_last(tree: PyTree, dims: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.ndim - 1 if x.ndim else FLAT, tree) if dims is None else dims


def windows_of(fragments: Fragments, params: PyTree) -> PyTree:
    """Return the initial `OuterState.windows`: a uint8 zero for every block of every fragment of the parameters."""

    def windows(param: Any, part: jax.ShapeDtypeStruct, dim: int, hidden: int) -> jax.Array:
        counts = list(block_counts(part.shape, hidden))
        if fragments.count > 1:
            counts[0 if dim == FLAT else dim] *= fragments.count
        return jnp.zeros_like(param, jnp.uint8, counts)  # in `shard_map` it varies over the parameter's axes

    parts = jax.eval_shape(lambda tree: fragments.take(tree, jnp.int32(0)), params)
    return jax.tree.map(windows, params, parts, fragments.dims(params), fragments.block_dims(parts))


def block_counts(shape: tuple[int, ...], hidden: int) -> tuple[int, ...]:
    """Return the shape of an array with one value for every block of an array of the given shape.

    The dimension `hidden`, along which blocks lie, counts the blocks of a row; the last other dimension counts groups
    of rows.
    """
    turned = _turned(shape, hidden)
    rows, count, _ = block_shape(turned)
    counts = [*turned[:-1], count]
    if rows > 1:
        counts[-2] = -(-counts[-2] // rows)
    if hidden != FLAT:
        counts.insert(hidden, counts.pop())
    return tuple(counts)


def _turned(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    """Return the shape of an array whose dimension `dim` is moved to the end, or that is raveled."""
    return (math.prod(shape),) if dim == FLAT else (*shape[:dim], *shape[dim + 1 :], shape[dim])


def smallest_and_largest(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the smallest and the largest |x| along the last axis, float32 (..., 1); both are NaN for a row with a NaN.

    XLA's maximum and minimum of float32 pass over NaN on the CPU (jax 0.10.2 to 0.12, arrays of 4096 numbers or more).
    The bits of |x| are in the order of |x|, with NaN after infinity.
    """
    bits = jax.lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
    smallest, largest = jnp.min(bits, axis=-1, keepdims=True), jnp.max(bits, axis=-1, keepdims=True)
    smallest, largest = (jax.lax.bitcast_convert_type(extreme, jnp.float32) for extreme in (smallest, largest))
    return jnp.where(jnp.isnan(largest), largest, smallest), largest


def pack(numbers: jax.Array, bits: int) -> jax.Array:
    """Pack integers of `bits` bits each, uint32 (..., n), into uint8 (..., n · bits / 8).

    The array is split into equal contiguous runs, as many as the fewest numbers that fill whole bytes. Each word
    combines one number of every run, and each of its bytes goes to a run of the result.
    """
    count, size = _word(bits)
    runs = numbers.reshape(*numbers.shape[:-1], count, numbers.shape[-1] // count)
    word = functools.reduce(jnp.bitwise_or, [runs[..., i, :] << (bits * i) for i in range(count)])
    return jnp.concatenate([(word >> (8 * j)).astype(jnp.uint8) for j in range(size)], axis=-1)


def unpack(packed: jax.Array, bits: int) -> jax.Array:
    """Invert `pack`: return uint32 (..., n)."""
    count, size = _word(bits)
    runs = packed.reshape(*packed.shape[:-1], size, packed.shape[-1] // size).astype(jnp.uint32)
    word = functools.reduce(jnp.bitwise_or, [runs[..., j, :] << (8 * j) for j in range(size)])
    return jnp.concatenate([(word >> (bits * i)) & (2**bits - 1) for i in range(count)], axis=-1)


def _word(bits: int) -> tuple[int, int]:
    """Return the fewest numbers that fill whole bytes, and their bytes. They must fit into a word of 32 bits."""
    size = math.lcm(bits, 8)
    return size // bits, size // 8
