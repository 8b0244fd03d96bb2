"""Pairing pools and draws: meetings, mixing rates, and the stable interval of the consensus."""

import itertools
import time
import warnings
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import noloco_jax as nj
from noloco_jax.optim.pairing import components, consensus_limit


def pairs_of(round_):
    return [frozenset(pair) for group in round_ for pair in itertools.combinations(group, 2)]


@pytest.mark.parametrize("n", range(2, 17))
def test_every_pair_meets_exactly_once_in_a_pool_of_pairs(n):
    pool = nj.RandomPairing(n).pool
    assert len(pool) == (n - 1 if n % 2 == 0 else n)
    meetings = Counter(pair for round_ in pool for pair in pairs_of(round_))
    assert meetings == Counter(map(frozenset, itertools.combinations(range(n), 2)))


@pytest.mark.parametrize(
    ("n", "group_size"), [(1, 2), (2, 2), (5, 5), (6, 3), (7, 3), (10, 4), (9, 2), (12, 2), (80, 2)]
)
def test_every_round_is_a_partition_into_full_groups_and_a_remainder(n, group_size):
    pool = nj.RandomPairing(n, group_size).pool
    full, rest = divmod(n, group_size)
    for round_ in pool:
        assert sorted(i for group in round_ for i in group) == list(range(n))
        assert sorted(map(len, round_)) == sorted([group_size] * full + [rest] * (rest > 0))


