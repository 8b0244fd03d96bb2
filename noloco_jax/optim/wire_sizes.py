"""Sizes of the wire formats of messages. Free of jax, since the configuration reads this table."""

from typing import NamedTuple

FLOAT_BYTES = {"float32": 4, "bfloat16": 2}
BLOCK_BITS = {"int8": 8, "int4": 4}  # bits a weight; every block also has a scale
MODULO_BITS = {"modulo4": 4}  # bits a weight; every block also has a window and a check byte
WIRES = (*FLOAT_BYTES, *BLOCK_BITS, *MODULO_BITS)

BLOCK = 64  # the most weights in a block
SCALE_BYTES = 2
WINDOW_BYTES = 1
CHECK_BYTES = 1  # checksum of a block in the modulo format: see `exchange.modulo`


class BlockShape(NamedTuple):
    """Division of an array (..., rows, length) into blocks; it depends on the shape alone, not on the mesh.

    Attributes:
      rows: number of neighbouring rows that are joined, if a row is shorter than half a block; else 1.
      count: blocks of a joined row.
      size: weights of a block, a multiple of 8, so that numbers of any bits fill whole bytes. The last block of a row
        is padded with zeros.
    """

    rows: int
    count: int
    size: int


def block_shape(shape: tuple[int, ...], largest: int = BLOCK) -> BlockShape:
    """Divide an array of that shape into blocks: nearly equal parts of its rows, of at most `largest` weights.

    Only arrays of 32 or more rows have 2, 4 or 8 rows joined: pipeline stages split the vocabulary at multiples of 8
    rows, but stacked layers, of which there are few, at any row.
    """
    length = shape[-1]
    rows = 1
    if len(shape) > 1 and shape[-2] >= 32:
        while rows < 8 and 2 * rows * length <= largest:
            rows *= 2
    count = max(1, -(-rows * length // largest))
    return BlockShape(rows, count, max(8, -(-rows * length // (8 * count)) * 8))


def block_bytes(wire: str) -> int:
    """Return the bytes of a full block, including its scale or its window and check byte."""
    if wire in MODULO_BITS:
        return WINDOW_BYTES + BLOCK * MODULO_BITS[wire] // 8 + CHECK_BYTES
    return SCALE_BYTES + BLOCK * BLOCK_BITS[wire] // 8 if wire in BLOCK_BITS else FLOAT_BYTES[wire]


def block_of(wire: str) -> int:
    """Return the most weights that are encoded together in a block; 1 for formats without blocks."""
    return BLOCK if wire in BLOCK_BITS or wire in MODULO_BITS else 1


CHUNK = 4096  # elements of a chunk, of which a sparse message keeps the largest
ENTRY_BITS = 2  # bits of a kept entry: its sign, and one of two magnitudes
SIZE_BYTES = 4  # bytes of a chunk's two magnitudes


def kept_of(chunk: int, top_k: int) -> int:
    """Return the entries kept of a chunk: `top_k` of 4096 in proportion, in multiples of 4, which fill whole bytes."""
    return max(4, -(-chunk * top_k // (4 * CHUNK)) * 4)


def position_bits(chunk: int) -> int:
    """Return the bits of a position in a chunk."""
    return 8 if chunk <= 256 else 12
