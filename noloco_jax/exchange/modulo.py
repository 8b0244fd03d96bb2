"""Codes of a few bits whose window follows how far replicas are apart, not how large their weights are.

After Moniqua (arXiv 2002.11787): both of a pair round their values to a grid of step s and send the grid index modulo
2^bits. Of two numbers with the same rest a replica takes the one that is nearest to its own, which is right as long as
the two are less than half a window, s · 2^bits / 2, apart. So the step can be a fraction of the replicas' distance,
where a block code's is a fraction of the weights themselves, a hundred times as large late in a run.

The window has to be known to both. Every block of weights first sends one byte for the window that its sender would
choose, and the pair takes the larger. A block chooses by the larger of two things: how far it has moved since it last
met anyone, and what it remembers. After every exchange it remembers a window for the distance that it then had from
its partner, or one a sixth narrower than the last where that is wider, as others may still be as far away. So a row
that stops moving stays in a wide window until all have come together.

A value farther away than half a window comes back wrong by a multiple of the window: it wraps. A check byte beside each
block, of what the code leaves out of its indices, tells so: both of the pair then refuse the block, keep what they
have, and remember a window four times as wide. (Of several wraps in a block, one case in 128 passes for none, and moves
the two apart by half a window at most.)

Differences are integers times a common step, so that the corrections of a pair are exactly opposite, and one refuses
exactly what the other does.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from noloco_jax.draws import CHECK, uint32s
from noloco_jax.exchange.blocks import pack, unpack
from noloco_jax.wires import BLOCK, MODULO_BITS, NOT_REAL

# Half a window, in a block's largest movement and in the largest difference that it last had from a partner.
_REACH = 1.5
# Windows are 2^(e / 4), nearly: mantissas of few bits, so that small integers times a step are exact.
_MANTISSAS = np.array([1.0, 1.1875, 1.40625, 1.6875], np.float32)
_OFFSET = 120  # of e in a byte: steps from 2^-30 to 2^33
_NARROWER, _WIDER = -1, 8  # of e, after an exchange: by a sixth at most, and four times as wide after a refusal
_BROKEN = 255  # a block that holds what is no number
# Odd. By this seed neither those of a whole block nor of its first half sum to a multiple of 8, so that blocks that
# wrapped as a whole, or half of them, are found as well.
_FACTORS = (uint32s(40, CHECK, np.arange(BLOCK)) & 0xFF | 1).astype(np.int32)
_PRECISION = 2.0**-22  # of its block's largest value a step is at least: grid indices are exact in float32


@dataclass(frozen=True)
class Modulo:
    """Real numbers as grid indices modulo 2^bits, in blocks that share a step. Arrays are in blocks (..., blocks, B).

    Attributes:
      name: of `noloco_jax.wires`, which knows its sizes.
    """

    name: str

    def windows(self, blocks: jax.Array, moved: jax.Array, remembered: jax.Array) -> jax.Array:
        """uint8 (..., blocks, 1): for every block the exponent of the step that its sender would choose.

        Args:
          blocks: what is to be sent, real numbers.
          moved: (..., blocks, 1), how far a block's values have moved at the most since it last met anyone.
          remembered: uint8 (..., blocks, 1), what `correction` gave last; zeros in the beginning.

        Raises:
          TypeError: if the numbers are not real.
        """
        if not jnp.issubdtype(blocks.dtype, jnp.floating):
            raise TypeError(NOT_REAL.format(wire=self.name, dtype=blocks.dtype))
        blocks, moved = blocks.astype(jnp.float32), moved.astype(jnp.float32)
        largest = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
        step = jnp.maximum(2 * _REACH / 2**self._bits * moved, _PRECISION * largest)
        exponent = jnp.ceil(4 * jnp.log2(jnp.maximum(step, 1e-30))) + _OFFSET
        exponent = jnp.maximum(jnp.clip(exponent, 0, _BROKEN - 1), remembered.astype(jnp.float32))
        is_sound = jnp.all(jnp.isfinite(blocks), axis=-1, keepdims=True) & jnp.isfinite(moved)
        return jnp.where(is_sound, exponent, _BROKEN).astype(jnp.uint8)

    def encode(self, blocks: jax.Array, windows: jax.Array) -> jax.Array:
        """uint8 (..., blocks, bytes): the grid indices modulo 2^bits, packed to their bits, and a check byte."""
        grid = jnp.nan_to_num(jnp.round(blocks.astype(jnp.float32) / _steps(windows)))
        indices = jnp.clip(grid, -(2.0**30), 2.0**30).astype(jnp.int32)
        check = self._checksum(indices >> self._bits)
        return jnp.concatenate([pack(indices.astype(jnp.uint32) & (2**self._bits - 1), self._bits), check], axis=-1)

    def correction(self, own: jax.Array, other: jax.Array, windows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return what brings the own values to the pair's mean, or part of the way; the other's is exactly opposite.

        Args:
          own: what was sent.
          other: what was received.
          windows: of the pair.

        Returns:
          float32 (..., blocks, B), zero where a block is refused; and what the block is to remember, for `windows`.
        """
        half = 2 ** (self._bits - 1)
        mine, theirs = unpack(own[..., :-1], self._bits), unpack(other[..., :-1], self._bits)
        steps = ((theirs - mine + half) & (2 * half - 1)).astype(jnp.int32) - half
        # What the other's check byte is if these are the differences: its indices lie so many windows above one's own.
        expected = own[..., -1:] + self._checksum((mine.astype(jnp.int32) + steps) >> self._bits)
        farthest = jnp.max(jnp.abs(steps), axis=-1, keepdims=True)
        is_refused = (expected != other[..., -1:]) | (farthest == half)  # of half a window: as far up as down
        values = jnp.where(is_refused, 0, 0.5 * steps.astype(jnp.float32) * _steps(windows))
        change = jnp.where(is_refused, _WIDER, jnp.asarray(_changes(half))[farthest])
        remembered = jnp.clip(windows.astype(jnp.int32) + change, 0, _BROKEN - 1)
        is_broken = windows == _BROKEN
        return jnp.where(is_broken, jnp.nan, values), jnp.where(is_broken, 0, remembered).astype(jnp.uint8)

    @property
    def _bits(self) -> int:
        return MODULO_BITS[self.name]

    def _checksum(self, numbers: jax.Array) -> jax.Array:
        """uint8 (..., blocks, 1) of int32 (..., blocks, B). It is linear, so that both of a pair find the same errors;
        the factors are odd, so that it finds every single one."""
        factors = jnp.asarray(_FACTORS[: numbers.shape[-1]]).reshape(*[1] * (numbers.ndim - 1), -1)
        return jnp.sum(numbers * factors, axis=-1, keepdims=True, dtype=jnp.int32).astype(jnp.uint8)


def _changes(half: int) -> np.ndarray:
    """int32 (half + 1,): by how much e changes after a difference of so many steps at the most."""
    reach = _REACH * np.maximum(np.arange(half + 1), 1e-3) / half  # of half a window
    return np.maximum(np.ceil(4 * np.log2(reach)), _NARROWER).astype(np.int32)


def _steps(windows: jax.Array) -> jax.Array:
    """The steps, float32, by their bits: the same on every machine."""
    exponent = windows.astype(jnp.int32) - _OFFSET
    power = jax.lax.bitcast_convert_type((exponent // 4 + 127) << 23, jnp.float32)
    return power * jnp.asarray(_MANTISSAS)[exponent % 4]
