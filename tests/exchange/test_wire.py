"""The message of a round: one array for all weights, rounded on its way where that was asked for."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import noloco_jax as nj
from noloco_jax.exchange.group import group_mean
from support.layouts import axis_of, compiled, messages, over_replicas, random_tree, state_at_start

PAIRS = [[0, 3], [1, 2], [4, 6], [5, 7]]


@pytest.mark.parametrize(("d", "slots", "number"), [(8, 1, 7), (4, 2, 3)])
def test_all_weights_go_in_one_message_a_round(d, slots, number):
    params = random_tree(0, 8)
    size = sum(x[0].size for x in params.values())
    tx = nj.noloco(nj.RandomPairing(8), sync_every=1, axis_name=axis_of((d, slots)))
    hlo = compiled(over_replicas(tx.update, (d, slots)), params, state_at_start(8, params, params), params)
    assert messages(hlo) == [size * slots] * number  # one for every pattern that a round may have


@pytest.mark.parametrize("layout", [8, (8, 1), (2, 4)])
def test_a_replica_averages_its_own_weights_with_what_bfloat16_leaves_of_its_partners(layout):
    trees = random_tree(0, 8)
    pairing = nj.ExplicitPairing([PAIRS])

    def mean(tree):
        return group_mean(tree, pairing, jnp.int32(0), axis_of(layout), jnp.bfloat16)

    means = jax.jit(over_replicas(mean, layout))(trees)
    partner = np.empty(8, int)
    for i, j in PAIRS:
        partner[[i, j]] = j, i
    for name, x in trees.items():
        rounded = x.view(np.uint32) + 0x7FFF + ((x.view(np.uint32) >> 16) & 1) & 0xFFFF0000  # to nearest, ties to even
        expected = (x + rounded.view(np.float32)[partner]) / 2
        np.testing.assert_array_equal(means[name], expected)


def test_bfloat16_halves_the_message_on_every_backend():
    params = random_tree(0, 8)
    tx = nj.noloco(nj.RandomPairing(8), sync_every=1, wire_dtype=jnp.bfloat16)
    update = over_replicas(tx.update, (8, 1))
    sent = compiled(update, params, state_at_start(8, params, params), params)
    operands = re.findall(r"(\w+\[[\d,]*\])\S* collective-permute", sent)
    assert operands
    assert set(operands) == {"u16[13]"}
