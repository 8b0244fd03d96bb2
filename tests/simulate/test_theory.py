"""The theorem on the quadratic loss, and the exact interval of the consensus strength.

Oracles: the Kronecker square of the whole outer step, averaged over every perfect matching of the replicas, and
simulation of SGD and outer steps one by one.

Shapes: R runs, N replicas, D directions, W inner learning rates, T outer steps.
"""

import numpy as np
import pytest

from noloco_jax.outer.pairing import consensus_limit
from noloco_jax.simulate.theory import (
    Outer,
    Quadratic,
    log_log_slope,
    mean_trajectory,
    moment_operator,
    removed_share,
    simulate,
    spectral_radius,
    stable_consensus_limit,
    stationary_variances,
)

OUTER = Outer(momentum=0.5, lr=0.7, consensus=0.9)


def loss(inner_lr: float) -> Quadratic:
    return Quadratic(curvatures=(0.5, 1.0, 2.0), noise=1.5, inner_lr=inner_lr, inner_steps=6)


def matchings(members: tuple[int, ...]) -> list[list[tuple[int, ...]]]:
    """Return every way to pair these replicas, one of them alone if their number is odd."""
    if len(members) <= 1:
        return [[members]] if members else [[]]
    if len(members) % 2:
        return [[(m,), *rest] for i, m in enumerate(members) for rest in matchings(members[:i] + members[i + 1 :])]
    first, rest = members[0], members[1:]
    return [[(first, m), *others] for i, m in enumerate(rest) for others in matchings(rest[:i] + rest[i + 1 :])]


def whole_operator(alpha: float, gamma: float, pull: float, num_replicas: int) -> np.ndarray:
    """Return E[M ⊗ M] of the outer step on (deviation of φ, δ), from Eq. 2 and 3, over all matchings."""
    n = num_replicas
    centre = np.eye(n) - 1 / n
    total = np.zeros((4 * n * n, 4 * n * n))
    rounds = matchings(tuple(range(n)))
    for groups in rounds:
        w = np.zeros((n, n))
        for group in groups:
            w[np.ix_(group, group)] = 1 / len(group)
        momentum_row = np.hstack([gamma * (w - np.eye(n)) - pull * w, alpha * np.eye(n)])
        step = np.vstack([np.hstack([np.eye(n), np.zeros((n, n))]) + momentum_row, momentum_row])
        step = np.kron(np.eye(2), centre) @ step
        total += np.kron(step, step)
    return total / len(rounds)


@pytest.mark.parametrize("num_replicas", [2, 3, 4, 5])
@pytest.mark.parametrize(
    ("alpha", "gamma", "pull"), [(0.5, 0.7, 0.0), (0.9, 0.5, 0.0), (0.0, 1.9, 0.0), (0.3, 1.1, 0.2)]
)
def test_three_moments_have_the_spectral_radius_of_the_whole_operator(num_replicas, alpha, gamma, pull):
    whole = spectral_radius(whole_operator(alpha, gamma, pull, num_replicas))
    ours = spectral_radius(moment_operator(alpha, gamma, removed_share(num_replicas), pull))
    np.testing.assert_allclose(ours, whole, rtol=1e-9)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("num_replicas", [2, 4, 16, 1024])
def test_the_stable_interval_for_pairs_is_the_closed_form(num_replicas, alpha):
    high = stable_consensus_limit(alpha, num_replicas)
    np.testing.assert_allclose(high, 2 * (1 - alpha**2) / (1 - alpha / (num_replicas - 1)), rtol=1e-9)


@pytest.mark.parametrize(("num_replicas", "group_size"), [(2, 2), (5, 2), (16, 2), (8, 4), (7, 3), (6, 6)])
def test_the_optimizers_consensus_limit_is_the_end_of_the_stable_interval(num_replicas, group_size):
    for alpha in (0.0, 0.5, 0.9):
        high = stable_consensus_limit(alpha, num_replicas, group_size)
        np.testing.assert_allclose(consensus_limit(alpha, num_replicas, group_size), high, rtol=1e-9)


