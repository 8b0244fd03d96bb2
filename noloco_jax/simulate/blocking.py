"""What waiting for others costs a whole run when inner steps take log-normal times; messages themselves are free.

Shapes: R runs, N replicas, S inner steps drawn at once.
"""

from typing import NamedTuple

import numpy as np

from noloco_jax.simulate.latency import log_sigma

_DRAWS_AT_ONCE = 2**17  # stays in the cache
_DRAWS_OF_WAITING = 2**24


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
    """Runs of `num_rounds` outer steps, each after `sync_every` log-normal(μ, σ²) inner steps on every replica.

    DiLoCo starts a round when the slowest of all replicas has ended the last one: time = Σ_rounds max_i S_i.
    NoLoCo's replica waits for its random group only: t_i ← max_{j in g(i)} (t_j + S_j). Both see the same S.
    """
    rng = np.random.default_rng(seed)
    diloco_R = np.zeros(num_runs)
    clock_RN = np.zeros((num_runs, num_replicas))
    for _ in range(num_rounds):
        block_RN = _block_times(rng, num_runs, num_replicas, sync_every, mu, sigma)
        diloco_R += block_RN.max(axis=1)
        # Replicas differ in nothing but their clocks: shuffling those and grouping neighbours is a random grouping.
        clock_RN = _wait_for_group(rng.permuted(clock_RN + block_RN, axis=1), group_size)
    return RunTimes(diloco_R, clock_RN.max(axis=1))


def idle_time_ratio(
    num_replicas: int, sync_every: int, num_rounds: int, num_runs: int, mu: float, sigma: float, seed: int
) -> float:
    """DiLoCo's total run time over NoLoCo's, averaged over runs: the paper's figure on blocking (μ = 1, σ² = 0.5)."""
    times = run_times(num_replicas, sync_every, num_rounds, num_runs, mu, sigma, seed)
    return float(np.mean(times.diloco / times.noloco))


def waiting_per_step(
    num_replicas: int, sync_every: int, group_size: int, step_time: float, variation: float, seed: int
) -> tuple[float, float]:
    """Seconds a step loses to waiting, DiLoCo's and NoLoCo's, when a step takes `step_time` on average.

    Args:
      num_replicas: N.
      sync_every: inner steps between outer steps; at 1, DiLoCo's figure is what any all-reduce every step waits.
      group_size: of NoLoCo.
      step_time: mean time of a step, seconds.
      variation: standard deviation over mean of a step's time.
      seed: of the draws.

    Returns:
      (DiLoCo's seconds, NoLoCo's).
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
    """(R, N) sums of `num_steps` log-normal times, drawn in float32 for speed and at most so many at once."""
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
    """Every group of neighbours leaves at its last arrival; the last group is the remainder."""
    starts = np.arange(0, clock_RN.shape[1], group_size)
    latest = np.maximum.reduceat(clock_RN, starts, axis=1)
    return np.repeat(latest, group_size, axis=1)[:, : clock_RN.shape[1]]
