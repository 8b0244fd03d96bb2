"""Modulo quantization: a few bits a weight, whose window follows the distance between replicas, not the weights' size.

After Moniqua (arXiv 2002.11787): both members of a pair round their values to a grid of step s and send the grid index
modulo 2^bits. The receiver decodes it as the nearest number to its own value that has this remainder, which is correct
as long as the two values are less than half a window, s · 2^bits / 2, apart. The step is therefore a fraction of the
replicas' distance, whereas the step of block quantization is a fraction of the weights, a hundred times as large late
in a run.

Both members must use the same window. Every block of weights first sends one byte, the window that its sender proposes,
and the pair uses the larger. The proposal is the larger of two windows: one for the block's movement since its last
exchange, and the remembered one. After every exchange a block remembers a window for its distance from that partner,
but at most a sixth narrower than the last window, since other replicas may still be as far away. A row that stops
moving therefore keeps a wide window until all replicas have converged.

A value farther away than half a window is decoded wrongly by a multiple of the window: it wraps. A check byte for each
block, computed from the bits that the message omits, detects this: both members then refuse the block, keep their
values, and remember a window four times as wide. The check is the sum of the omitted numbers times random factors,
modulo a prime; factors and prime change with every outer step, so that no difference passes for long: a block with
several wraps goes undetected once in 233 outer steps, and then moves the two apart by half a window at most.

Differences are integers times a common step, so that the corrections of a pair are exactly opposite, and both members
refuse the same blocks.

The functions on trees are the three steps of an exchange, for collectives and for islands alike: `propose`, `encode_in`
and `correct_in`. Arrays are one replica's; windows lie as in `OuterState`.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from noloco_jax.optim.exchange.blocks import pack, smallest_and_largest, tree_from_blocks, tree_in_blocks, unpack
from noloco_jax.optim.prng import CHECK, uint32s
from noloco_jax.optim.wire_sizes import MODULO_BITS

PyTree = Any
# Half a window, as a multiple of a block's largest movement, and of its largest difference from its last partner. Other
# multiples had higher perplexities (MEASURED): smaller ones refuse more blocks, larger ones are coarser.
_REACH_OF_MOVEMENT, _REACH = 2.2, 1.5
# Windows are about 2^(e / 4), with mantissas of few bits, so that small integers times a step are exact.
_MANTISSAS = np.array([1.0, 1.1875, 1.40625, 1.6875], np.float32)
_OFFSET = 120  # offset of e in its byte: steps from 2^-30 to 2^33
# Change of e after an exchange: narrower by a sixth at most, and four times as wide after a refusal.
_NARROWER, _WIDER = -1, 8
BROKEN = 255  # marks a block that holds NaN or infinity
# Moduli of the check byte. A difference of a multiple of all four windows is larger than any message's range.
_PRIMES = np.array([251, 241, 239, 233], np.int32)
_PRECISION = 2.0**-22  # smallest step relative to the block's largest value, so that indices are exact in float32


@dataclass(frozen=True)
class Modulo:
    """Wire format of grid indices modulo 2^bits, in blocks (..., blocks, B) that share a step.

    Attributes:
      name: name in `noloco_jax.optim.wire_sizes`, which defines its sizes.
      exact: False.
    """

    name: str
    exact = False

    def windows(self, blocks: jax.Array, moved: jax.Array, remembered: jax.Array) -> jax.Array:
        """Return the exponent of the step that the sender of each block proposes, uint8 (..., blocks, 1).

        Args:
          blocks: values to send, float32.
          moved: (..., blocks, 1), the largest movement of a block's values since its last exchange.
          remembered: uint8 (..., blocks, 1), the last result of `correction`; zeros initially.
        """
        _, largest = smallest_and_largest(blocks)
        step = jnp.maximum(2 * _REACH_OF_MOVEMENT / 2**self._bits * moved, _PRECISION * largest)
        exponent = jnp.ceil(4 * jnp.log2(jnp.maximum(step, 1e-30))) + _OFFSET
        exponent = jnp.maximum(jnp.clip(exponent, 0, BROKEN - 1), remembered.astype(jnp.float32))
        is_sound = jnp.isfinite(largest) & jnp.isfinite(moved)
        return jnp.where(is_sound, exponent, BROKEN).astype(jnp.uint8)

    def encode(self, blocks: jax.Array, windows: jax.Array, number: Any) -> jax.Array:
        """Return the payload, uint8 (..., blocks, bytes): packed grid indices modulo 2^bits and a check byte.

        Args:
          blocks: values to send, float32.
          windows: the pair's windows.
          number: outer step, the same on both sides.
        """
        grid = jnp.nan_to_num(jnp.round(blocks / _steps(windows)))
        indices = jnp.clip(grid, -(2.0**30), 2.0**30).astype(jnp.int32)
        check = _checksum(indices >> self._bits, number).astype(jnp.uint8)
        return jnp.concatenate([pack(indices.astype(jnp.uint32) & (2**self._bits - 1), self._bits), check], axis=-1)

    def correction(
        self, own: jax.Array, other: jax.Array, windows: jax.Array, number: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Compute the correction from the own values to the pair's mean; the partner's is exactly opposite.

        Args:
          own: the payload sent.
          other: the payload received.
          windows: the pair's windows.
          number: outer step.

        Returns:
          The correction, float32 (..., blocks, B), zero for refused blocks; and the windows to remember.
        """
        half = 2 ** (self._bits - 1)
        mine, theirs = unpack(own[..., :-1], self._bits), unpack(other[..., :-1], self._bits)
        steps = ((theirs - mine + half) & (2 * half - 1)).astype(jnp.int32) - half
        # The partner's check byte if these differences are right: its omitted bits follow from the own indices.
        carried = _checksum((mine.astype(jnp.int32) + steps) >> self._bits, number)
        expected = (own[..., -1:].astype(jnp.int32) + carried) % _prime(number)
        farthest = jnp.max(jnp.abs(steps), axis=-1, keepdims=True)
        is_refused = (expected != other[..., -1:]) | (farthest == half)  # half a window is ambiguous in sign
        values = jnp.where(is_refused, 0, 0.5 * steps.astype(jnp.float32) * _steps(windows))
        change = jnp.where(is_refused, _WIDER, jnp.asarray(_changes(half))[farthest])
        remembered = jnp.clip(windows.astype(jnp.int32) + change, 0, BROKEN - 1)
        is_broken = windows == BROKEN
        return jnp.where(is_broken, jnp.nan, values), jnp.where(is_broken, 0, remembered).astype(jnp.uint8)

    @property
    def _bits(self) -> int:
        return MODULO_BITS[self.name]


