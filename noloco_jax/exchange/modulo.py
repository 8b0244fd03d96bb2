"""Codes of a few bits whose window follows how far replicas move, not how large their weights are.

After Moniqua (arXiv 2002.11787): both of a pair round their values to a grid of step s and send the grid index modulo
2^bits. Of two numbers with the same rest a replica takes the one that is nearest to its own, which is right as long as
the two are less than half a window, s · 2^bits / 2, apart. So the step can be a fraction of the replicas' distance,
where a block code's is a fraction of the weights themselves, a hundred times as large late in a run.

The window has to be known to both. Every block of weights first sends one byte for the window that its sender would
choose, by its own movement since it last met anyone, and the pair takes the larger. Differences are integers times a
common step, so that the corrections of a pair are exactly opposite whatever is rounded or wrapped.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from noloco_jax.exchange.blocks import EIGHTS, from_blocks, in_blocks, pack, unpack
from noloco_jax.wires import MODULO_BITS

# Half a window, in root mean squares of a block's movement and in its largest movement: whichever is more. Replicas of
# a run lie 1.3 root mean squares apart, one weight in a thousand 5 and the farthest 9; where few weights of a block
# move and most do not, the farthest lie beyond any multiple of the root mean square. What wraps stays wrapped.
_REACH = 9.0
_REACH_OF_LARGEST = 3.25
# Windows are 2^(e / 4), nearly: mantissas of few bits, so that small integers times a step are exact.
_MANTISSAS = np.array([1.0, 1.1875, 1.40625, 1.6875], np.float32)
_OFFSET = 200  # of e in a byte: steps from 2^-50 to 2^13
_BROKEN = 255  # a block that holds what is no number
_PRECISION = 2.0**-22  # of its block's largest value a step is at least: grid indices are exact in float32


@dataclass(frozen=True)
class Modulo:
    """Real numbers as grid indices modulo 2^bits, in blocks that share a step.

    Attributes:
      name: of `noloco_jax.wires`, which knows its sizes.
    """

    name: str

    def windows(self, x: jax.Array, movement: jax.Array) -> jax.Array:
        """uint8 (..., blocks, 1): for every block of x the exponent of the step that its sender would choose.

        Args:
          x: what is to be sent.
          movement: of the same shape, how far each value has moved; its mean square over a block and its largest count.
        """
        blocks, movement = _in_blocks(x), _in_blocks(movement)
        typical = jnp.sqrt(jnp.mean(jnp.square(movement), axis=-1, keepdims=True))
        farthest = jnp.max(jnp.abs(movement), axis=-1, keepdims=True)
        half_window = jnp.maximum(_REACH * typical, _REACH_OF_LARGEST * farthest)
        largest = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
        step = jnp.maximum(2 * half_window / 2**self._bits, _PRECISION * largest)
        exponent = jnp.ceil(4 * jnp.log2(jnp.maximum(step, 1e-30))) + _OFFSET
        is_sound = jnp.all(jnp.isfinite(blocks + movement), axis=-1, keepdims=True) & (exponent < _BROKEN)
        return jnp.where(is_sound, jnp.clip(exponent, 0, _BROKEN - 1), _BROKEN).astype(jnp.uint8)

    def encode(self, x: jax.Array, windows: jax.Array) -> jax.Array:
        """uint8 (..., blocks, bytes): the grid indices modulo 2^bits, packed to their bits."""
        indices = jnp.round(_in_blocks(x) / _steps(windows))
        return pack(jnp.nan_to_num(indices).astype(jnp.int32).astype(jnp.uint32) & (2**self._bits - 1), self._bits)

    def correction(self, own: jax.Array, other: jax.Array, windows: jax.Array, like: jax.Array) -> jax.Array:
        """What brings the own value to the pair's mean, or part of the way; the other's is exactly opposite.

        Args:
          own: what was sent.
          other: what was received.
          windows: of the pair.
          like: of the shape and dtype of the result.
        """
        half = 2 ** (self._bits - 1)
        difference = (unpack(other, self._bits) - unpack(own, self._bits) + half) & (2 * half - 1)
        steps = difference.astype(jnp.int32) - half
        steps = jnp.where(steps == -half, 0, steps)  # as far up as down
        values = jnp.where(windows == _BROKEN, jnp.nan, steps * _steps(windows))
        return (self._gain * from_blocks(values, like.shape, multiple=EIGHTS)).astype(like.dtype)

    @property
    def _bits(self) -> int:
        return MODULO_BITS[self.name]

    @property
    def _gain(self) -> float:
        """Share of the difference that is made up for: with three bits a whole half would follow the rounding."""
        return 0.5 if self._bits > 3 else 0.375


def _in_blocks(x: jax.Array) -> jax.Array:
    return in_blocks(x.astype(jnp.float32), multiple=EIGHTS)


def _steps(windows: jax.Array) -> jax.Array:
    """The steps, float32, by their bits: the same on every machine."""
    exponent = windows.astype(jnp.int32) - _OFFSET
    power = jax.lax.bitcast_convert_type((exponent // 4 + 127) << 23, jnp.float32)
    return power * jnp.asarray(_MANTISSAS)[exponent % 4]
