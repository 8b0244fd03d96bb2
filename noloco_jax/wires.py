"""The forms in which messages travel, by their sizes alone: no jax here, as the configuration reads this table."""

FLOAT_BYTES = {"float32": 4, "bfloat16": 2}
BLOCK_BITS = {"int8": 8, "int6": 6, "int4": 4}  # of a weight; every block of weights has a scale beside them
MODULO_BITS = {"modulo6": 6, "modulo4": 4, "modulo3": 3}  # likewise, with a byte for its window
WIRES = (*FLOAT_BYTES, *BLOCK_BITS, *MODULO_BITS)

BLOCK = 64  # weights
SCALE_BYTES = 2
WINDOW_BYTES = 1


def block_of(wire: str) -> int:
    """Weights that are coded together: an array travels in whole blocks, its last one filled up."""
    return BLOCK if wire in BLOCK_BITS or wire in MODULO_BITS else 1


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
