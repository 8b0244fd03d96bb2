"""Value of an array after a wire, by numpy and float64: the table of the tests over all wires."""

from collections.abc import Callable

import numpy as np


def _bfloat16(x: np.ndarray) -> np.ndarray:
    """float32 rounded to nearest, ties to even."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return (bits + 0x7FFF + ((bits >> 16) & 1) & 0xFFFF0000).view(np.float32)


def grid_steps(x: np.ndarray, bits: int) -> np.ndarray:
    """The distance of neighbouring values that can be sent, for every weight.

    The blocks of a row are equal, of at most 64 weights, in whole eights. (Rows of less than half as many are put
    together where there are 32 or more, which none of the tests' arrays has.)
    """
    rows = x.reshape(-1, x.shape[-1] if x.ndim else 1)
    count = -(-rows.shape[1] // 64)
    size = -(-rows.shape[1] // (8 * count)) * 8
    blocks = np.pad(rows, ((0, 0), (0, count * size - rows.shape[1]))).reshape(-1, size)
    scale = _bfloat16(np.abs(blocks).max(axis=1) / np.float32(2 ** (bits - 1) - 1))
    steps = np.repeat(scale.astype(np.float64), size).reshape(len(rows), -1)
    return steps[:, : rows.shape[1]].reshape(x.shape)


def _in_blocks(bits: int) -> Callable[[np.ndarray], np.ndarray]:
    def rounded(x: np.ndarray) -> np.ndarray:
        step = grid_steps(x, bits)
        return np.where(step == 0, 0, np.round(x / np.where(step == 0, 1, step)) * step)

    return rounded


# Name -> Q(x) of one replica's array.
ROUNDED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "bfloat16": _bfloat16,
    "int8": _in_blocks(8),
    "int4": _in_blocks(4),
}
BITS = {"int8": 8, "int4": 4}  # of those in blocks
