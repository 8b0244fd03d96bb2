"""Fragments of the parameters with their own outer steps, and delayed corrections."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import noloco_jax as nj
from noloco_jax.optim.fragments import Fragments
from noloco_jax.optim.outer_step import shared
from noloco_jax.optim.rule import Arrived, Delayed, OuterState
from noloco_jax.optim.schedule import SyncSchedule
from support.compiled_text import collectives_in
from support.layouts import assert_trees_close, mesh_of, state_at_start
from support.oracle import diloco_step
from support.rules import RULES, groups_of

N = 8
SHAPES = {"even": (6, 4), "odd": (3, 5), "scalar": ()}

every_rule = pytest.mark.parametrize("rule", RULES)
every_rule_and_one_fragment = pytest.mark.parametrize(
    ("rule", "count"), [("noloco", 1), *((rule, 4) for rule in RULES)]
)


def tree(seed: int) -> dict[str, np.ndarray]:
    """Return arrays of all replicas: one that four fragments divide evenly and two that they do not."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(N, *shape)).astype(np.float32) for name, shape in SHAPES.items()}


def members(shape: tuple[int, ...], count: int) -> list[np.ndarray]:
    """Return each fragment's mask: stripes of the largest dimension that `count` divides, else runs of the vector."""
    fitting = [dim for dim, size in enumerate(shape) if size % count == 0]
    number = np.zeros(shape, int)
    if fitting:
        dim = max(fitting, key=lambda dim: shape[dim])
        number += np.arange(shape[dim]).reshape([-1 if d == dim else 1 for d in range(len(shape))]) % count
    else:
        length = -(-number.size // count)
        number = (np.arange(number.size) // length).reshape(shape)
    return [number == fragment for fragment in range(count)]


def start() -> Any:
    """Return the state of all replicas in the middle of a run."""
    return state_at_start(N, tree(1), tree(2))


def initial(outer: Any) -> Any:
    """The state of all replicas before the first round."""
    return jax.vmap(outer.init)(tree(0))


@functools.cache
def outer_of(rule: str, **settings: Any) -> Any:
    return RULES[rule].make(N, "replica", **settings)


@functools.cache
def jitted(function: str, rule: str, **settings: Any) -> Any:
    """Return a compiled function of a rule's outer optimizer, for all replicas."""
    return jax.jit(jax.vmap(getattr(outer_of(rule, **settings), function), axis_name="replica"))


@every_rule
def test_an_outer_step_matches_the_oracle_on_its_fragment_and_changes_no_other(rule):
    count = 4
    step = jitted("step", rule, fragments=count)
    state = start()
    for number in range(2 * count + 1):
        theta, before = tree(10 + number), state.rule
        params, state = jax.device_get(step(theta, state))
        for name, shape in SHAPES.items():
            mask = members(shape, count)[number % count]
            slow, momentum = RULES[rule].step(
                theta[name], before.slow[name], before.momentum[name], groups_of(N, number // count, number % count)
            )
            assert_trees_close(params[name], np.where(mask, slow, theta[name]))
            assert_trees_close(state.rule.slow[name], np.where(mask, slow, before.slow[name]))
            assert_trees_close(state.rule.momentum[name], np.where(mask, momentum, before.momentum[name]))


@pytest.mark.parametrize(("size", "count", "run"), [(2048, 8, 8), (768, 8, 4), (64, 2, 4), (32, 2, 2), (24, 3, 1)])
@pytest.mark.parametrize("shape", [(-1, 2), (2, -1)], ids=["in rows", "in columns"])
def test_a_fragment_holds_every_f_th_run_of_neighbours(size, count, run, shape):
    x = np.arange(2 * size, dtype=np.float32).reshape(shape)
    dimension = shape.index(-1)
    fragments = Fragments(count, lambda path, shape: dimension)
    for number in range(count):
        of_fragment = np.arange(size) // run % count == number
        part = fragments.take(x, jnp.int32(number))
        np.testing.assert_array_equal(part, np.compress(of_fragment, x, dimension))
        without = fragments.put(x, jnp.zeros_like(part), jnp.int32(number))
        mask = of_fragment[:, None] if dimension == 0 else of_fragment
        np.testing.assert_array_equal(without, np.where(mask, 0, x))


def test_cutting_a_dimension_that_lies_on_eight_devices_sends_nothing():
    fragments = Fragments(8, lambda path, shape: 0)
    along = jax.NamedSharding(mesh_of(8), jax.P("replica"))
    whole, part = (jax.ShapeDtypeStruct((size, 3), jnp.float32, sharding=along) for size in (768, 96))

    def cut_and_join(x: jax.Array, part: jax.Array, number: Any) -> jax.Array:
        return fragments.put(x, fragments.take(x, number) + part, number)

    lowered = jax.jit(cut_and_join).lower(whole, part, jax.ShapeDtypeStruct((), jnp.int32))
    assert not collectives_in(lowered.compile().as_text() or "", {"replica": 8})


@every_rule
@pytest.mark.parametrize("sync_every", [2, 8], ids=["two a step", "one in two steps"])
def test_update_takes_the_same_outer_steps_on_its_counters_schedule(rule, sync_every):
    count = 4
    step = jitted("step", rule, fragments=count)
    update = jitted("update", rule, sync_every=sync_every, fragments=count)
    params, state = tree(0), start()
    for inner in range(1, 10):
        updates = tree(20 + inner)
        landing, counting = update(updates, state, params)
        expected, after = jax.tree.map(np.add, params, updates), state
        for _ in range(inner * count // sync_every - (inner - 1) * count // sync_every):
            expected, after = step(expected, after)
        assert_trees_close(jax.tree.map(np.add, params, landing), expected)
        assert_trees_close(counting.rule, after.rule)
        np.testing.assert_array_equal(counting.num_outer_steps, inner * count // sync_every)
        params, state = jax.device_get((expected, counting))


@every_rule_and_one_fragment
def test_a_correction_applied_immediately_equals_the_step_without_delay(rule, count):
    step = jitted("step", rule, fragments=count)
    begin, correct = (jitted(name, rule, fragments=count, delay=1) for name in ("step", "apply"))
    state, params = start(), tree(0)
    zeros = jax.tree.map(np.zeros_like, params)
    late_state, late_params = state._replace(delayed=Delayed(state.count, zeros)), params
    for _ in range(count + 1):
        params, state = step(params, state)
        late_params, late_state = correct(*begin(late_params, late_state))
        assert_trees_close(late_params, params, atol=3e-6)
        assert_trees_close(late_state.rule, state.rule, atol=3e-6)


@pytest.mark.parametrize(("rule", "count"), [("noloco", 4), ("corrections", 1), ("diloco", 4), ("nesterov", 1)])
def test_a_correction_is_applied_once_when_correct_is_called_repeatedly(rule, count):
    settings = {"fragments": count, "delay": 1}
    step, correct = (jitted(name, rule, **settings) for name in ("step", "apply"))
    params, state = tree(0), initial(outer_of(rule, **settings))
    for number in range(count + 1):
        once = correct(*step(params, state))
        params, state = correct(*correct(*once))
        jax.tree.map(np.testing.assert_array_equal, (params, state), once)
        np.testing.assert_array_equal(state.delayed.num_applied, number + 1)


@every_rule_and_one_fragment
def test_a_pending_correction_is_applied_before_its_fragments_next_outer_step(rule, count):
    step, correct = (jitted(name, rule, fragments=count, delay=1) for name in ("step", "apply"))
    params, state = tree(0), initial(outer_of(rule, fragments=count, delay=1))
    expected, after = params, state
    for number in range(3 * count):
        params, state = step(params, state)
        if number >= count:
            expected, after = correct(expected, after)
        expected, after = step(expected, after)
        assert_trees_close((params, state), (expected, after), atol=3e-6)
    for _ in range(count):
        params, state = correct(params, state)
        expected, after = correct(expected, after)
    assert_trees_close((params, state), (expected, after), atol=3e-6)
    np.testing.assert_array_equal(state.delayed.num_applied, state.num_outer_steps)


@pytest.mark.parametrize("form", ["step", "step and apply", "local step and apply"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_schedules_use_the_fragments_round_and_corrections_the_round_of_their_step(form, nesterov):
    count, betas, alphas = 2, np.array([0.9, 0.5, 0.2]), np.array([0.3, 0.6, 0.1])
    delay = None if form == "step" else 1
    outer = nj.diloco(
        lambda round: jnp.asarray(betas, jnp.float32)[round],
        lambda round: jnp.asarray(alphas, jnp.float32)[round],
        nesterov,
        fragments=count,
        delay=delay,
    )

    def taken(params: Any, state: OuterState) -> Any:
        if form == "step and apply":
            return outer.apply(*outer.step(params, state))
        if form == "step":
            return outer.step(params, state)
        number = state.num_outer_steps
        params, state, outgoing = outer.local_step(params, state)
        correction = jax.tree.map(lambda m: jax.lax.pmean(m, "replica") - m, outgoing.message)
        return outer.apply(params, state, Arrived(correction), shared(number))

    step = jax.jit(jax.vmap(taken, axis_name="replica"))
    params, state = tree(0), initial(outer)
    slow = {name: x.astype(np.float64) for name, x in params.items()}
    momentum = {name: np.zeros(x.shape) for name, x in params.items()}
    for number in range(3 * count):
        theta, fragment, round = tree(10 + number), number % count, number // count
        params, state = step(theta, state)
        for name, shape in SHAPES.items():
            mask = members(shape, count)[fragment]
            alpha, beta, before = alphas[round], betas[round], (slow[name], momentum[name])
            after = diloco_step(theta[name], *before, alpha=alpha, beta=beta, nesterov=nesterov)
            slow[name], momentum[name] = (np.where(mask, x, y) for x, y in zip(after, before, strict=True))
            assert_trees_close(params[name], np.where(mask, slow[name], theta[name]), atol=3e-6)
    if delay:
        np.testing.assert_array_equal(state.delayed.num_applied, 3 * count)


def test_a_late_correction_has_the_gain_of_its_own_round():
    """Outer step 1 is of round 0, and step 2, taken meanwhile, of round 1."""
    alphas = jnp.array([0.3, 0.9])
    outer = nj.diloco(0.7, lambda round: alphas[round], nesterov=True, fragments=2, delay=1)
    step, apply = (jax.jit(jax.vmap(one, axis_name="replica")) for one in (outer.step, outer.apply))
    params, state = tree(0), initial(outer)
    for number in range(3):
        params, state = step(jax.tree.map(np.add, params, tree(10 + number)), state)
    after, _ = apply(params, state)
    mask = members(SHAPES["even"], 2)[1]
    expected = params["even"] + np.where(mask, 1.3 * np.asarray(state.delayed.correction["even"]), 0)
    assert_trees_close(after["even"], expected, atol=3e-6)


def test_parameters_may_hold_tuples():
    nested = {"pair": (tree(0)["even"], tree(0)["odd"]), "list": [tree(0)["scalar"], ()]}
    outer = nj.noloco(nj.RandomPairing(N), fragments=2)
    leaves, structure = jax.tree.flatten(nested)
    state: Any = jax.vmap(outer.init)(nested)
    flat: Any = jax.vmap(outer.init)(leaves)
    step = jax.jit(jax.vmap(outer.step, axis_name="replica"))
    actual, expected = step(nested, state), step(leaves, flat)
    assert jax.tree.structure(actual[0]) == structure
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(actual), jax.tree.leaves(expected))


@pytest.mark.parametrize("count", [1, 3])
def test_numpy_integers_are_accepted_as_settings(count):
    numpys: Any = (np.int64(5), np.int64(count), np.int64(2))
    assert SyncSchedule(*numpys) == SyncSchedule(5, count, 2)
    nj.noloco(nj.RandomPairing(N), sync_every=numpys[0], fragments=numpys[1], delay=numpys[2])
    with pytest.raises(ValueError, match="sync_every is 0"):
        SyncSchedule(np.int64(0))


@pytest.mark.parametrize("count", [1, 4])
def test_a_delayed_correction_keeps_the_inner_steps_taken_meanwhile(count):
    """Compare `update` with `step` and `correct` called at the steps that the definition names."""
    sync_every, delay = 4, 3
    update = jitted("update", "noloco", sync_every=sync_every, fragments=count, delay=delay)
    step, correct = (jitted(name, "noloco", fragments=count, delay=1) for name in ("step", "apply"))
    params, state = tree(0), initial(outer_of("noloco", fragments=count, delay=1))
    expected, after = params, state
    begun = []
    for inner in range(1, 14):
        updates = tree(20 + inner)
        landing, state = update(updates, state, params)
        params = jax.tree.map(np.add, params, landing)
        expected = jax.tree.map(np.add, expected, updates)
        while begun and begun[0] + delay == inner:
            expected, after = correct(expected, after)
            begun.pop(0)
        if inner % (sync_every // count) == 0:
            expected, after = step(expected, after)
            begun.append(inner)
        assert_trees_close(params, expected, atol=5e-6)
        assert_trees_close(state.rule, after.rule, atol=5e-6)


PAIRINGS = {
    "passes": nj.RandomPairing(N, seed=3),
    "independent": nj.RandomPairing(N, seed=3, order="independent"),
    "hypercube of 256": nj.RandomPairing(256, order="hypercube"),  # a pool of 8, which divides every power of two
    "explicit": nj.ExplicitPairing([[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 3], [1, 2]], [[0, 1], [2], [3]]]),
    "graphs": nj.RandomNeighbours(N, 1, seed=3),
}


@pytest.mark.parametrize("pairing", PAIRINGS.values(), ids=PAIRINGS)
def test_fragments_draw_pairings_of_their_own(pairing):
    """With a cyclic order all fragments met the same partner."""
    draws = {tuple(int(pairing.pool_index(draw, fragment)) for draw in range(16)) for fragment in range(4)}
    assert len(draws) == 4
    traced = jax.jit(pairing.pool_index)(jnp.int32(5), jnp.int32(3))
    assert int(traced) == int(pairing.pool_index(5, 3))


@pytest.mark.parametrize("pairing", [PAIRINGS["hypercube of 256"], PAIRINGS["explicit"]])
def test_fragments_have_different_partners_in_every_round_of_a_fixed_order(pairing):
    for draw in range(8):
        assert len({int(pairing.pool_index(draw, fragment)) for fragment in range(4)}) == 4


@pytest.mark.parametrize("fragment", range(4))
def test_every_pass_of_a_fragment_covers_the_pool(fragment):
    draws = [int(PAIRINGS["passes"].pool_index(draw, fragment)) for draw in range(21)]
    assert all(sorted(draws[start : start + 7]) == list(range(7)) for start in (0, 7, 14))


@pytest.mark.parametrize(("sync_every", "count"), [(1, 1), (10, 1), (10, 8), (2, 8), (5, 8)])
def test_every_fragment_has_one_outer_step_in_every_interval(sync_every, count):
    schedule = SyncSchedule(sync_every, count)
    due = [int(schedule.due(step)) for step in range(1, 61)]
    intervals = [due[a : a + sync_every] for a in range(0, 60, sync_every)]
    assert all(sum(interval) == count for interval in intervals)
    assert all(max(interval) - min(interval) <= 1 for interval in intervals)
    assert schedule.due(0) == schedule.due(-3) == 0
    assert [schedule.total(step) for step in range(61)] == np.cumsum([0, *due]).tolist()
    assert max(due) <= schedule.max_at_once
    traced = jax.jit(schedule.due)(jnp.arange(1, 61))
    assert traced.tolist() == due
