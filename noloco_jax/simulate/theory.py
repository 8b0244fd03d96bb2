"""Second moments of NoLoCo's outer step on the paper's quadratic loss: exact, and simulated step by step.

They determine whether replicas stay together, and their stationary distance from each other and from the optimum.

W, the average over a round's random groups, is an orthogonal projection independent of the past, and replicas are
exchangeable: on the deviations from the mean over replicas E[W] = (1 − p) I, with p the share of their mean square that
one round of averaging removes. The second moments of slow weights φ and momentum δ therefore obey a linear 3×3
recursion in (E|φ|², E⟨φ,δ⟩, E|δ|²), for the deviations and, with p = 0, for the mean over replicas.

Shapes: R independent runs, N replicas, D directions of the loss, T outer steps; a leading ... is any shape that the
arguments broadcast to.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class Outer:
    """NoLoCo's outer step: momentum α, learning rate β, consensus strength γ, group size n."""

    momentum: float
    lr: float
    consensus: float
    group_size: int = 2


@dataclass(frozen=True)
class Quadratic:
    """The paper's stochastic quadratic loss ½ (θ − c)ᵀ A (θ − c) in the eigenbasis of A.

    Every SGD step of every replica draws a fresh c ~ N(0, s² I); the optimum is 0.

    Attributes:
      curvatures: eigenvalues of A, one a direction.
      noise: s.
      inner_lr: ω of SGD.
      inner_steps: m between outer steps.
    """

    curvatures: tuple[float, ...]
    noise: float
    inner_lr: float
    inner_steps: int

    @property
    def pull_D(self) -> np.ndarray:
        """Return the share of φ that m inner steps remove, 1 − (1 − ωa)^m: E Δ = −pull φ."""
        return 1 - (1 - self.inner_lr * np.array(self.curvatures)) ** self.inner_steps

    @property
    def gradient_variance_D(self) -> np.ndarray:
        """Return the variance of Δ given φ: the sum over inner steps of (ωas)² (1 − ωa)^2k."""
        step_D = self.inner_lr * np.array(self.curvatures)
        keep_D = (1 - step_D) ** 2
        return (step_D * self.noise) ** 2 * (1 - keep_D**self.inner_steps) / (1 - keep_D)


