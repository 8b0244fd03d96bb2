"""How long an all-reduce over a tree takes, against an exchange within a pair, when message times are log-normal.

Shapes: R runs, N replicas. Times are in units of the mean message time.
"""

import math

import numpy as np


def log_sigma(variation: float) -> float:
    """σ of the log-normal law whose standard deviation is `variation` times its mean: σ² = ln(1 + variation²)."""
    return math.sqrt(math.log1p(variation**2))


def expected_max_of_two(mu: float, sigma: float) -> float:
    """E max(t₁, t₂) of two independent log-normal(μ, σ²) times: (1 + erf(σ/2)) exp(μ + σ²/2)."""
    return (1 + math.erf(sigma / 2)) * math.exp(mu + sigma**2 / 2)


def tree_over_pair(variation: float, num_levels: int, num_runs: int, seed: int) -> np.ndarray:
    """Expected time of a tree all-reduce over n = 2, 4, ..., 2^num_levels replicas over that of a pair's exchange.

    Reduction: at each level two subtrees send their sums to be joined, and the later arrival decides,
    T(2n) = max(T(n) + t, T'(n) + t') with T(1) = 0 and fresh log-normal t, t'. The broadcast back is the same tree run
    the other way, so the all-reduce takes 2 E T(n); the pair, a tree of n = 2, takes 2 E max(t, t'). Their ratio is
    log₂ n if every level is counted as E max(t, t'), the paper's 2 t log₂ n; the waits that pile up make it larger.

    Args:
      variation: standard deviation over mean of a message's time.
      num_levels: the largest tree has 2^num_levels replicas.
      num_runs: independent trees R that the expectation is taken over.
      seed: of the draws.

    Returns:
      (num_levels,) the ratio for each n.
    """
    rng = np.random.default_rng(seed)
    sigma = log_sigma(variation)
    mu = -(sigma**2) / 2
    totals = np.zeros(num_levels)
    at_once = min(num_runs, max(1, 2**20 >> num_levels))  # keeps the working set in the cache
    for start in range(0, num_runs, at_once):
        runs = min(at_once, num_runs - start)
        finish_RN = np.zeros((runs, 2**num_levels))
        for level in range(num_levels):
            message_RN = np.exp(mu + sigma * rng.standard_normal(finish_RN.shape))
            arrival_RN = finish_RN + message_RN
            finish_RN = np.maximum(arrival_RN[:, ::2], arrival_RN[:, 1::2])
            totals[level] += finish_RN.mean(axis=1).sum()
    return totals / num_runs / expected_max_of_two(mu, sigma)