def test_replicas_converge_exactly_inside_the_stable_interval():
    removed = removed_share(16)
    for alpha in np.linspace(0, 0.98, 15):
        limit = stable_consensus_limit(alpha, 16)
        inside = moment_operator(alpha, np.linspace(1e-3, 1 - 1e-3, 50) * limit, removed)
        outside = moment_operator(alpha, np.linspace(1 + 1e-3, 4, 50) * limit, removed)
        assert spectral_radius(inside).max() < 1 < spectral_radius(outside).min()
        assert spectral_radius(moment_operator(alpha, -0.01, removed)) > 1


def test_the_mean_of_phi_follows_its_exact_trajectory_to_the_optimum():
    start_D = np.array([1.0, -2.0, 0.5])
    trace = simulate(loss(0.03), OUTER, 32, 60, 40, start_D, seed=1)
    exact_TD = mean_trajectory(loss(0.03), OUTER, start_D, 60)[1:]
    assert np.abs(exact_TD[-1]).max() < 0.02
    mean_TD = trace.mean_TRD.mean(axis=1)
    error_TD = trace.mean_TRD.std(axis=1, ddof=1) / np.sqrt(40)
    # 180 deviations in units of their standard error; a t of 39 degrees of freedom exceeds 5 once in 80 000.
    assert np.abs((mean_TD - exact_TD) / error_TD).max() < 5


def test_the_variance_over_replicas_scales_as_the_square_of_the_inner_learning_rate():
    inner_lrs = np.geomspace(1e-5, 1e-3, 4)
    spread_WR = np.stack(
        [
            simulate(loss(w), OUTER, 32, 90, 16, np.zeros(3), seed=[2, i]).spread_TR[40:].mean(0)
            for i, w in enumerate(inner_lrs)
        ]
    )
    slope, error = log_log_slope(inner_lrs, spread_WR)
    assert error < 0.01
    # The slope is 2 for ω → 0; the exact variances of these four ω have 1.99.
    assert abs(slope - 2) < 4 * error + 0.015


def test_exact_variances_match_the_simulation():
    trace = simulate(loss(0.02), OUTER, 16, 250, 40, np.zeros(3), seed=3)
    spread, mean = stationary_variances(loss(0.02), OUTER, 16)
    for exact, sample_R in (
        (spread, trace.spread_TR[50:].mean(axis=0)),
        (mean, (trace.mean_TRD[50:] ** 2).sum(axis=-1).mean(axis=0)),
    ):
        error = sample_R.std(ddof=1) / np.sqrt(40)
        assert error < 0.05 * exact
        assert abs(sample_R.mean() - exact) < 4 * error


def test_exact_variances_have_slope_two_over_replicas_and_one_for_their_mean():
    small, smaller = (stationary_variances(loss(w), OUTER, 32) for w in (1e-5, 1e-6))
    np.testing.assert_allclose(np.log10(np.divide(small, smaller)), [2, 1], atol=1e-3)


def test_the_variance_of_the_mean_is_inverse_to_the_number_of_replicas():
    few, many = (stationary_variances(loss(1e-3), OUTER, n)[1] for n in (10, 1000))
    np.testing.assert_allclose(few / many, 100, rtol=1e-9)


def test_the_exact_variance_of_groups_with_a_remainder_matches_the_simulation():
    outer = Outer(momentum=0.3, lr=0.7, consensus=0.8, group_size=3)
    trace = simulate(loss(0.01), outer, 8, 160, 40, np.zeros(3), seed=4)
    sample_R = trace.spread_TR[40:].mean(axis=0)
    exact = stationary_variances(loss(0.01), outer, 8)[0]
    assert abs(sample_R.mean() - exact) < 4 * sample_R.std(ddof=1) / np.sqrt(40)
