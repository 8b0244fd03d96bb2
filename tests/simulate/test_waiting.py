"""Latency and blocking against independent figures, and communication costs against hand counts."""

import dataclasses
import math

import numpy as np
import pytest

from noloco_jax.simulate.cost import Setting, all_reduce, costs, group_exchange, sharded_step
from noloco_jax.simulate.waiting import (
    expected_max_of_two,
    idle_time_ratio,
    log_sigma,
    run_times,
    tree_over_pair,
    waiting_per_step,
)

# The independent figures are simulated too: each side has one to two percent of noise.
TOLERANCE = 0.02

SETTING = Setting(
    params=1e9, bandwidth=8e9, latency=0.1, step_time=2.0, replicas=8, sync_every=10, group_size=2, wire="bfloat16"
)


def test_the_expected_maximum_of_two_log_normals_is_the_closed_form():
    times = np.exp(1 + math.sqrt(0.5) * np.random.default_rng(0).standard_normal((2, 400_000))).max(axis=0)
    error = times.std() / math.sqrt(times.size)
    assert abs(times.mean() - expected_max_of_two(1, math.sqrt(0.5))) < 4 * error


def test_log_sigma_gives_the_requested_variation():
    for variation in (0.5, 2.0):
        variance = log_sigma(variation) ** 2
        np.testing.assert_allclose(math.sqrt(math.exp(variance) - 1), variation)  # std/mean of a log-normal


@pytest.mark.parametrize(("variation", "ratio"), [(0, 10.0), (0.5, 12.4), (1, 17.1), (2, 31)])
def test_a_tree_over_1024_replicas_takes_the_expected_multiple_of_a_pair(variation, ratio):
    found = tree_over_pair(variation, num_levels=10, num_runs=1500, seed=0)[-1]
    np.testing.assert_allclose(found, ratio, rtol=TOLERANCE)


def test_a_tree_without_variation_takes_the_papers_log_n():
    np.testing.assert_allclose(tree_over_pair(0, num_levels=6, num_runs=1, seed=0), np.arange(1, 7))


def test_a_tree_of_two_takes_the_time_of_a_pair():
    np.testing.assert_allclose(tree_over_pair(1, num_levels=1, num_runs=200_000, seed=0), 1, atol=0.01)


@pytest.mark.parametrize(
    ("num_replicas", "inner_steps", "ratio"),
    [(1024, 100, 1.19), (1024, 50, 1.28), (1024, 25, 1.42), (1024, 10, 1.75), (1024, 5, 2.07), (16, 100, 1.07)],
)
def test_waiting_for_all_takes_the_expected_multiple_of_waiting_for_a_partner(num_replicas, inner_steps, ratio):
    num_runs = {1024: 2 if inner_steps > 10 else 8, 16: 32}[num_replicas]
    found = idle_time_ratio(num_replicas, inner_steps, 100, num_runs, 1.0, math.sqrt(0.5), seed=0)
    np.testing.assert_allclose(found, ratio, rtol=TOLERANCE)


def test_two_replicas_wait_equally_under_diloco_and_noloco():
    times = run_times(2, 3, 20, 5, 1.0, 0.5, seed=0)
    np.testing.assert_allclose(times.diloco, times.noloco)


def test_one_group_of_all_waits_like_diloco():
    times = run_times(7, 3, 20, 5, 1.0, 0.5, seed=0, group_size=7)
    np.testing.assert_allclose(times.diloco, times.noloco)


def test_equal_step_times_cause_no_waiting():
    times = run_times(6, 4, 10, 2, 1.0, 0.0, seed=0)
    np.testing.assert_allclose([*times.diloco, *times.noloco], 40 * math.e, rtol=1e-6)
    np.testing.assert_allclose(waiting_per_step(6, 4, 2, 1.0, 0.0, seed=0), 0, atol=1e-6)


def test_an_odd_replica_waits_for_nobody():
    """Replay the same draws by hand: of three shuffled replicas, the third is alone in a round."""
    rng = np.random.default_rng(5)
    clock = np.zeros(3)
    for _ in range(4):
        clock = clock + np.exp(np.float32(0.3) * rng.standard_normal((1, 1, 3), np.float32))[0, 0]
        clock = rng.permuted(clock[None], axis=1)[0]
        clock[:2] = clock[:2].max()
    np.testing.assert_allclose(run_times(3, 1, 4, 1, 0.0, 0.3, seed=5).noloco, clock.max(), rtol=1e-6)


def test_bytes_and_seconds_of_exchanges_match_counts_by_hand():
    # 2 GB of weights; 1 GB/s; 8 replicas: a message takes 0.1 + 2 s.
    assert group_exchange(SETTING) == pytest.approx((2e9, 2.1))
    # Shards of a group of four: three times 0.25 GB as bfloat16 and their 1 GB of means back, in six messages.
    assert group_exchange(dataclasses.replace(SETTING, group_size=4)) == pytest.approx((4.5e9, 6 * 0.1 + 4.5))
    # Messages of int6 are so short that 0.78125 GB go to each of the three others.
    in_codes = dataclasses.replace(SETTING, group_size=4, wire="int6")
    assert group_exchange(in_codes) == pytest.approx((3 * 0.78125e9, 3 * 0.88125))
    # Six replicas in groups of four leave a pair.
    with_rest = dataclasses.replace(SETTING, replicas=6, group_size=4)
    assert group_exchange(with_rest) == pytest.approx(((4 * 3 + 2 * 1) / 6 * 2e9, 6.3))
    assert all_reduce(SETTING) == pytest.approx((7e9, 2 * 3 * 0.1 + 7))
    assert sharded_step(SETTING) == pytest.approx((10.5e9, 3 * 3 * 0.1 + 10.5))


def test_outer_methods_spread_their_cost_over_the_inner_steps():
    by_name = {c.method: c for c in costs(SETTING)}
    noloco, ddp = by_name["NoLoCo"], by_name["DDP"]
    assert (noloco.every, noloco.bytes_per_step, noloco.exposed_per_step) == (10, 2e8, pytest.approx(0.21))
    assert noloco.compute_share == pytest.approx(2 / 2.21)
    assert ddp.exposed_per_step == ddp.seconds_per_sync == by_name["DiLoCo"].seconds_per_sync


def test_stragglers_cost_most_where_all_wait_every_step():
    setting = dataclasses.replace(SETTING, step_spread=0.8, replicas=32)
    waiting = {c.method: c.waiting_per_step for c in costs(setting)}
    assert waiting["FSDP"] == waiting["DDP"] > waiting["DiLoCo"] > waiting["NoLoCo"] > 0


def test_every_step_waits_for_the_slowest_of_all():
    """Oracle: the maximum of N log-normal steps, integrated from their distribution function."""
    n, variation = 8, 0.5
    sigma = log_sigma(variation)
    t = np.linspace(1e-6, 40, 400_001)
    cdf = 0.5 * (1 + np.vectorize(math.erf)((np.log(t[::100]) + sigma**2 / 2) / (sigma * math.sqrt(2))))
    expected = np.trapezoid(1 - cdf**n, t[::100])
    found, _ = waiting_per_step(n, 1, 2, 3.0, variation, seed=0)
    np.testing.assert_allclose(found, 3 * (expected - 1), rtol=0.03)
