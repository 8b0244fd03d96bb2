"""The message of a round: one array for all weights, rounded on its way where that was asked for."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import noloco_jax as nj
from noloco_jax.exchange.groups import group_mean
from noloco_jax.exchange.wire import WIRES
from support.layouts import axis_of, compiled, messages, over_replicas, random_tree, state_at_start

PAIRS = [[0, 3], [1, 2], [4, 6], [5, 7]]


@pytest.mark.parametrize(("d", "slots", "number"), [(8, 1, 7), (4, 2, 3)])
def test_all_weights_go_in_one_message_a_round(d, slots, number):
    params = random_tree(0, 8)
    size = sum(x[0].size for x in params.values())
    tx = nj.noloco(nj.RandomPairing(8), sync_every=1, axis_name=axis_of((d, slots)))
    hlo = compiled(over_replicas(tx.update, (d, slots)), params, state_at_start(8, params, params), params)
    assert messages(hlo) == [size * slots] * number  # one for every pattern that a round may have


def to_bfloat16(x):
    """Rounded to nearest, ties to even, by numpy."""
    bits = x.view(np.uint32) + 0x7FFF + ((x.view(np.uint32) >> 16) & 1) & 0xFFFF0000
    return bits.view(np.float32)


@pytest.mark.parametrize("layout", [8, (8, 1), (2, 4)])
def test_pairs_come_together_by_the_difference_of_what_bfloat16_leaves_of_both(layout):
    trees = random_tree(0, 8)
    pairing = nj.ExplicitPairing([PAIRS])

    def mean(tree):
        return group_mean(tree, pairing, jnp.int32(0), axis_of(layout), WIRES["bfloat16"])

    means = jax.jit(over_replicas(mean, layout))(trees)
    partner = np.empty(8, int)
    for i, j in PAIRS:
        partner[[i, j]] = j, i
    for name, x in trees.items():
        rounded = to_bfloat16(x)
        correction = (rounded[partner] - rounded) / 2
        np.testing.assert_array_equal(correction + correction[partner], 0)
        np.testing.assert_array_equal(means[name], x + correction)


@pytest.mark.parametrize("group_size", [2, 3, 4])
def test_replicas_with_equal_values_keep_them_through_a_wire_that_rounds(group_size):
    tree = jax.tree.map(lambda x: np.broadcast_to(x[:1], x.shape), random_tree(0, 8))
    pairing = nj.RandomPairing(8, group_size, max_pool=4)

    def mean(tree):
        return group_mean(tree, pairing, jnp.int32(1), "replica", WIRES["bfloat16"])

    means = jax.jit(jax.vmap(mean, axis_name="replica"))(tree)
    for name, x in tree.items():
        np.testing.assert_array_equal(means[name], x)


def test_complex_numbers_are_an_error_of_a_wire_that_rounds():
    outer = nj.noloco(nj.RandomPairing(4), wire="bfloat16")
    params = {"w": np.ones((4, 2), np.complex64)}
    with pytest.raises(TypeError, match="rounds real numbers and the parameters hold complex64: use wire='float32'"):
        jax.eval_shape(jax.vmap(outer.step, axis_name="replica"), params, jax.eval_shape(jax.vmap(outer.init), params))


def test_bfloat16_halves_the_message_on_every_backend():
    params = random_tree(0, 8)
    tx = nj.noloco(nj.RandomPairing(8), sync_every=1, wire="bfloat16")
    update = over_replicas(tx.update, (8, 1))
    sent = compiled(update, params, state_at_start(8, params, params), params)
    operands = re.findall(r"(\w+\[[\d,]*\])\S* collective-permute", sent)
    assert operands
    assert set(operands) == {"u16[13]"}
