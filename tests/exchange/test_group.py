"""Routes of the exchange, checked by brute force, and the mean over a group on every layout."""

import jax
import numpy as np
import pytest

import noloco_jax as nj
from noloco_jax.optim.exchange.permute import device_routes
from support.exchanges import exchange_of
from support.oracle import group_mean as oracle_mean


def follow(routes, entry):
    """Return the replica whose block each replica ends with, following `routes`."""
    d, slots = routes.num_devices, routes.num_slots
    outgoing = np.take_along_axis(np.arange(d * slots).reshape(d, slots), routes.send[entry], axis=1)
    arrived = np.full((d, slots), -1)
    start = 0
    for destinations, count in routes.patterns[routes.pattern_of[entry]]:
        assert sorted(destinations) == list(range(d))
        arrived[list(destinations), start : start + count] = outgoing[:, start : start + count]
        start += count
    assert start == slots
    return np.take_along_axis(arrived, routes.receive[entry], axis=1).ravel()


def sent(routes, entry):
    """Count the blocks that cross devices."""
    pattern = routes.patterns[routes.pattern_of[entry]]
    return sum(count * sum(d != to for d, to in enumerate(destinations)) for destinations, count in pattern)


SHAPES = [(d, slots) for d in (1, 2, 3, 5, 8) for slots in (1, 2, 3, 8)]


@pytest.mark.parametrize(("d", "slots"), SHAPES)
def test_routes_deliver_every_source_and_send_only_blocks_that_change_device(d, slots):
    rng = np.random.default_rng([d, slots])
    sources = np.stack([rng.permutation(d * slots) for _ in range(12)])
    routes = device_routes(sources, d, slots)
    for entry, row in enumerate(sources):
        np.testing.assert_array_equal(follow(routes, entry), row)
        stays = row // slots == np.arange(d * slots) // slots
        assert sent(routes, entry) == np.sum(~stays)
        # No device is busy for longer than the one with the most to send.
        pattern = routes.patterns[routes.pattern_of[entry]]
        busy = sum(count for destinations, count in pattern if destinations != tuple(range(d)))
        assert busy == np.sum(~stays.reshape(d, slots), axis=1).max()


@pytest.mark.parametrize(("d", "slots"), [(1, 8), (2, 4), (4, 2), (8, 1), (2, 8), (4, 4)])
def test_pairs_of_a_power_of_two_send_at_most_one_message_per_device_and_round(d, slots):
    n = d * slots
    sources = np.array([[partner(round_)[i] for i in range(n)] for round_ in nj.RandomPairing(n).pool])
    routes = device_routes(sources, d, slots)
    assert all(len(pattern) == 1 for pattern in routes.patterns)
    assert len(routes.patterns) == d - 1 + (slots > 1)
    within = [sent(routes, entry) == 0 for entry in range(n - 1)]
    assert sum(within) == slots - 1


def partner(round_):
    return {i: j for pair in round_ for i, j in (pair, pair[::-1])}


def test_the_group_mean_is_bitwise_equal_on_every_layout():
    pairing = nj.ExplicitPairing(nj.RandomPairing(8, 3, max_pool=2).pool)
    x = np.random.default_rng(0).normal(size=(8, 13)).astype(np.float32)

    means = []
    for layout in (8, (8, 1), (4, 2), (2, 4), (1, 8)):
        means.append(
            [jax.device_get(jax.jit(exchange_of(pairing.pool, layout=layout, draw=k))(x)[0]) for k in range(2)]
        )
    for mean in means:
        np.testing.assert_array_equal(mean, means[0])
    for mean, round_ in zip(means[0], pairing.pool, strict=True):
        np.testing.assert_allclose(mean, oracle_mean(x, round_), rtol=1e-6, atol=1e-6)
