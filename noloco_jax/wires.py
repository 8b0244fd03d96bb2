"""The forms in which messages travel, by their sizes alone: no jax here, as the configuration reads this table."""

from typing import NamedTuple

FLOAT_BYTES = {"float32": 4, "bfloat16": 2}
BLOCK_BITS = {"int8": 8, "int6": 6, "int4": 4}  # of a weight; every block of weights has a scale beside them
MODULO_BITS = {"modulo4": 4}  # likewise, with a byte for its window
WIRES = (*FLOAT_BYTES, *BLOCK_BITS, *MODULO_BITS)

BLOCK = 64  # weights of a block, at most
SCALE_BYTES = 2
WINDOW_BYTES = 1
CHECK_BYTES = 1  # beside the numbers of a block in a modulo code: see `exchange.modulo`
NOT_REAL = "wire={wire!r} rounds real numbers and the parameters hold {dtype}: use wire='float32'"


class Cut(NamedTuple):
    """The blocks of an array (..., rows, length). Only its shape counts, never the mesh that it lies on.

    Attributes:
      rows: so many neighbouring rows are put together, where one is shorter than half a block.
      count: blocks of such a row.
      size: weights of a block; a multiple of 8, so that numbers of any bits fill whole bytes. The last block of a row
        is filled up with zeros.
    """

    rows: int
    count: int
    size: int


def cut_of(shape: tuple[int, ...], largest: int = BLOCK) -> Cut:
    """The blocks of an array of that shape: nearly equal parts of its rows, of at most `largest` weights.

    Rows are put together by 2, 4 or 8, and only where there are 32 or more, as pipeline stages divide the vocabulary
    by multiples of 8 rows and stacked layers, of which there are few, by one.
    """
    length = shape[-1]
    rows = 1
    if len(shape) > 1 and shape[-2] >= 32:
        while rows < 8 and 2 * rows * length <= largest:
            rows *= 2
    count = max(1, -(-rows * length // largest))
    return Cut(rows, count, max(8, -(-rows * length // (8 * count)) * 8))


def moments_wire(wire: str) -> str:
    """The wire by which moments travel beside weights that travel by this one.

    Moments differ by as much as they are large, which is too much for windows that follow a small movement. A block's
    scale follows what is sent.
    """
    return "int4" if wire in MODULO_BITS else wire


def block_bytes(wire: str) -> int:
    """Bytes of a full block, with its scale, or its window and check."""
    if wire in MODULO_BITS:
        return WINDOW_BYTES + BLOCK * MODULO_BITS[wire] // 8 + CHECK_BYTES
    return SCALE_BYTES + BLOCK * BLOCK_BITS[wire] // 8 if wire in BLOCK_BITS else FLOAT_BYTES[wire]


def block_of(wire: str) -> int:
    """Weights that are coded together, at most."""
    return BLOCK if wire in BLOCK_BITS or wire in MODULO_BITS else 1


def goes_by_shares(wire: str, n: int) -> bool:
    """Whether a group of n > 2 equal sizes sends fewer bytes if every member averages a share and sends float32 means.

    Shares take code and mean of an n-th (n − 1) times, everything to everyone the code of all of it.
    """
    code = block_bytes(wire) / block_of(wire)
    return code + FLOAT_BYTES["float32"] <= n * code


CHUNK = 4096  # elements of which a sparse message keeps the largest
ENTRY_BITS = 2  # of an entry that is kept: its sign, and which of two sizes it has
SIZE_BYTES = 4  # of those two


def kept_of(chunk: int, top_k: int) -> int:
    """Entries kept of a chunk of so many elements where `top_k` are of one of 4096; in fours, which fill bytes."""
    return max(4, -(-chunk * top_k // (4 * CHUNK)) * 4)


def position_bits(chunk: int) -> int:
    """Bits of a place in a chunk."""
    return 8 if chunk <= 256 else 12
