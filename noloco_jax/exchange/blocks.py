"""Cuts arrays into blocks of weights, and packs integers of a few bits into bytes."""

import functools
import math

import jax
import jax.numpy as jnp

from noloco_jax.exchange.axes import num_parts
from noloco_jax.wires import BLOCK

# Weights of a block are a multiple of this: four numbers of six bits are whole bytes, eight of any number of bits.
FOURS, EIGHTS = 4, 8


def in_blocks(x: jax.Array, size: int = BLOCK, multiple: int = FOURS) -> jax.Array:
    """The array as (..., blocks, weights of a block), filled up with zeros to whole blocks of `size` weights.

    Blocks lie along the last dimension, and go on into the next row. An array that the partitioner may shard is cut
    along a dimension whose parts hold whole blocks, of fewer weights if it has to be (a multiple of `multiple`), so
    that nothing is exchanged inside a replica; one that has no such dimension is cut as if it were whole.
    """
    cut = _cut(x.shape, size, multiple)
    if cut is None:
        flat = jnp.ravel(x)
        return jnp.pad(flat, (0, -x.size % size)).reshape(-1, size)
    block, dim = cut
    moved = jnp.moveaxis(x, dim, -1)
    return moved.reshape(*moved.shape[:-1], -1, block)


def from_blocks(blocks: jax.Array, shape: tuple[int, ...], size: int = BLOCK, multiple: int = FOURS) -> jax.Array:
    """The array of that shape that `in_blocks` cut, with the same `size` and `multiple`."""
    cut = _cut(shape, size, multiple)
    if cut is None:
        return jnp.ravel(blocks)[: math.prod(shape)].reshape(shape)
    return jnp.moveaxis(blocks.reshape(*blocks.shape[:-2], -1), -1, cut[1])


def _cut(shape: tuple[int, ...], largest: int, multiple: int) -> tuple[int, int] | None:
    """The weights of a block and the dimension along which they lie; None: along the flattened array."""
    parts = num_parts()
    if parts == 1:
        return None
    cuts = [
        (block, dim)
        for dim, size in enumerate(shape)
        for block in range(multiple, largest + 1, multiple)
        if size % (block * parts) == 0
    ]
    # Of blocks of at least half the largest size those along the last dimension, where weights belong together.
    return max(cuts, key=lambda cut: (min(cut[0], largest // 2), cut[1], cut[0]), default=None)


def hidden_last(x: jax.Array) -> jax.Array:
    """The array with its dimension of hidden states last, so that blocks lie along it: see `hidden_dimension`."""
    return jnp.moveaxis(x, hidden_dimension(x.shape), -1) if x.ndim > 1 else x


def hidden_back(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The array of that shape of which `hidden_last` made `x`."""
    return jnp.moveaxis(x, -1, hidden_dimension(shape)) if x.ndim > 1 else x


def hidden_dimension(shape: tuple[int, ...]) -> int:
    """The smaller one of the last two dimensions: hidden states, where the other one is tokens or a wider layer.

    Weights along it belong to one token and move alike, where neighbours among the tokens may be of a frequent and a
    rare one. Of a vocabulary that is smaller than (a fragment of) the hidden states it is the tokens.
    """
    return len(shape) - (2 if len(shape) > 1 and shape[-2] < shape[-1] else 1)


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
    """The fewest numbers that fill whole bytes, and these bytes; at most four of them, as a word has 32 bits."""
    size = math.lcm(bits, 8)
    return size // bits, size // 8
