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
values, and remember a window four times as wide. (With several wraps in a block, one case in 128 goes undetected and
moves the two apart by half a window at most.)

Differences are integers times a common step, so that the corrections of a pair are exactly opposite, and both members
refuse the same blocks.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from noloco_jax.draws import CHECK, uint32s
from noloco_jax.exchange.blocks import pack, unpack
from noloco_jax.wires import BLOCK, MODULO_BITS, NOT_REAL

# Half a window, as a multiple of a block's largest movement and of its largest difference from its last partner.
_REACH = 1.5
# Windows are about 2^(e / 4), with mantissas of few bits, so that small integers times a step are exact.
_MANTISSAS = np.array([1.0, 1.1875, 1.40625, 1.6875], np.float32)
_OFFSET = 120  # offset of e in its byte: steps from 2^-30 to 2^33
# Change of e after an exchange: narrower by a sixth at most, and four times as wide after a refusal.
_NARROWER, _WIDER = -1, 8
BROKEN = 255  # marks a block that holds NaN or infinity
# Odd factors. With this seed neither the factors of a whole block nor those of its first half sum to a multiple of 8,
# so that a block of which all or half wrapped is detected too.
_FACTORS = (uint32s(40, CHECK, np.arange(BLOCK)) & 0xFF | 1).astype(np.int32)
_PRECISION = 2.0**-22  # smallest step relative to the block's largest value, so that indices are exact in float32


@dataclass(frozen=True)
class Modulo:
    """Wire format of grid indices modulo 2^bits, in blocks (..., blocks, B) that share a step.

    Attributes:
      name: name in `noloco_jax.wires`, which defines its sizes.
    """

    name: str

    def windows(self, blocks: jax.Array, moved: jax.Array, remembered: jax.Array) -> jax.Array:
        """Return the exponent of the step that the sender of each block proposes, uint8 (..., blocks, 1).

        Args:
          blocks: values to send, real numbers.
          moved: (..., blocks, 1), the largest movement of a block's values since its last exchange.
          remembered: uint8 (..., blocks, 1), the last result of `correction`; zeros initially.

        Raises:
          TypeError: if the numbers are not real.
        """
        if not jnp.issubdtype(blocks.dtype, jnp.floating):
            raise TypeError(NOT_REAL.format(wire=self.name, dtype=blocks.dtype))
        blocks, moved = blocks.astype(jnp.float32), moved.astype(jnp.float32)
        largest = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
        step = jnp.maximum(2 * _REACH / 2**self._bits * moved, _PRECISION * largest)
        exponent = jnp.ceil(4 * jnp.log2(jnp.maximum(step, 1e-30))) + _OFFSET
        exponent = jnp.maximum(jnp.clip(exponent, 0, BROKEN - 1), remembered.astype(jnp.float32))
        is_sound = jnp.all(jnp.isfinite(blocks), axis=-1, keepdims=True) & jnp.isfinite(moved)
        return jnp.where(is_sound, exponent, BROKEN).astype(jnp.uint8)

    def encode(self, blocks: jax.Array, windows: jax.Array) -> jax.Array:
        """Return the payload, uint8 (..., blocks, bytes): packed grid indices modulo 2^bits and a check byte."""
        grid = jnp.nan_to_num(jnp.round(blocks.astype(jnp.float32) / _steps(windows)))
        indices = jnp.clip(grid, -(2.0**30), 2.0**30).astype(jnp.int32)
        check = self._checksum(indices >> self._bits)
        return jnp.concatenate([pack(indices.astype(jnp.uint32) & (2**self._bits - 1), self._bits), check], axis=-1)

    def correction(self, own: jax.Array, other: jax.Array, windows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Compute the correction from the own values to the pair's mean; the partner's is exactly opposite.

        Args:
          own: the payload sent.
          other: the payload received.
          windows: the pair's windows.

        Returns:
          The correction, float32 (..., blocks, B), zero for refused blocks; and the windows to remember.
        """
        half = 2 ** (self._bits - 1)
        mine, theirs = unpack(own[..., :-1], self._bits), unpack(other[..., :-1], self._bits)
        steps = ((theirs - mine + half) & (2 * half - 1)).astype(jnp.int32) - half
        # The partner's check byte if these differences are right: its omitted bits follow from the own indices.
        expected = own[..., -1:] + self._checksum((mine.astype(jnp.int32) + steps) >> self._bits)
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

    def _checksum(self, numbers: jax.Array) -> jax.Array:
        """Return the checksum of int32 (..., blocks, B), uint8 (..., blocks, 1).

        It is linear, so that both members of a pair detect the same errors; its factors are odd, so that it detects
        every single error.
        """
        factors = jnp.asarray(_FACTORS[: numbers.shape[-1]]).reshape(*[1] * (numbers.ndim - 1), -1)
        return jnp.sum(numbers * factors, axis=-1, keepdims=True, dtype=jnp.int32).astype(jnp.uint8)


def _changes(half: int) -> np.ndarray:
    """Return the change of e by the largest difference in steps, int32 (half + 1,)."""
    reach = _REACH * np.maximum(np.arange(half + 1), 1e-3) / half  # in half windows
    return np.maximum(np.ceil(4 * np.log2(reach)), _NARROWER).astype(np.int32)


def _steps(windows: jax.Array) -> jax.Array:
    """Build the steps, float32, from their bits, so that they are equal on every machine."""
    exponent = windows.astype(jnp.int32) - _OFFSET
    power = jax.lax.bitcast_convert_type((exponent // 4 + 127) << 23, jnp.float32)
    return power * jnp.asarray(_MANTISSAS)[exponent % 4]
