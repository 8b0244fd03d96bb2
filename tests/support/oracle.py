"""The outer steps in numpy, float64, as printed: what tests hold the JAX code against. Replicas lead every array."""

from collections.abc import Iterable, Sequence

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
