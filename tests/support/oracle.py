"""Outer steps and wire formats in numpy, float64, as printed: what tests hold the JAX code against. Replicas lead."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np


def group_mean(x: np.ndarray, groups: Iterable[Sequence[int]]) -> np.ndarray:
    """Every replica's row of the result is the mean over its group."""
    result = np.full(x.shape, np.nan)
    for group in groups:
        result[list(group)] = np.mean(x[list(group)], axis=0)
    return result


def noloco_step(
    theta: np.ndarray,
    phi: np.ndarray,
    delta: np.ndarray,
    *,
    groups: Iterable[Sequence[int]],
    alpha: float,
    beta: float,
    gamma: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Eqs. 1 to 3 of arXiv 2506.10911 (+β, as in Eq. 32): the new slow weights, which are the new θ, and momentum."""
    theta, phi, delta = (np.asarray(x, np.float64) for x in (theta, phi, delta))
    groups = list(groups)
    outer_gradient = theta - phi
    delta = alpha * delta + beta * group_mean(outer_gradient, groups) + gamma * (group_mean(phi, groups) - phi)
    return phi + delta, delta


def diloco_step(
    theta: np.ndarray, phi: np.ndarray, delta: np.ndarray, *, alpha: float, beta: float, nesterov: bool
) -> tuple[np.ndarray, np.ndarray]:
    """A momentum step along the mean outer gradient, heavy ball or Nesterov: the new slow weights and momentum."""
    theta, phi, delta = (np.asarray(x, np.float64) for x in (theta, phi, delta))
    outer_gradient = (theta - phi).mean(axis=0)
    delta = alpha * delta + beta * outer_gradient
    return phi + (alpha * delta + beta * outer_gradient if nesterov else delta), delta


def replica_spread(tensors: Iterable[np.ndarray]) -> float:
    """sqrt(Σ_i |mean(θ) − θ_i|² / (numel · N)) over all tensors of the model."""
    squares, count = 0.0, 0
    for x in tensors:
        squares += np.sum((np.asarray(x, np.float64) - np.mean(x, axis=0, dtype=np.float64)) ** 2)
        count += x.size
    return float(np.sqrt(squares / count))


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
