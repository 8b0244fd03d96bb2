"""The mean over all replicas by rounds of pairs."""

import math

import jax
import numpy as np
import pytest

from noloco_jax.exchange.merge import mean_by_pairs, merge_rounds
from support.layouts import assert_trees_close, axis_of, compiled, over_replicas, random_tree


@pytest.mark.parametrize("n", range(1, 18))
def test_a_merge_takes_log2_n_rounds_of_pairs_and_at_most_two_more(n):
    rounds = merge_rounds(n)
    assert len(rounds) == math.floor(math.log2(n)) + (0 if n & (n - 1) == 0 else 2)
    for partner, _, _ in rounds:
        np.testing.assert_array_equal(partner[partner], np.arange(n))


@pytest.mark.parametrize("layout", [1, 2, 3, 5, 8, (8, 1), (6, 1), (4, 2), (2, 3)])
def test_all_replicas_end_with_the_mean(layout):
    n = layout if isinstance(layout, int) else math.prod(layout)
    tree = random_tree(0, n)
    merged = jax.jit(over_replicas(lambda t: mean_by_pairs(t, axis_of(layout)), layout))(tree)
    assert_trees_close(merged, jax.tree.map(lambda x: np.broadcast_to(x.mean(0), x.shape), tree))
    if n & (n - 1) == 0:
        for x in jax.tree.leaves(merged):
            np.testing.assert_array_equal(np.asarray(x), np.broadcast_to(x[:1], x.shape))


def test_a_merge_sends_only_to_partners():
    tree = random_tree(0, 8)
    text = compiled(over_replicas(lambda t: mean_by_pairs(t, "replica"), (8, 1)), tree)
    assert text.count(" collective-permute(") == 3 * len(tree)
    assert "all-reduce" not in text
    assert "all-gather" not in text
