"""Cuts arrays into blocks of weights, and packs integers of a few bits into bytes.

Blocks lie along the dimension of hidden states: weights along it belong to one token or one unit and move alike, where
neighbours among the tokens may be of a frequent and a rare one. Where they begin and end follows from the shape of a
replica's parameter alone (`wires.cut_of`), so that a message is the same on every mesh.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from noloco_jax.exchange.axes import num_parts
from noloco_jax.outer.fragments import FLAT, Fragments
from noloco_jax.wires import BLOCK, cut_of

PyTree = Any


def cuts_or_last(tree: PyTree, cuts: PyTree = None) -> PyTree:
    """`cuts`, or if it is None the last dimension of every array."""
    return jax.tree.map(lambda x: x.ndim - 1 if x.ndim else FLAT, tree) if cuts is None else cuts


def tree_in_blocks(tree: PyTree, cuts: PyTree = None, largest: int = BLOCK) -> PyTree:
    """The arrays as blocks (..., blocks, weights of a block).

    Args:
      tree: arrays of any shapes.
      cuts: the dimension of each along which blocks lie, a tree like it; FLAT: along all of it as a vector. None: the
        last dimension.
      largest: weights of a block, at most.
    """

    def one(x: jax.Array, cut: int) -> jax.Array:
        turned = _hidden_last(x, cut)
        if num_parts() > 1 and (cut == FLAT or largest > BLOCK or cut_of(turned.shape, largest).rows > 1):
            # Such blocks may lie across shards: gathered, as XLA aborts on some of them otherwise (jax 0.10.2).
            turned = jax.lax.with_sharding_constraint(turned, PartitionSpec(*[None] * turned.ndim))
        return in_blocks(turned, largest)

    return jax.tree.map(one, tree, cuts_or_last(tree, cuts))


def tree_from_blocks(blocks: PyTree, like: PyTree, cuts: PyTree = None, largest: int = BLOCK) -> PyTree:
    """The arrays of the shapes of `like` that `tree_in_blocks` cut, in the dtype of their blocks."""

    def one(x: Any, cut: int, blocks: jax.Array) -> jax.Array:
        turned = from_blocks(blocks, _turned(x.shape, cut), largest)
        return turned.reshape(x.shape) if cut == FLAT else jnp.moveaxis(turned, -1, cut)

    return jax.tree.map(one, like, cuts_or_last(like, cuts), blocks)


def in_blocks(x: jax.Array, largest: int = BLOCK) -> jax.Array:
    """An array (..., length) as (..., blocks, weights of a block), its rows filled up with zeros."""
    rows, count, size = cut_of(x.shape, largest)
    if rows > 1:
        x = _filled(x, -2, rows)
        x = x.reshape(*x.shape[:-2], x.shape[-2] // rows, rows * x.shape[-1])
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, count * size - x.shape[-1])])
    return x.reshape(*x.shape[:-1], count, size)


def from_blocks(blocks: jax.Array, shape: tuple[int, ...], largest: int = BLOCK) -> jax.Array:
    """The array of that shape that `in_blocks` cut."""
    rows = cut_of(shape, largest).rows
    joined = blocks.reshape(*blocks.shape[:-2], math.prod(blocks.shape[-2:]))[..., : rows * shape[-1]]
    if rows > 1:
        joined = joined.reshape(*joined.shape[:-2], rows * joined.shape[-2], shape[-1])[..., : shape[-2], :]
    return joined


def windows_of(fragments: Fragments, params: PyTree, cuts: PyTree) -> PyTree:
    """Zeros, uint8, one for every block of every fragment of one replica's parameters: `OuterState.windows`.

    Args:
      fragments: how parameters are cut.
      params: arrays of one replica, or what stands for the tree of them.
      cuts: of `fragments`.
    """

    def windows(part: jax.ShapeDtypeStruct, cut: int, hidden: int) -> jax.Array:
        counts = list(block_counts(part.shape, hidden))
        if fragments.count > 1:
            counts[0 if cut == FLAT else cut] *= fragments.count
        return jnp.zeros(counts, jnp.uint8)

    parts = jax.eval_shape(lambda tree: fragments.part(tree, cuts, jnp.int32(0)), params)
    return jax.tree.map(windows, parts, cuts, fragments.hidden(parts))


def block_counts(shape: tuple[int, ...], hidden: int) -> tuple[int, ...]:
    """The shape of an array that has one value for every block of an array of that shape.

    The dimension `hidden`, along which blocks lie, counts those of a row, and the last other one groups of rows.
    """
    turned = _turned(shape, hidden)
    rows, count, _ = cut_of(turned)
    counts = [*turned[:-1], count]
    if rows > 1:
        counts[-2] = -(-counts[-2] // rows)
    if hidden != FLAT:
        counts.insert(hidden, counts.pop())
    return tuple(counts)


def _hidden_last(x: jax.Array, cut: int) -> jax.Array:
    return jnp.ravel(x) if cut == FLAT else jnp.moveaxis(x, cut, -1)


def _turned(shape: tuple[int, ...], cut: int) -> tuple[int, ...]:
    """The shape that `_hidden_last` gives an array of that shape."""
    return (math.prod(shape),) if cut == FLAT else (*shape[:cut], *shape[cut + 1 :], shape[cut])


def _filled(x: jax.Array, dim: int, multiple: int) -> jax.Array:
    """The array with a dimension filled up with zeros to a multiple."""
    padding = [(0, 0)] * x.ndim
    padding[dim] = (0, -x.shape[dim] % multiple)
    return jnp.pad(x, padding)


def pack(numbers: jax.Array, bits: int) -> jax.Array:
    """Integers of `bits` bits each, uint32 (..., n), as uint8 (..., n · bits / 8).

    A word holds as few numbers as fill whole bytes, from as many runs of the array; its bytes go to runs likewise.
    """
    count, size = _word(bits)
    runs = numbers.reshape(*numbers.shape[:-1], count, -1)
    word = functools.reduce(jnp.bitwise_or, [runs[..., i, :] << (bits * i) for i in range(count)])
    return jnp.concatenate([(word >> (8 * j)).astype(jnp.uint8) for j in range(size)], axis=-1)


def unpack(packed: jax.Array, bits: int) -> jax.Array:
    """The uint32 (..., n) that `pack` packed."""
    count, size = _word(bits)
    runs = packed.reshape(*packed.shape[:-1], size, -1).astype(jnp.uint32)
    word = functools.reduce(jnp.bitwise_or, [runs[..., j, :] << (8 * j) for j in range(size)])
    return jnp.concatenate([(word >> (bits * i)) & (2**bits - 1) for i in range(count)], axis=-1)


def _word(bits: int) -> tuple[int, int]:
    """The fewest numbers that fill whole bytes, and these bytes; at most eight numbers, as a word has 32 bits."""
    size = math.lcm(bits, 8)
    return size // bits, size // 8