@pytest.mark.parametrize("n", [2, 4, 8, 16, 128])
def test_every_aligned_block_of_a_power_of_two_meets_one_other_block(n):
    for round_ in nj.RandomPairing(n).pool:
        partner = {i: j for pair in round_ for i, j in (pair, pair[::-1])}
        for size in (2**k for k in range(n.bit_length() - 1)):
            for start in range(0, n, size):
                met = {partner[i] // size for i in range(start, start + size)}
                assert len(met) == 1


def test_a_pool_larger_than_the_cap_is_sampled():
    assert len(nj.RandomPairing(64).pool) == 63
    for pool, cap in ((nj.RandomPairing(66).pool, 64), (nj.RandomPairing(8, max_pool=5).pool, 5)):
        assert len(set(pool)) == len(pool) == cap


@pytest.mark.parametrize(("n", "most"), [(128, 0.5), (256, 0.66), (1024, 0.69)])
def test_a_sampled_pool_for_a_power_of_two_mixes_like_the_full_pool(n, most):
    """E[WᵀW] on deviations from the mean, under independent draws; for the full pool it is (1 − 1 / (n − 1)) / 2."""
    pool = nj.RandomPairing(n).pool
    mixing = np.zeros((n, n))
    for round_ in pool:
        for i, j in round_:
            mixing[np.ix_([i, j], [i, j])] += 0.5 / len(pool)
    *kept, whole = np.linalg.eigvalsh(mixing)
    assert whole == pytest.approx(1)
    assert np.mean(kept) == pytest.approx((1 - 1 / (n - 1)) / 2)
    assert max(kept) <= most + 1e-9


@pytest.mark.parametrize(("n", "max_pool"), [(128, 64), (1024, 64), (8, 5), (8, 3), (16, 4)])
@pytest.mark.parametrize("seed", range(4))
def test_one_pass_of_a_sampled_pool_reaches_the_exact_mean_for_a_power_of_two(n, max_pool, seed):
    pairing = nj.RandomPairing(n, seed=seed, max_pool=max_pool)
    assert len(set(pairing.pool)) == len(pairing.pool) == max_pool
    values = n * np.random.default_rng(seed).integers(0, 1000, n)
    mean = values.sum() / n
    for round_ in groups_of_rounds(pairing, max_pool):
        pairs = np.array(round_)
        values[pairs] = values[pairs].sum(1, keepdims=True) / 2
    np.testing.assert_array_equal(values, mean)


def test_components_group_replicas_that_ever_meet_and_are_fast_for_1024():
    rounds = [[[0, 3], [1, 4, 5], [2], [6, 7]], [[7, 2], [0], [1], [3], [4], [5], [6]]]
    assert components(nj.ExplicitPairing(rounds)) == [[0, 3], [1, 4, 5], [2, 6, 7]]
    pairing, start = nj.RandomPairing(1024, order="independent"), time.process_time()
    assert components(pairing) == [list(range(1024))]
    assert time.process_time() - start < 20  # a search from every replica would take minutes


def test_independent_draws_are_uniform_and_independent_of_the_previous_draw():
    pairing = nj.RandomPairing(8, seed=5, order="independent")
    size, rounds = len(pairing.pool), 7 * 7 * 400
    draws = np.asarray(jax.jit(jax.vmap(pairing.pool_index))(jnp.arange(rounds)))

    def chi_square(values, cells):
        observed = np.bincount(values, minlength=cells)
        return np.sum((observed - len(values) / cells) ** 2) / (len(values) / cells)

    assert chi_square(draws, size) < 22.46  # the 0.999 quantiles at 6 and at 48 degrees of freedom
    assert chi_square(draws[::2] * size + draws[1::2], size**2) < 84.04


def test_every_pass_draws_each_pool_entry_once_in_a_new_order():
    pairing = nj.RandomPairing(8, seed=3)
    size = len(pairing.pool)
    passes = [[int(pairing.pool_index(size * k + j)) for j in range(size)] for k in range(20)]
    assert all(sorted(indices) == list(range(size)) for indices in passes)
    assert len(set(map(tuple, passes))) == 20


def test_draws_do_not_depend_on_jaxs_generator_jit_vmap_or_x64():
    """Draws of `jax.random` under rbg differ inside and outside `vmap`. The expected numbers must never change."""
    for order, expected in (("passes", [6, 3, 0, 5, 4, 1, 2, 0]), ("independent", [2, 2, 3, 1, 3, 4, 3, 1])):
        pairing = nj.RandomPairing(8, order=order)
        assert [int(pairing.pool_index(r)) for r in range(8)] == expected
        for generator in ("threefry2x32", "rbg", "unsafe_rbg"):
            with jax.default_prng_impl(generator):
                np.testing.assert_array_equal(jax.vmap(pairing.pool_index)(jnp.arange(8)), expected)
        with jax.enable_x64(True):
            compiled = jax.jit(pairing.pool_index)
            assert [int(compiled(r)) for r in range(8)] == expected and compiled(0).dtype == jnp.int32


def test_every_bit_of_a_seed_counts():
    seeds = (0, 1, 2**31, 2**32, 2**32 + 1, 2**64)
    assert len({tuple(groups_of_rounds(nj.RandomPairing(8, seed=seed), 40)) for seed in seeds}) == len(seeds)


@pytest.mark.parametrize(("n", "group_size"), [(4, 3), (5, 3), (6, 3), (6, 4), (8, 4), (7, 3), (12, 3)])
def test_a_pool_of_larger_groups_is_distinct_and_complete_up_to_the_cap(n, group_size):
    full, rest = divmod(n, group_size)
    every = {frozenset(map(frozenset, p)) for p in partitions(range(n), [group_size] * full + [rest] * (rest > 0))}
    pool = [frozenset(map(frozenset, round_)) for round_ in nj.RandomPairing(n, group_size).pool]
    assert len(set(pool)) == len(pool) == min(len(every), 64)
    assert set(pool) <= every


def test_pairings_agree_for_equal_seeds_and_differ_for_different_seeds():
    first, again, other = (groups_of_rounds(nj.RandomPairing(6, seed=s), 20) for s in (0, 0, 1))
    assert first == again != other
    assert nj.RandomPairing(8, 3).pool == nj.RandomPairing(8, 3).pool != nj.RandomPairing(8, 3, seed=1).pool


def test_explicit_rounds_cycle_in_order():
    pairing = nj.ExplicitPairing([[[0, 1], [2]], [[0], [1, 2]]])
    a, b = pairing.pool
    assert groups_of_rounds(pairing, 5) == [a, b, a, b, a]


def groups_of_rounds(pairing, num_rounds):
    """Return the partitions of the first rounds, drawn on the host."""
    return [pairing.pool[int(pairing.pool_index(round))] for round in range(num_rounds)]


def partitions(members, sizes):
    """Yield all partitions of `members` into groups of these sizes."""
    if not members:
        yield ()
        return
    first, *others = members
    for size in set(sizes):
        left = list(sizes)
        left.remove(size)
        for rest in itertools.combinations(others, size - 1):
            for tail in partitions([i for i in others if i not in rest], left):
                yield ((first, *rest), *tail)


def growth_of_second_moments(pool, n, alpha, gamma):
    """Spectral radius of E[A ⊗ A] on the deviations from the mean, A the step δ ← αδ − γPφ, φ ← φ + δ of each entry."""
    deviations = np.linalg.svd(np.eye(n) - 1 / n)[0][:, : n - 1]
    expected = np.zeros(2 * [(2 * (n - 1)) ** 2])
    for round_ in pool:
        away = np.eye(n)
        for group in round_:
            away[np.ix_(group, group)] -= 1 / len(group)
        pull = gamma * deviations.T @ away @ deviations
        keep = np.eye(n - 1)
        step = np.block([[keep - pull, alpha * keep], [-pull, alpha * keep]])
        expected += np.kron(step, step) / len(pool)
    return np.abs(np.linalg.eigvals(expected)).max()


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.9])
@pytest.mark.parametrize(("n", "group_size"), [(2, 2), (4, 2), (5, 2), (6, 2), (6, 3), (5, 3), (4, 3), (4, 4)])
def test_second_moments_grow_exactly_beyond_the_consensus_limit(n, group_size, alpha):
    full, rest = divmod(n, group_size)
    if group_size == 2:
        pool = nj.RandomPairing(n).pool
    else:
        pool = list(partitions(range(n), [group_size] * full + [rest] * (rest > 0)))
    limit = consensus_limit(alpha, n, group_size)
    for factor in (0.01, 0.3, 0.7, 0.9999):
        assert growth_of_second_moments(pool, n, alpha, factor * limit) < 1
    assert growth_of_second_moments(pool, n, alpha, 1.0001 * limit) > 1


