"""Groups of 4 and 8 that average by halves."""

import jax
import numpy as np
import pytest

import noloco_jax as nj
from noloco_jax.optim.exchange.blocks import block_counts
from noloco_jax.optim.pairing import halvings_of
from noloco_jax.optim.wire_sizes import WIRES
from support.exchanges import exchange_of
from support.layouts import Layout

FOURS = [[2, 0, 5, 7], [6, 1, 3, 4]]
EIGHT = [[3, 1, 4, 0, 5, 2, 6, 7]]
# Odd numbers of blocks and rows, which halves do not divide, beside even ones.
SHAPES = {"a": (5, 70), "b": (7,), "c": (2, 33, 8), "d": (3, 3, 200)}
DISTANCE = 0.01


def messages(distance=DISTANCE):
    rng = np.random.default_rng(0)
    shared = {name: rng.normal(size=shape) for name, shape in SHAPES.items()}
    return {name: (x + distance * rng.normal(size=(8, *x.shape))).astype(np.float32) for name, x in shared.items()}


def exchanged(x, groups, wire, layout: Layout = 8, movement=10 * DISTANCE):
    """Return the means that replicas receive, and their windows."""
    if wire != "modulo4":
        return jax.device_get(jax.jit(exchange_of(groups, wire, layout))(x))
    moved = jax.tree.map(lambda leaf: np.full_like(leaf, movement), x)
    windows = jax.tree.map(lambda v: np.zeros((8, *block_counts(v.shape[1:], v.ndim - 2)), np.uint8), x)
    return jax.device_get(jax.jit(exchange_of(groups, wire, layout))(x, moved, windows))


def mean_of(x, groups):
    mean = np.empty(x.shape)
    for group in groups:
        mean[group] = x[group].astype(np.float64).mean(axis=0)
    return mean


@pytest.mark.parametrize("groups", [FOURS, EIGHT], ids=["4", "8"])
@pytest.mark.parametrize(("wire", "step"), [("float32", 2e-6), ("bfloat16", 2**-6), ("modulo4", 0.033)])
def test_all_members_receive_the_mean_within_a_few_steps_of_the_format(groups, wire, step):
    """A swap adds half a step, and the modulo format's step is up to 4.4 / 16 * 1.19 of the movement, here 0.033."""
    x = messages()
    means, _ = exchanged(x, groups, wire)
    for name, leaf in x.items():
        np.testing.assert_allclose(means[name], mean_of(leaf, groups), atol=2 * step)


@pytest.mark.parametrize("wire", WIRES)
def test_corrections_of_a_group_sum_to_zero(wire):
    x = messages()
    means, _ = exchanged(x, FOURS, wire)
    for name, leaf in x.items():
        corrections = means[name].astype(np.float64) - leaf
        for group in FOURS:
            np.testing.assert_allclose(corrections[group].sum(axis=0), 0, atol=2e-6)
        assert np.abs(corrections).max() > DISTANCE / 10


@pytest.mark.parametrize("wire", ["bfloat16", "int4", "modulo4"])
def test_equal_replicas_stay_equal(wire):
    x = jax.tree.map(lambda leaf: np.broadcast_to(leaf[:1], leaf.shape), messages())
    jax.tree.map(np.testing.assert_array_equal, exchanged(x, EIGHT, wire)[0], x)


@pytest.mark.parametrize("wire", ["float32", "modulo4"])
def test_every_layout_has_the_same_bits(wire):
    x = messages()
    first = exchanged(x, FOURS, wire)
    for layout in ((8, 1), (2, 4)):
        jax.tree.map(np.testing.assert_array_equal, exchanged(x, FOURS, wire, layout), first)


def test_a_member_too_far_for_the_window_widens_it_for_all_and_moves_nothing_wrongly():
    """Replica 5 is 50 windows away: its first partner, replica 7, refuses it, and then the other pair refuses both."""
    x = messages()
    x["b"][5] += 100.0
    means, windows = exchanged(x, FOURS, "modulo4")
    _, before = exchanged(messages(), FOURS, "modulo4")
    moved = np.abs(means["b"] - x["b"]).max(axis=1)
    assert moved.max() < 0.2  # a wrong decoding is at least a window, 0.44
    np.testing.assert_allclose((means["b"] - x["b"])[FOURS[0]].sum(axis=0), 0, atol=1e-4)
    assert (windows["b"][[5, 7]] >= before["b"][[5, 7]] + 8).all()


@pytest.mark.parametrize(("n", "size"), [(4, 4), (16, 4), (16, 8), (32, 4), (256, 4)])
def test_rounds_of_a_hypercube_in_groups_reach_the_exact_mean_from_any_start(n, size):
    """Multiples of n are averaged without rounding errors."""
    pairing = nj.RandomPairing(n, size, seed=3, order="hypercube")
    needed = -(-(n.bit_length() - 1) // (size.bit_length() - 1))
    for first in range(len(pairing.pool) + 1):
        values = n * np.random.default_rng(first).integers(0, 1000, n)
        mean = values.sum() / n
        for draw in range(first, first + needed):
            for group in pairing.pool[pairing.pool_index(draw)]:
                values[[*group]] = values[[*group]].sum() / size
        np.testing.assert_array_equal(values, mean)


@pytest.mark.parametrize("pairing", [nj.RandomPairing(16, 4, order="hypercube"), nj.ExplicitPairing([EIGHT])])
def test_partners_are_mutual_and_keep_different_halves(pairing):
    for partners, sides in halvings_of(pairing):
        for partner, side in zip(partners, sides, strict=True):
            np.testing.assert_array_equal(partner[partner], np.arange(len(partner)))
            np.testing.assert_array_equal(side[partner], 1 - side)


def test_pairs_odd_groups_remainders_and_graphs_do_not_average_by_halves():
    for pairing in (
        nj.RandomPairing(8),
        nj.RandomPairing(9, 3),
        nj.RandomPairing(6, 4),
        nj.RandomNeighbours(8, 3),
    ):
        assert halvings_of(pairing) == []
