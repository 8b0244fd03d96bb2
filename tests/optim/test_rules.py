"""Properties of every rule on every layout: rows of `support.rules` times rows of `LAYOUTS`."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import noloco_jax as nj
from noloco_jax.optim.outer_step import shared
from noloco_jax.optim.rule import Momentum, OuterState, Rule
from support.layouts import assert_trees_close, axis_of, every_layout, over_replicas, random_tree, state_at_start
from support.oracle import noloco_step
from support.rules import ALPHA, BETA, GAMMA, RULES, groups_of

every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def start(num_replicas: int) -> Any:
    """A state in the middle of a run: replicas with slow weights and momenta of their own."""
    return state_at_start(num_replicas, random_tree(1, num_replicas), random_tree(2, num_replicas))


@every_rule
@every_layout
def test_outer_steps_match_the_oracle_round_by_round(rule, layout):
    """Compare `step`, which counts rounds itself, with numpy, given the groups that the pairing draws each round."""
    outer = rule.make(8, axis_of(layout))
    step = jax.jit(over_replicas(outer.step, layout))
    state = start(8)
    for round in range(4):
        theta = random_tree(10 + round, 8)
        before = state
        params, state = jax.device_get(step(theta, state))
        np.testing.assert_array_equal(state.num_outer_steps, round + 1)
        for name in theta:
            expected = rule.step(theta[name], before.rule.slow[name], before.rule.momentum[name], groups_of(8, round))
            assert_trees_close((state.rule.slow[name], state.rule.momentum[name]), expected)
            np.testing.assert_array_equal(params[name], state.rule.slow[name])


MIXED = [[[3], [0, 5], [1, 6, 2, 4]], [[0, 1, 2], [3, 4, 5, 6]], [[6, 0], [1], [2], [3], [4], [5]]]


@pytest.mark.parametrize(
    ("alpha", "beta", "gamma", "groups", "layout"),
    [
        (0.0, 1.0, 1.0, nj.RandomPairing(4).pool, 4),
        (0.2, 0.0, 0.9, nj.RandomPairing(5, 5).pool, 5),  # one group of all
        (0.5, 0.7, None, nj.RandomPairing(1).pool, 1),  # one replica, alone; γ is β
        (0.5, 0.7, 0.3, MIXED, 7),
        (0.3, 0.5, 1.1, nj.RandomPairing(7, 3, max_pool=3).pool, (7, 1)),  # groups of 3, 3, 1
        (0.5, 0.7, 0.3, nj.RandomPairing(6, 4, max_pool=3).pool, (2, 3)),  # groups of 4, 2
        (0.9, 0.2, 0.1, nj.RandomPairing(9).pool[:3], (3, 3)),  # odd, and several to a device
    ],
)
def test_noloco_is_the_papers_step_for_any_settings_and_groups(alpha, beta, gamma, groups, layout):
    n = sum(map(len, groups[0]))
    outer = nj.noloco(nj.ExplicitPairing(groups), beta, alpha, gamma, axis_name=axis_of(layout))
    step, state = jax.jit(over_replicas(jax.jit(outer.step), layout)), start(n)  # a user's own jit hides no axis
    settings = {"alpha": alpha, "beta": beta, "gamma": beta if gamma is None else gamma}
    for round, its_groups in enumerate(groups):
        theta, before = random_tree(10 + round, n), state.rule
        _, state = jax.device_get(step(theta, state))
        for name, x in theta.items():
            expected = noloco_step(x, before.slow[name], before.momentum[name], groups=its_groups, **settings)
            assert_trees_close((state.rule.slow[name], state.rule.momentum[name]), expected)


def test_nesterov_diloco_is_optax_sgd_on_the_averaged_outer_gradient():
    """Optax keeps t ← g + αt with g = −mean(Δ), and steps by −β(g + αt): the same step, every round, with δ = −βt."""
    step = jax.jit(jax.vmap(nj.diloco(BETA, 0.9, nesterov=True).step, axis_name="replica"))
    sgd = optax.sgd(BETA, momentum=0.9, nesterov=True)
    phi, trace = np.ones(4, np.float32), sgd.init(np.ones(4, np.float32))
    params = np.ones((3, 4), np.float32)
    state = state_at_start(3, params, np.zeros_like(params))
    for r in range(4):
        inner = random_tree(r, 3)["matrix"][:, 0]
        params, state = step(params + inner, state)
        change, trace = sgd.update(-inner.mean(axis=0), trace)
        phi = phi + np.asarray(change)
        t = np.asarray(optax.tree_utils.tree_get(trace, "trace"))
        assert_trees_close((state.rule.slow, state.rule.momentum), (np.tile(phi, (3, 1)), np.tile(-BETA * t, (3, 1))))


@every_rule
def test_sync_takes_the_outer_step_whatever_the_counter(rule):
    outer, every_third = rule.make(8, "replica"), rule.make(8, "replica", sync_every=3)
    step, demanded = (
        jax.jit(jax.vmap(fn, axis_name="replica"))
        for fn in (outer.step, lambda *args: every_third.update(*args, sync=True))
    )
    zeros = jax.tree.map(np.zeros_like, random_tree(0, 8))
    expected = state = start(8)
    for round in range(4):
        theta = random_tree(10 + round, 8)
        params, expected = step(theta, expected)
        updates, state = demanded(zeros, state, theta)
        assert_trees_close(jax.tree.map(np.add, theta, updates), params)
        assert_trees_close(state.rule, expected.rule)
        np.testing.assert_array_equal(state.num_outer_steps, round + 1)


@every_rule
def test_a_solo_step_plus_its_correction_equals_the_step_with_the_mean(rule):
    """The correction, mean − own message, is added here to weights that have moved since the local step."""
    outer = rule.make(8, "replica")
    state, theta = start(8), random_tree(3, 8)

    def both(params: Any, state: OuterState) -> Any:
        together = outer.step(params, state)
        local, after, outgoing = outer.local_step(params, state)
        moved = jax.tree.map(lambda x: x + 1, local)
        arrived = outer.steps.exchanged(outgoing, shared(state.num_outer_steps))
        return together, outer.apply(moved, after, arrived, shared(state.num_outer_steps))

    (params, expected), (late, after) = jax.jit(jax.vmap(both, axis_name="replica"))(theta, state)
    assert_trees_close(jax.tree.map(lambda x: x - 1, late), params, atol=3e-6)
    assert_trees_close(after, expected, atol=3e-6)


@pytest.mark.parametrize("rule", [rule for rule in RULES.values() if rule.bitwise])
@every_layout
def test_members_of_a_group_end_bitwise_equal_if_the_rule_promises_it(rule, layout):
    outer = rule.make(8, axis_of(layout))
    same = jax.tree.map(lambda x: np.broadcast_to(x[:1], x.shape), start(8).rule)  # as after a round
    params, state = jax.jit(over_replicas(outer.step, layout))(random_tree(3, 8), start(8)._replace(rule=same))
    for x in jax.tree.leaves((params, state.rule)):
        np.testing.assert_array_equal(np.asarray(x), np.broadcast_to(x[:1], x.shape))


@every_rule
def test_equal_replicas_stay_bitwise_equal(rule):
    outer = rule.make(8, "replica")
    theta = jax.tree.map(lambda x: np.broadcast_to(x[:1], x.shape), random_tree(3, 8))
    params = jax.tree.map(lambda x: np.broadcast_to(x[:1], x.shape), random_tree(4, 8))
    step = jax.jit(jax.vmap(outer.step, axis_name="replica"))
    state = jax.vmap(outer.init)(params)
    for _ in range(3):
        theta, state = step(theta, state)
        for x in jax.tree.leaves((theta, state.rule)):
            np.testing.assert_array_equal(np.asarray(x), np.broadcast_to(x[:1], x.shape))


def drift(outer: Any, rounds: int, by: float = 1e-3) -> float:
    """Return the mean distance that weights near 1 move when inner steps push them equally in every round."""
    size, n = 2048, 2
    start = 1 + 1e-2 * np.random.default_rng(0).random(size, np.float32)  # equal weights are rounded alike
    params = {"w": jnp.broadcast_to(start[None], (n, size))}
    state = jax.vmap(outer.init)(params)

    def push(params, state):
        return outer.step(jax.tree.map(lambda x: x + by, params), state)

    push = jax.jit(jax.vmap(push, axis_name="replica"))
    for _ in range(rounds):
        params, state = push(params, state)
    return float((params["w"] - start[None]).mean())


@pytest.mark.parametrize("wire", ["bfloat16", "int4"])
def test_a_drift_below_the_wires_resolution_still_accumulates(wire):
    """Messages hold γφ, near one: rounding them, rather than their difference, froze weights."""
    noloco = RULES["noloco"]
    coded = drift(noloco.make(2, "replica", wire=wire), rounds=200)
    assert coded == pytest.approx(drift(noloco.make(2, "replica"), rounds=200), rel=1e-4)
    assert coded > 0.2


@every_rule
def test_learning_rate_and_momentum_may_be_schedules_over_rounds(rule):
    """A schedule that gives the table's numbers in round 1 alone."""

    def only_then(value):
        return lambda round: jnp.where(round == 1, value, 0.125)

    noloco = partial(nj.noloco, nj.RandomPairing(8, seed=5), only_then(BETA), only_then(ALPHA), only_then(GAMMA))
    scheduled = {
        "noloco": noloco,
        "corrections": lambda: noloco(momentum_of="corrections"),
        "diloco": lambda: nj.diloco(only_then(BETA), only_then(ALPHA), nesterov=False),
        "nesterov": lambda: nj.diloco(only_then(BETA), only_then(ALPHA), nesterov=True),
    }
    name = next(name for name, row in RULES.items() if row is rule)
    state = start(8)._replace(num_outer_steps=np.ones(8, np.int32))
    theta = random_tree(3, 8)
    expected = jax.jit(jax.vmap(rule.make(8, "replica").step, axis_name="replica"))(theta, state)
    actual = jax.jit(jax.vmap(scheduled[name]().step, axis_name="replica"))(theta, state)
    assert_trees_close(actual, expected)
    apart = start(8)
    other = jax.jit(jax.vmap(scheduled[name]().step, axis_name="replica"))(theta, apart)
    assert not np.allclose(other[0]["matrix"], expected[0]["matrix"])


def test_movement_is_that_of_the_message_at_the_outer_rate():
    """Windows of a modulo format follow it."""
    rng = np.random.default_rng(0)
    slow, momentum, theta = rng.normal(size=(3, 5))
    rule = Rule(0.3, optax.piecewise_constant_schedule(1.5, {1: 2.0}), 1.0)
    found = rule.movement(Momentum(slow, momentum), theta, 2)
    np.testing.assert_allclose(found, np.sqrt((3.0 * (theta - slow)) ** 2 + momentum**2), rtol=1e-6)