def removed_share(num_replicas: int, group_size: int = 2) -> float:
    """Return p = (N − G)/(N − 1) with G groups, the last the remainder: the trace of W is G, one of it on the mean."""
    num_groups = -(-num_replicas // group_size)
    return (num_replicas - num_groups) / (num_replicas - 1)


def moment_operator(
    momentum: np.ndarray | float, consensus: np.ndarray | float, removed: float, pull: np.ndarray | float = 0.0
) -> np.ndarray:
    """Return the 3×3 map of (E|φ|², E⟨φ,δ⟩, E|δ|²) over one outer step, without noise.

    δ' = αδ − (pull W + γ (I − W)) φ and φ' = φ + δ', so with k = pull (1 − p) + γp and l = pull² (1 − p) + γ² p
    (W and I − W are projections orthogonal to each other)

        E|δ'|²   = α² E|δ|² − 2αk E⟨φ,δ⟩ + l E|φ|²
        E⟨φ,δ'⟩  = α E⟨φ,δ⟩ − k E|φ|²
        E⟨φ',δ'⟩ = E⟨φ,δ'⟩ + E|δ'|²
        E|φ'|²   = E|φ|² + 2 E⟨φ,δ'⟩ + E|δ'|²

    Args:
      momentum: α.
      consensus: γ.
      removed: p; 0 gives the map of the mean over replicas.
      pull: β (1 − (1 − ωa)^m), the outer gradient's pull to the optimum; 0 is pure consensus.

    Returns:
      (..., 3, 3).
    """
    alpha, gamma, pull = np.broadcast_arrays(momentum, consensus, pull)
    k = pull * (1 - removed) + gamma * removed
    m = pull**2 * (1 - removed) + gamma**2 * removed
    zero = np.zeros_like(alpha, dtype=float)
    momentum_row = np.stack([m, -2 * alpha * k, alpha**2], axis=-1)
    cross_row = np.stack([-k, alpha, zero], axis=-1)  # row of ⟨φ, δ'⟩, before φ is updated
    unit = np.array([1.0, 0.0, 0.0])
    return np.stack([unit + 2 * cross_row + momentum_row, cross_row + momentum_row, momentum_row], axis=-2)


def spectral_radius(operator: np.ndarray) -> np.ndarray:
    """Return the largest modulus of an eigenvalue of (..., k, k) matrices: below one, every second moment dies out."""
    return np.abs(np.linalg.eigvals(operator)).max(axis=-1)


def stable_consensus_limit(momentum: float, num_replicas: int, group_size: int = 2) -> float:
    """Return the γ below which replicas without gradients come together in mean square, from the spectral radius.

    Bisection, with no use of the closed form 0 < γ < 2(1 − α²)/(1 + α − 2αp) of `noloco_jax.outer.pairing`.
    """
    removed = removed_share(num_replicas, group_size)
    # The upper bound is 2 (1 + α) < 4, the limit of a group of all replicas, which is a deterministic heavy ball.
    stable, unstable = 0.0, 4.0
    while unstable - stable > 1e-12:
        middle = (stable + unstable) / 2
        if spectral_radius(moment_operator(momentum, middle, removed)) < 1:
            stable = middle
        else:
            unstable = middle
    return stable


def stationary_variances(loss: Quadratic, outer: Outer, num_replicas: int) -> tuple[float, float]:
    """Return the variances at which NoLoCo settles on the quadratic loss, summed over its directions.

    Returns:
      The variance of φ over replicas, E Σ_i |φ_i − mean φ|² / (N − 1), and the variance of mean φ about the optimum.
      Replica i's own variance about the optimum is the second plus (N − 1)/N times the first.
    """
    removed = removed_share(num_replicas, outer.group_size)
    pull_D, variance_D = outer.lr * loss.pull_D, outer.lr**2 * loss.gradient_variance_D
    spread = _stationary(moment_operator(outer.momentum, outer.consensus, removed, pull_D), (1 - removed) * variance_D)
    mean = _stationary(moment_operator(outer.momentum, outer.consensus, 0.0, pull_D), variance_D / num_replicas)
    return float(spread.sum()), float(mean.sum())


def mean_trajectory(loss: Quadratic, outer: Outer, start_D: np.ndarray, num_rounds: int) -> np.ndarray:
    """Return E φ (num_rounds + 1, D) from `start_D` at rest: a heavy ball, δ ← αδ − β pull φ, the same for any γ."""
    phi_D, delta_D = np.array(start_D, float), np.zeros(len(start_D))
    out = [phi_D]
    for _ in range(num_rounds):
        delta_D = outer.momentum * delta_D - outer.lr * loss.pull_D * phi_D
        phi_D = phi_D + delta_D
        out.append(phi_D)
    return np.stack(out)


def _stationary(operator_D33: np.ndarray, noise_D: np.ndarray) -> np.ndarray:
    """Return E|φ|² of the fixed point when every step adds noise of this variance to δ, and so to φ."""
    source_D3 = np.repeat(noise_D[:, None], 3, axis=1)
    return np.linalg.solve(np.eye(3) - operator_D33, source_D3[..., None])[:, 0, 0]


class Trace(NamedTuple):
    """Moments over the replicas, recorded by a simulation.

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
    """Run NoLoCo from φ = `start_D` and δ = 0, with SGD steps one by one and fresh random groups every outer step."""
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
    """Return the mean over R independent runs of the slope of log y over log x, and its standard error."""
    centred = np.log(x) - np.log(x).mean()
    slopes_R = centred @ np.log(y_XR) / (centred @ centred)
    return float(slopes_R.mean()), float(slopes_R.std(ddof=1) / math.sqrt(len(slopes_R)))


def _group_mean(x_RND: np.ndarray, order_RN: np.ndarray, runs_R1: np.ndarray, group_size: int) -> np.ndarray:
    """Return every replica's mean over its group: neighbours in `order_RN`, the last group the remainder."""
    num_replicas = order_RN.shape[1]
    starts = np.arange(0, num_replicas, group_size)
    sizes = np.minimum(group_size, num_replicas - starts)
    mean_RGD = np.add.reduceat(x_RND[runs_R1, order_RN], starts, axis=1) / sizes[:, None]
    out_RND = np.empty_like(x_RND)
    out_RND[runs_R1, order_RN] = np.repeat(mean_RGD, sizes, axis=1)
    return out_RND