@pytest.mark.parametrize(("n", "group_size"), [(6, 3), (7, 3)])
def test_a_sampled_pool_is_stable_at_95_per_cent_of_the_limit(n, group_size):
    limit = consensus_limit(0.9, n, group_size)
    assert growth_of_second_moments(nj.RandomPairing(n, group_size).pool, n, 0.9, 0.95 * limit) < 1


def test_noloco_warns_only_of_a_consensus_outside_the_stable_interval():
    pairing = nj.RandomPairing(8)
    limit = consensus_limit(0.5, 8)
    for gamma in (0.0, 1.001 * limit):
        with pytest.warns(
            UserWarning, match="^consensus .* do not stay together; give consensus a number inside$"
        ) as caught:
            nj.noloco(pairing, outer_momentum=0.5, consensus=gamma)
        assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for gamma in (0.01, 0.999 * limit, None):
            nj.noloco(pairing, outer_momentum=0.5, consensus=gamma)
        nj.noloco(nj.RandomPairing(1), consensus=5.0)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"outer_lr": optax.linear_schedule(0.7, 0.0, 100)}, "consensus 0 in round"),
        ({"outer_lr": optax.linear_schedule(0.1, 2.0, 1000)}, "in round"),
        ({"outer_momentum": optax.linear_schedule(0.5, 0.95, 1000), "consensus": 0.7}, "in round"),
        ({"outer_lr": 2.0}, "consensus 2 is outside"),
    ],
)
def test_schedules_and_a_consensus_that_follows_the_rate_are_checked_at_their_extremes(settings, named):
    """Schedules were not checked, and γ silently followed them to 0 or out of the interval."""
    with pytest.warns(UserWarning, match=named):
        nj.noloco(nj.RandomPairing(8), **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nj.noloco(nj.RandomPairing(8), outer_lr=optax.linear_schedule(0.7, 0.0, 100), consensus=0.7)


@pytest.mark.parametrize("n", [2, 4, 8, 16, 64, 128])
def test_log2_n_hypercube_rounds_reach_the_exact_mean_from_any_start(n):
    """Multiples of n are averaged without rounding errors."""
    pairing, k = nj.RandomPairing(n, seed=3, order="hypercube"), n.bit_length() - 1
    for first in range(2 * len(pairing.pool)):
        values = n * np.random.default_rng(first).integers(0, 1000, n)
        mean = values.sum() / n
        for round_ in groups_of_rounds(pairing, first + k)[first:]:
            for i, j in round_:
                values[[i, j]] = values[[i, j]].sum() / 2
        np.testing.assert_array_equal(values, mean)


def test_a_small_hypercube_pairs_all_replicas_and_a_large_one_only_its_edges():
    pool = nj.RandomPairing(16, order="hypercube").pool
    assert Counter(pair for round_ in pool for pair in pairs_of(round_)) == Counter(
        map(frozenset, itertools.combinations(range(16), 2))
    )
    assert len(nj.RandomPairing(1024, order="hypercube").pool) == 10


def test_the_start_of_a_hypercube_depends_on_the_seed():
    assert len({groups_of_rounds(nj.RandomPairing(8, seed=seed, order="hypercube"), 1)[0] for seed in range(20)}) > 4


def test_numpys_integers_serve_as_sizes_and_seeds():
    large = nj.RandomPairing(np.int64(128), np.int32(2), np.int32(3))
    assert large.pool == nj.RandomPairing(128, 2, 3).pool
    assert [int(large.pool_index(r)) for r in range(9)] == [
        int(nj.RandomPairing(128, 2, 3).pool_index(r)) for r in range(9)
    ]
    assert nj.RandomPairing(np.int64(8), order="hypercube").pool == nj.RandomPairing(8, order="hypercube").pool
    assert nj.RandomNeighbours(np.int64(8)).pool == nj.RandomNeighbours(8).pool
