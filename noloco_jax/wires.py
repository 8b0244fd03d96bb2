"""The forms in which messages travel, by their sizes alone: no jax here, as the configuration reads this table."""

FLOAT_BYTES = {"float32": 4, "bfloat16": 2}
BLOCK_BITS = {"int8": 8, "int6": 6, "int4": 4}  # of a weight; every block of weights has a scale beside them
MODULO_BITS = {"modulo6": 6, "modulo4": 4, "modulo3": 3}  # likewise, with a byte for its window
MOMENTS_WIRE = {"modulo6": "int6", "modulo4": "int4", "modulo3": "int4"}  # see `moments_wire`
WIRES = (*FLOAT_BYTES, *BLOCK_BITS, *MODULO_BITS)

BLOCK = 64  # weights
SCALE_BYTES = 2
WINDOW_BYTES = 1


def block_of(wire: str) -> int:
    """Weights that are coded together: an array travels in whole blocks, its last one filled up."""
    return BLOCK if wire in BLOCK_BITS or wire in MODULO_BITS else 1


def moments_wire(wire: str) -> str:
    """The wire by which moments travel beside weights that travel by this one.

    Moments differ by as much as they are large, which is too much for windows that follow a small movement. A block's
    scale follows what is sent.
    """
    return MOMENTS_WIRE.get(wire, wire)


def block_bytes(wire: str) -> int:
    """Bytes of a block, with its scale or window."""
    if wire in MODULO_BITS:
        return WINDOW_BYTES + BLOCK * MODULO_BITS[wire] // 8
    return SCALE_BYTES + BLOCK * BLOCK_BITS[wire] // 8 if wire in BLOCK_BITS else FLOAT_BYTES[wire]


def goes_by_shares(wire: str, n: int) -> bool:
    """Whether a group of n > 2 equal sizes sends fewer bytes if every member averages a share and sends float32 means.

    Shares take code and mean of an n-th (n − 1) times, everything to everyone the code of all of it.
    """
    code = block_bytes(wire) / block_of(wire)
    return code + FLOAT_BYTES["float32"] <= n * code


CHUNK = 4096  # elements of which a sparse message keeps the largest
ENTRY_BITS = 2  # of an entry that is kept: its sign, and which of two sizes it has
SIZE_BYTES = 4  # of those two


def chunk_of(size: int) -> int:
    """Elements of a chunk of an array of this size: a smaller array is one chunk, in whole eights."""
    return min(CHUNK, max(8, -(-size // 8) * 8))


def kept_of(chunk: int, top_k: int) -> int:
    """Entries kept of a chunk of so many elements where `top_k` are of one of 4096; in fours, which fill bytes."""
    return max(4, -(-chunk * top_k // (4 * CHUNK)) * 4)


def position_bits(chunk: int) -> int:
    """Bits of a place in a chunk."""
    return 8 if chunk <= 256 else 12


def sparse_bytes(top_k: int, sizes: list[int]) -> int:
    """Bytes of a sparse message of arrays of these sizes."""
    total = 0
    for size in sizes:
        chunk = chunk_of(size)
        kept = kept_of(chunk, top_k)
        total += -(-size // chunk) * (SIZE_BYTES + kept * (position_bits(chunk) + ENTRY_BITS) // 8)
    return total
