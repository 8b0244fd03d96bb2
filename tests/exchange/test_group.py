"""Routes of the exchange checked by brute force, and messages in the compiled programs."""

import jax
import numpy as np
import pytest

import noloco_jax as nj
from noloco_jax.exchange.permute import lower
from support.exchanges import exchange_of
from support.layouts import (
    axis_of,
    compiled,
    messages,
    other_collectives,
    over_replicas,
    random_tree,
    state_at_start,
)
from support.oracle import group_mean as oracle_mean

SIZE = sum(x[0].size for x in random_tree(0, 1).values())  # all weights go in one message


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


SHAPES = [(d, slots) for d in range(1, 9) for slots in (1, 2, 3, 4, 8)]


@pytest.mark.parametrize(("d", "slots"), SHAPES)
def test_routes_deliver_every_source_and_send_only_blocks_that_change_device(d, slots):
    rng = np.random.default_rng([d, slots])
    sources = np.stack([rng.permutation(d * slots) for _ in range(12)])
    routes = lower(sources, d, slots)
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
    routes = lower(sources, d, slots)
    assert all(len(pattern) == 1 for pattern in routes.patterns)
    assert len(routes.patterns) == d - 1 + (slots > 1)
    within = [sent(routes, entry) == 0 for entry in range(n - 1)]
    assert sum(within) == slots - 1


def partner(round_):
    return {i: j for pair in round_ for i, j in (pair, pair[::-1])}


def expected_messages(pairing, d, slots):
    """Return the message sizes of a pool of equal groups, by `lower`: each distinct pattern compiles once."""
    result = []
    for k in range(1, len(pairing.pool[0][0])):
        sources = [[0] * pairing.num_replicas for _ in pairing.pool]
        for row, round_ in zip(sources, pairing.pool, strict=True):
            for group in round_:
                for position, replica in enumerate(group):
                    row[replica] = group[(position + k) % len(group)]
        for pattern in lower(np.array(sources), d, slots).patterns:
            result += [SIZE * count for to, count in pattern if to != tuple(range(d))]
    return sorted(result)


def compiled_outer_step(tx, d, slots):
    params = random_tree(0, d * slots)
    state = state_at_start(d * slots, params, params)
    # An inner jit, which users may have, must not hide the mesh from the transform.
    return compiled(over_replicas(jax.jit(tx.update), (d, slots)), params, state, params)


@pytest.mark.parametrize(
    ("d", "slots", "pairing", "number"),
    [
        (8, 1, nj.RandomPairing(8), 7),
        (4, 2, nj.RandomPairing(8), 3),
        (2, 4, nj.RandomPairing(8), 1),
        (1, 8, nj.RandomPairing(8), 0),
        (4, 1, nj.ExplicitPairing([[[0, 1], [2, 3]], [[0, 2], [1, 3]]]), 2),
    ],
)
def test_the_outer_program_sends_only_the_routes_messages_by_collective_permute(d, slots, pairing, number):
    tx = nj.noloco(pairing, sync_every=2, axis_name=axis_of((d, slots)))
    hlo = compiled_outer_step(tx, d, slots)
    assert not other_collectives(hlo)
    assert sorted(messages(hlo)) == expected_messages(pairing, d, slots)
    assert messages(hlo) == [SIZE * slots] * number  # a device's whole block, once


@pytest.mark.parametrize(("d", "slots"), [(4, 1), (2, 2)])
def test_diloco_sends_by_all_reduce_alone(d, slots):
    tx = nj.diloco(sync_every=2, axis_name=axis_of((d, slots)))
    hlo = compiled_outer_step(tx, d, slots)
    assert other_collectives(hlo) == {"all-reduce"}
    assert not messages(hlo)


def test_a_static_inner_step_sends_nothing():
    tx = nj.noloco(nj.RandomPairing(4), sync_every=2)
    params = random_tree(0, 4)
    state = state_at_start(4, params, params)
    update = over_replicas(lambda *args: tx.update(*args, sync=False), (4, 1))
    hlo = compiled(update, params, state, params)
    assert not messages(hlo)
    assert not other_collectives(hlo)


def test_the_group_mean_is_bitwise_equal_on_every_layout():
    pairing = nj.ExplicitPairing(nj.RandomPairing(8, 3, max_pool=2).pool)
    x = np.random.default_rng(0).normal(size=(8, SIZE)).astype(np.float32)

    means = []
    for layout in (8, (8, 1), (4, 2), (2, 4), (1, 8)):
        means.append(
            [jax.device_get(jax.jit(exchange_of(pairing.pool, layout=layout, draw=k))(x)[0]) for k in range(2)]
        )
    for mean in means:
        np.testing.assert_array_equal(mean, means[0])
    for mean, round_ in zip(means[0], pairing.pool, strict=True):
        np.testing.assert_allclose(mean, oracle_mean(x, round_), rtol=1e-6, atol=1e-6)
