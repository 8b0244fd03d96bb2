"""Waiting times with log-normal messages or inner steps: all-reduces against pairs, waiting for all against a partner.

Shapes: R runs, N replicas, S inner steps drawn at once.
"""

import math
from typing import NamedTuple

import numpy as np

_DRAWS_AT_ONCE = 2**17  # stays in the cache
_DRAWS_OF_WAITING = 2**24


def log_sigma(variation: float) -> float:
    """Return σ of the log-normal law with standard deviation / mean = `variation`: σ² = ln(1 + variation²)."""
    return math.sqrt(math.log1p(variation**2))


def expected_max_of_two(mu: float, sigma: float) -> float:
    """Return E max(t₁, t₂) of two independent log-normal(μ, σ²) times: (1 + erf(σ/2)) exp(μ + σ²/2)."""
    return (1 + math.erf(sigma / 2)) * math.exp(mu + sigma**2 / 2)


def tree_over_pair(variation: float, num_levels: int, num_runs: int, seed: int) -> np.ndarray:
    """Return the expected time of a tree all-reduce over n = 2, 4, ..., 2^num_levels over that of a pair's exchange.

    At each level of the reduction two subtrees send their sums to be added, and the later arrival counts:
    T(2n) = max(T(n) + t, T'(n) + t') with T(1) = 0 and fresh log-normal t, t'. The broadcast is the same tree in
    reverse, so the all-reduce takes 2 E T(n); the pair, a tree of n = 2, takes 2 E max(t, t'). Their ratio is log₂ n if
    every level is counted as E max(t, t'), the paper's 2 t log₂ n; accumulated waiting makes it larger.

    Args:
      variation: standard deviation over mean of a message's time.
      num_levels: the largest tree has 2^num_levels replicas.
      num_runs: number of independent trees R to average over.
      seed: seed of the draws.

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


class RunTimes(NamedTuple):
    """Time from the start until the last replica ends, for each of R runs, in the units of a step."""

    diloco: np.ndarray
    noloco: np.ndarray


def run_times(
    num_replicas: int,
    sync_every: int,
    num_rounds: int,
    num_runs: int,
    mu: float,
    sigma: float,
    seed: int,
    group_size: int = 2,
) -> RunTimes:
    """Simulate `num_rounds` outer steps, each after `sync_every` log-normal(μ, σ²) inner steps on every replica.

    DiLoCo starts a round when the slowest of all replicas has ended the last one: time = Σ_rounds max_i S_i. A replica
    of NoLoCo waits for its random group only: t_i ← max_{j in g(i)} (t_j + S_j). Both use the same S. Messages take no
    time.
    """
    rng = np.random.default_rng(seed)
    diloco_R = np.zeros(num_runs)
    clock_RN = np.zeros((num_runs, num_replicas))
    for _ in range(num_rounds):
        block_RN = _block_times(rng, num_runs, num_replicas, sync_every, mu, sigma)
        diloco_R += block_RN.max(axis=1)
        # Replicas differ only in their clocks, so shuffling these and grouping neighbours is a random grouping.
        clock_RN = _wait_for_group(rng.permuted(clock_RN + block_RN, axis=1), group_size)
    return RunTimes(diloco_R, clock_RN.max(axis=1))


def idle_time_ratio(
    num_replicas: int, sync_every: int, num_rounds: int, num_runs: int, mu: float, sigma: float, seed: int
) -> float:
    """Return DiLoCo's run time over NoLoCo's, averaged over runs: the paper's figure on blocking (μ = 1, σ² = 0.5)."""
    times = run_times(num_replicas, sync_every, num_rounds, num_runs, mu, sigma, seed)
    return float(np.mean(times.diloco / times.noloco))


def waiting_per_step(
    num_replicas: int, sync_every: int, group_size: int, step_time: float, variation: float, seed: int
) -> tuple[float, float]:
    """Return the seconds that a step loses to waiting for stragglers: DiLoCo's and NoLoCo's.

    Args:
      num_replicas: N.
      sync_every: inner steps between outer steps; with 1, DiLoCo's figure holds for any all-reduce every step.
      group_size: group size of NoLoCo.
      step_time: mean time of a step, seconds.
      variation: standard deviation over mean of a step's time.
      seed: seed of the draws.
    """
    sigma = log_sigma(variation)
    steps_a_round = num_replicas * sync_every
    num_rounds = int(np.clip(_DRAWS_OF_WAITING // steps_a_round, 20, 100))
    num_runs = int(np.clip(_DRAWS_OF_WAITING // (steps_a_round * num_rounds), 1, 64))
    times = run_times(num_replicas, sync_every, num_rounds, num_runs, -(sigma**2) / 2, sigma, seed, group_size)
    diloco, noloco = (float(t.mean()) / (num_rounds * sync_every) - 1 for t in times)
    return max(diloco, 0.0) * step_time, max(noloco, 0.0) * step_time


def _block_times(
    rng: np.random.Generator, num_runs: int, num_replicas: int, num_steps: int, mu: float, sigma: float
) -> np.ndarray:
    """Return (R, N) sums of `num_steps` log-normal times, drawn in float32 for speed and in batches."""
    total_RN = np.zeros((num_runs, num_replicas))
    at_once = max(1, _DRAWS_AT_ONCE // (num_runs * num_replicas))
    for start in range(0, num_steps, at_once):
        shape = (min(at_once, num_steps - start), num_runs, num_replicas)
        draws_SRN = rng.standard_normal(shape, np.float32)
        draws_SRN *= np.float32(sigma)
        draws_SRN += np.float32(mu)
        total_RN += np.exp(draws_SRN, out=draws_SRN).sum(axis=0)
    return total_RN


def _wait_for_group(clock_RN: np.ndarray, group_size: int) -> np.ndarray:
    """Set every clock to the last arrival of its group of neighbours; the last group is the remainder."""
    starts = np.arange(0, clock_RN.shape[1], group_size)
    latest = np.maximum.reduceat(clock_RN, starts, axis=1)
    return np.repeat(latest, group_size, axis=1)[:, : clock_RN.shape[1]]
