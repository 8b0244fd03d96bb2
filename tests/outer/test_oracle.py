"""Outer steps against numpy, for settings without golden files of the authors' code."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
import pytest

import noloco_jax as nj
from support.layouts import Layout, assert_trees_close, axis_of, over_replicas, random_tree, state_at_start
from support.oracle import diloco_step, noloco_step

NUM_ROUNDS = 3


def outer_rounds(tx: optax.GradientTransformationExtraArgs, layout: Layout, num_replicas: int) -> Iterator[Any]:
    """Yield the round, (θ, φ, δ) before it and (φ, δ) after, array by array; every round has fresh inner updates."""
    update = jax.jit(over_replicas(lambda *args: tx.update(*args, sync=True), layout))
    params = random_tree(0, num_replicas)
    state = state_at_start(num_replicas, random_tree(1, num_replicas), random_tree(2, num_replicas))
    for r in range(NUM_ROUNDS):
        inner = random_tree(3 + r, num_replicas)
        updates, after = jax.device_get(update(inner, state, params))
        theta = jax.tree.map(np.add, params, inner)
        for name in theta:
            before = theta[name], state.rule.slow[name], state.rule.momentum[name]
            yield r, before, (after.rule.slow[name], after.rule.momentum[name])
        params, state = jax.tree.map(np.add, params, updates), after


# (α, β, γ, n, layout)
NOLOCO_CASES = [
    (0.5, 0.7, None, 2, 2),
    (0.0, 1.0, 1.0, 2, 4),
    (0.9, 0.7, 0.2, 2, 5),  # odd: one replica alone
    (0.3, 0.5, 1.1, 3, 7),  # groups of 3, 3, 1
    (0.2, 0.0, 0.9, 5, 5),  # one group of all
    (0.5, 0.7, 0.4, 2, 1),  # one replica, alone
    (0.3, 0.5, 1.1, 3, (7, 1)),
    (0.5, 0.7, 0.3, 4, (2, 3)),  # groups of 4, 2
    (0.9, 0.2, 0.1, 2, (3, 3)),  # odd, and several to a device
]


@pytest.mark.parametrize(("alpha", "beta", "gamma", "group_size", "layout"), NOLOCO_CASES)
def test_noloco_is_the_modified_momentum_step(alpha, beta, gamma, group_size, layout):
    n = layout if isinstance(layout, int) else layout[0] * layout[1]
    pairing = nj.ExplicitPairing(nj.RandomPairing(n, group_size, max_pool=9).pool[:NUM_ROUNDS])
    tx = nj.noloco(pairing, beta, alpha, gamma, sync_every=1, axis_name=axis_of(layout))
    settings = {"alpha": alpha, "beta": beta, "gamma": beta if gamma is None else gamma}
    for r, before, after in outer_rounds(tx, layout, n):
        assert_trees_close(after, noloco_step(*before, groups=pairing.pool[r % len(pairing.pool)], **settings))


def test_groups_of_mixed_sizes_in_one_round_each_average_their_own_members():
    pairing = nj.ExplicitPairing(
        [[[3], [0, 5], [1, 6, 2, 4]], [[0, 1, 2], [3, 4, 5, 6]], [[6, 0], [1], [2], [3], [4], [5]]]
    )
    tx = nj.noloco(pairing, 0.7, 0.5, 0.3, sync_every=1)
    for r, before, after in outer_rounds(tx, 7, 7):
        assert_trees_close(after, noloco_step(*before, groups=pairing.pool[r], alpha=0.5, beta=0.7, gamma=0.3))


@pytest.mark.parametrize(("nesterov", "layout"), [(False, 3), (True, 3), (True, (4, 1)), (True, (2, 2))])
def test_diloco_is_a_momentum_step_along_the_mean_outer_gradient(nesterov, layout):
    n = layout if isinstance(layout, int) else layout[0] * layout[1]
    tx = nj.diloco(0.6, 0.8, nesterov, sync_every=1, axis_name=axis_of(layout))
    for _, before, after in outer_rounds(tx, layout, n):
        assert_trees_close(after, diloco_step(*before, alpha=0.8, beta=0.6, nesterov=nesterov))


def test_nesterov_diloco_is_optax_sgd_on_the_averaged_outer_gradient():
    """Optax keeps t ← g + αt with g = −mean(Δ), and steps by −β(g + αt): the same step, every round, with δ = −βt."""
    alpha, beta = 0.9, 0.7
    tx = nj.diloco(beta, alpha, nesterov=True, sync_every=1)
    update = jax.jit(jax.vmap(tx.update, axis_name="replica"))
    sgd = optax.sgd(beta, momentum=alpha, nesterov=True)
    phi, trace = np.ones(4, np.float32), sgd.init(np.ones(4, np.float32))
    params = np.ones((3, 4), np.float32)
    state = state_at_start(3, params, np.zeros_like(params))
    for r in range(4):
        inner = random_tree(r, 3)["matrix"][:, 0]
        updates, state = jax.device_get(update(inner, state, params))
        params = params + updates
        step, trace = sgd.update(-inner.mean(axis=0), trace)
        phi = phi + np.asarray(step)
        t = np.asarray(optax.tree_utils.tree_get(trace, "trace"))
        assert_trees_close((state.rule.slow, state.rule.momentum), (np.tile(phi, (3, 1)), np.tile(-beta * t, (3, 1))))
