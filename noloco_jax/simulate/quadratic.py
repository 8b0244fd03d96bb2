"""NoLoCo run as it is on the paper's quadratic problem: SGD steps one by one, outer steps in random groups.

Shapes: R independent runs, N replicas, D directions, T outer steps.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from noloco_jax.simulate.theory import Outer, Quadratic


class Trace(NamedTuple):
    """What a simulation leaves.

    Attributes:
      mean_TRD: mean of φ over replicas after each outer step.
      spread_TR: Σ_i |φ_i − mean|² / (N − 1) after each outer step.
    """

    mean_TRD: np.ndarray
    spread_TR: np.ndarray


def simulate(
    loss: Quadratic,
    outer: Outer,
    num_replicas: int,
    num_rounds: int,
    num_runs: int,
    start_D: np.ndarray,
    seed: int | Sequence[int],
) -> Trace:
    """Runs NoLoCo from φ = `start_D` on every replica, δ = 0, with a fresh random grouping every outer step."""
    rng = np.random.default_rng(seed)
    curvature_D = np.array(loss.curvatures)
    phi_RND = np.broadcast_to(start_D, (num_runs, num_replicas, len(curvature_D))).copy()
    delta_RND = np.zeros_like(phi_RND)
    runs_R1 = np.arange(num_runs)[:, None]
    means, spreads = [], []
    for _ in range(num_rounds):
        theta_RND = phi_RND.copy()
        for _ in range(loss.inner_steps):
            target_RND = loss.noise * rng.standard_normal(theta_RND.shape)
            theta_RND -= loss.inner_lr * curvature_D * (theta_RND - target_RND)
        order_RN = rng.permuted(np.tile(np.arange(num_replicas), (num_runs, 1)), axis=1)
        gradient_RND = _group_mean(theta_RND - phi_RND, order_RN, runs_R1, outer.group_size)
        slow_RND = _group_mean(phi_RND, order_RN, runs_R1, outer.group_size)
        delta_RND = outer.momentum * delta_RND + outer.lr * gradient_RND + outer.consensus * (slow_RND - phi_RND)
        phi_RND = phi_RND + delta_RND
        means.append(phi_RND.mean(axis=1))
        spreads.append(phi_RND.var(axis=1, ddof=1).sum(axis=-1))
    return Trace(np.stack(means), np.stack(spreads))


def log_log_slope(x: np.ndarray, y_XR: np.ndarray) -> tuple[float, float]:
    """Slope of log y over log x by least squares in each of R independent runs: their mean and its standard error."""
    centred = np.log(x) - np.log(x).mean()
    slopes_R = centred @ np.log(y_XR) / (centred @ centred)
    return float(slopes_R.mean()), float(slopes_R.std(ddof=1) / math.sqrt(len(slopes_R)))


def _group_mean(x_RND: np.ndarray, order_RN: np.ndarray, runs_R1: np.ndarray, group_size: int) -> np.ndarray:
    """Every replica's mean over its group, the groups being neighbours in `order_RN` and the last the remainder."""
    num_replicas = order_RN.shape[1]
    starts = np.arange(0, num_replicas, group_size)
    sizes = np.minimum(group_size, num_replicas - starts)
    mean_RGD = np.add.reduceat(x_RND[runs_R1, order_RN], starts, axis=1) / sizes[:, None]
    out_RND = np.empty_like(x_RND)
    out_RND[runs_R1, order_RN] = np.repeat(mean_RGD, sizes, axis=1)
    return out_RND