def propose(wire: Modulo, message: PyTree, movement: PyTree, remembered: PyTree, dims: PyTree) -> PyTree:
    """Return the windows that a replica proposes; a pair uses the elementwise larger ones.

    Args:
      wire: the wire format.
      message: values to send.
      movement: a tree like it, the movement of each value since its last exchange.
      remembered: windows that the last exchange left, zeros initially.
      dims: the dimension of every array along which blocks lie.
    """
    moved = jax.tree.map(lambda x: smallest_and_largest(x)[1], tree_in_blocks(movement, dims))
    return by_array(jax.tree.map(wire.windows, tree_in_blocks(message, dims), moved, by_block(remembered, dims)), dims)


def encode_in(wire: Modulo, message: PyTree, windows: PyTree, number: Any, dims: PyTree) -> PyTree:
    """Return the payload of a message in the pair's windows, in outer step `number`."""
    blocks = tree_in_blocks(message, dims)
    return jax.tree.map(lambda x, w: wire.encode(x, w, number), blocks, by_block(windows, dims))


def correct_in(
    wire: Modulo, own: PyTree, other: PyTree, windows: PyTree, number: Any, like: PyTree, dims: PyTree
) -> tuple[PyTree, PyTree]:
    """Return half the difference to the partner's message, and the windows to remember.

    Args:
      wire: the wire format.
      own, other: the payloads sent and received.
      windows: of the pair.
      number: outer step.
      like: arrays, or shapes, of the message.
      dims: the dimension of every array along which blocks lie.
    """
    pairs = jax.tree.map(lambda x, y, w: wire.correction(x, y, w, number), own, other, by_block(windows, dims))
    halves, remembered = (jax.tree.map(lambda _, pair, i=i: pair[i], own, pairs) for i in range(2))
    return tree_from_blocks(halves, like, dims), by_array(remembered, dims)


def by_block(windows: PyTree, dims: PyTree) -> PyTree:
    return jax.tree.map(lambda x, dim: jnp.moveaxis(x, dim, -1)[..., None], windows, dims)


def by_array(windows: PyTree, dims: PyTree) -> PyTree:
    return jax.tree.map(lambda x, dim: jnp.moveaxis(x[..., 0], -1, dim), windows, dims)


def _prime(number: Any) -> jax.Array:
    return jnp.asarray(_PRIMES)[number % len(_PRIMES)]


def _checksum(numbers: jax.Array, number: Any) -> jax.Array:
    """Return the checksum of int32 (..., blocks, B) in outer step `number`, int32 (..., blocks, 1) below its prime.

    It is linear modulo the prime, so that both members of a pair detect the same errors. No factor is 0, so that every
    single error is detected.
    """
    prime = _prime(number)
    factors = (
        uint32s(0, CHECK, jnp.asarray(number), np.arange(numbers.shape[-1])) % (prime - 1).astype(jnp.uint32)
    ) + 1
    # Any number of the same remainder will do, which a rounded quotient gives faster than an exact division.
    quotients = jnp.floor(numbers.astype(jnp.float32) * (1 / prime.astype(jnp.float32))).astype(jnp.int32)
    factors = factors.astype(jnp.int32).reshape(*[1] * (numbers.ndim - 1), -1)
    terms = (numbers - quotients * prime) * factors
    return jnp.sum(terms, axis=-1, keepdims=True, dtype=jnp.int32) % prime


def _changes(half: int) -> np.ndarray:
    """Return the change of e by the largest difference in steps, int32 (half + 1,)."""
    reach = _REACH * np.maximum(np.arange(half + 1), 1e-3) / half  # in half windows
    return np.maximum(np.ceil(4 * np.log2(reach)), _NARROWER).astype(np.int32)


def _steps(windows: jax.Array) -> jax.Array:
    """Build the steps, float32, from their bits, so that they are equal on every machine."""
    exponent = windows.astype(jnp.int32) - _OFFSET
    power = jax.lax.bitcast_convert_type((exponent // 4 + 127) << 23, jnp.float32)
    return power * jnp.asarray(_MANTISSAS)[exponent % 4]
