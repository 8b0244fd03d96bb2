"""Wire formats of messages: float32 as it is, or quantized to fewer bits."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from noloco_jax.optim.exchange.blocks import pack, smallest_and_largest, tree_from_blocks, tree_in_blocks, unpack
from noloco_jax.optim.exchange.modulo import Modulo
from noloco_jax.optim.wire_sizes import BLOCK_BITS, MODULO_BITS, SCALE_BYTES

PyTree = Any


@dataclass(frozen=True)
class Wire:
    """Wire format of arrays that are sent to another replica: here float32, unchanged.

    Attributes:
      name: name in `noloco_jax.optim.wire_sizes`, which defines its sizes.
      exact: True if `decode` restores every value exactly.
      takes_blocks: True if arrays must be in blocks (..., blocks, B), as from `blocks.tree_in_blocks`.
    """

    name: str
    exact: ClassVar[bool] = True
    takes_blocks: ClassVar[bool] = False

    def encode(self, x: jax.Array) -> jax.Array:
        """Return the payload of a float32 array."""
        return x

    def decode(self, code: jax.Array) -> jax.Array:
        """Return Q(x), the decoded float32 array of a payload."""
        return code


class BFloat16(Wire):
    """Real numbers rounded to bfloat16, two bytes each."""

    exact = False

    def encode(self, x: jax.Array) -> jax.Array:
        # Sent as integers: a backend that cannot send bfloat16, like the CPU, would widen it to float32.
        return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)

    def decode(self, code: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(code, jnp.bfloat16).astype(jnp.float32)


class Blocks(Wire):
    """Block quantization: integers k of a few bits times a scale shared by a block, Q(x) = k · scale.

    scale = largest |x| of the block / (2^(bits−1) − 1), rounded to bfloat16, which has float32's range in half its
    bytes. That rounding moves x / scale by less than half, so that the largest value keeps its k. The product k · scale
    of two 8-bit mantissas is exact in float32, so that sender and receiver hold the same Q(x) however a compiler fuses
    the operations.

    A block with a NaN or an infinity is decoded as non-finite values; other blocks are not affected. A block below
    float32's normal range is decoded as zeros on the CPU, where XLA flushes subnormal numbers.
    """

    exact = False
    takes_blocks = True

    def encode(self, x: jax.Array) -> jax.Array:
        """Return the payload, uint8 (..., blocks, bytes): the scale and then the packed numbers of every block."""
        _, largest = smallest_and_largest(x)
        scale = jax.lax.reduce_precision(largest / self._limit, exponent_bits=8, mantissa_bits=7)
        rounded = jnp.round(x / jnp.where(scale == 0, 1, scale))
        numbers = (jnp.clip(rounded, -self._limit, self._limit) + self._limit).astype(jnp.uint32)
        scale_bits = jax.lax.bitcast_convert_type(scale, jnp.uint32) >> 16
        return jnp.concatenate([pack(scale_bits, 8 * SCALE_BYTES), pack(numbers, self._bits)], axis=-1)

    def decode(self, code: jax.Array) -> jax.Array:
        scale_bits = unpack(code[..., :SCALE_BYTES], 8 * SCALE_BYTES)
        scale = jax.lax.bitcast_convert_type(scale_bits << 16, jnp.float32)
        numbers = unpack(code[..., SCALE_BYTES:], self._bits).astype(jnp.float32) - self._limit
        return numbers * scale

    @property
    def _bits(self) -> int:
        return BLOCK_BITS[self.name]

    @property
    def _limit(self) -> int:
        """Return the largest |k|."""
        return 2 ** (self._bits - 1) - 1


def encode(wire: Wire, tree: PyTree, dims: PyTree) -> PyTree:
    """Return the payloads of a tree of float32 arrays; `dims`: the dimension of each along which blocks lie."""
    return jax.tree.map(wire.encode, to_code(wire, tree, dims))


def decode(wire: Wire, code: PyTree, like: PyTree, dims: PyTree) -> PyTree:
    """Return Q(x) of the payloads, float32 arrays of the shapes of `like`."""
    return from_code(wire, jax.tree.map(wire.decode, code), like, dims)


def to_code(wire: Wire, tree: PyTree, dims: PyTree = None) -> PyTree:
    """Convert arrays to the form that `wire.encode` takes: in blocks along the dimensions `dims`, or unchanged."""
    return tree_in_blocks(tree, dims) if wire.takes_blocks else tree


def from_code(wire: Wire, decoded: PyTree, like: PyTree, dims: PyTree = None) -> PyTree:
    """Invert `to_code`: return arrays of the shapes of `like`."""
    return tree_from_blocks(decoded, like, dims) if wire.takes_blocks else decoded


WIRES: dict[str, Wire | Modulo] = {
    wire.name: wire
    for wire in (Wire("float32"), BFloat16("bfloat16"), *map(Blocks, BLOCK_BITS), *map(Modulo, MODULO_BITS))
}


def wire_of(name: str) -> Wire | Modulo:
    """Return the wire format of that name.

    Raises:
      ValueError: if there is none.
    """
    if name not in WIRES:
        raise ValueError(f"wire is {name!r}: choose from {', '.join(map(repr, WIRES))}")
    return WIRES[name]
