"""The outer optimizers as Optax transforms in a user's own loop: schedule, landing, dtypes, buffers, imports."""

import functools
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import noloco_jax as nj
from noloco_jax.outer.rule import Momentum, OuterState
from support.layouts import assert_trees_close, axis_of, compiled, mesh_of, over_replicas, random_tree, unconditional
from support.paths import ROOT

N = 4


def noloco(sync_every, axis_name="replica", **settings):
    pairing = nj.ExplicitPairing(nj.RandomPairing(N).pool)
    return nj.noloco(pairing, sync_every=sync_every, axis_name=axis_name, **settings)


def diloco(sync_every, axis_name="replica", **settings):
    return nj.diloco(sync_every=sync_every, axis_name=axis_name, **settings)


both = pytest.mark.parametrize("make", [noloco, diloco])


@functools.cache
def trajectory(make, static=False, dtype=np.float32, **settings) -> list[Any]:
    """Return (step, inner update, returned update, params, state) of 7 steps of N replicas; 3 and 6 are outer."""
    tx = make(3, **settings)

    @functools.partial(jax.jit, static_argnames="sync")
    def update(updates, state, params, sync):
        updates, state = jax.vmap(functools.partial(tx.update, sync=sync), axis_name="replica")(updates, state, params)
        return updates, optax.apply_updates(params, updates), state

    def tree(seed):
        return jax.tree.map(lambda x: x.astype(dtype), random_tree(seed, N))

    params = tree(0)
    state = jax.jit(jax.vmap(tx.init))(params)
    result = []
    for step in range(1, 8):
        sync = step % 3 == 0 if static else None
        updates, params, state = jax.device_get(update(tree(step), state, params, sync))
        result.append((step, tree(step), updates, params, state))
    return result


@both
def test_updates_pass_through_unchanged_between_outer_steps(make):
    for step, inner, updates, _, state in trajectory(make):
        unchanged = jax.tree.map(np.array_equal, inner, updates)
        assert all(unchanged.values()) == (step % 3 != 0)
        np.testing.assert_array_equal(state.count, step)


@both
def test_an_outer_step_reaches_the_slow_weights_within_one_rounding(make):
    before = random_tree(0, N)
    for step, _, _, params, state in trajectory(make):
        for name, slow in state.rule.slow.items() if step % 3 == 0 else ():
            # φ − p rounds, and so does p + (φ − p).
            bound = np.spacing(np.maximum(np.abs(slow), np.abs(slow - before[name])))
            assert (np.abs(params[name] - slow) <= bound).all()
        before = params


@both
def test_counter_driven_and_static_sync_give_the_same_trajectory(make):
    for (*_, params, state), (*_, static_params, static_state) in zip(
        trajectory(make), trajectory(make, static=True), strict=True
    ):
        assert_trees_close((params, state), (static_params, static_state))


@both
def test_a_bfloat16_state_keeps_its_dtype_and_stays_near_float32(make):
    near = {"rtol": 0.03, "atol": 0.03}  # a bfloat16 holds 8 bits, of values up to about 4
    rounded = trajectory(make, static=True, state_dtype=jnp.bfloat16)
    for (*_, params, state), (*_, rounded_params, rounded_state) in zip(trajectory(make), rounded, strict=True):
        outer = (rounded_state.rule.slow, rounded_state.rule.momentum)
        assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(outer))
        assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(rounded_params))
        assert_trees_close(jax.tree.map(np.float32, outer), (state.rule.slow, state.rule.momentum), **near)
        assert_trees_close(rounded_params, params, **near)


@both
def test_bfloat16_parameters_keep_their_dtype_beside_float32_slow_weights(make):
    for _, _, _, params, state in trajectory(make, dtype=jnp.bfloat16):
        assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(params))
        assert all(x.dtype == jnp.float32 for x in jax.tree.leaves((state.rule.slow, state.rule.momentum)))


@both
def test_bfloat16_updates_reach_float32_slow_weights_within_one_rounding(make):
    """Rounded to bfloat16, φ − θ would leave replicas apart that DiLoCo makes equal."""
    params, tx = random_tree(0, N), make(1)
    inner = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), random_tree(1, N))
    update = jax.jit(jax.vmap(tx.update, axis_name="replica"))
    updates, state = update(inner, jax.vmap(tx.init)(random_tree(2, N)), params)
    landed = jax.device_get(optax.apply_updates(params, updates))
    for name, slow in jax.device_get(state.rule.slow).items():
        bound = np.spacing(np.maximum(np.abs(slow), np.abs(slow - params[name])))
        assert (np.abs(landed[name] - slow) <= bound).all()


@pytest.mark.parametrize("narrow", [jnp.bfloat16, jnp.float16])
def test_half_precision_weights_and_gradients_of_any_size_leave_replicas_equal(narrow):
    """An update of 16 bits could not move a small weight to its φ."""
    rng = np.random.default_rng(0)
    params: Any = {"w": jnp.broadcast_to(jnp.asarray(0.02 * rng.normal(size=1000), narrow), (N, 1000))}
    tx = optax.chain(optax.sgd(0.1), nj.diloco(0.7, 0.9, sync_every=2))
    state: Any = jax.vmap(tx.init)(params)
    update = jax.jit(jax.vmap(tx.update, axis_name="replica"))
    for _ in range(2):
        updates, state = update({"w": jnp.asarray(0.1 * rng.normal(size=(N, 1000)), narrow)}, state, params)
        params = jax.tree.map(jnp.asarray, optax.apply_updates(params, updates))
    assert params["w"].dtype == narrow
    least = float(jnp.finfo(narrow).tiny)  # what is smaller counts as zero
    slow = state[-1].rule.slow["w"].astype(narrow)
    np.testing.assert_allclose(params["w"].astype(float), slow.astype(float), rtol=0, atol=least)
    np.testing.assert_array_equal(params["w"], jnp.broadcast_to(params["w"][:1], params["w"].shape))


@pytest.mark.parametrize("narrow", [jnp.bfloat16, jnp.float16])
def test_half_precision_parameters_land_exactly_on_the_rounded_slow_weights(narrow):
    """Between φ / 2 and 2 φ, subtracting a rounded φ is exact."""
    params = {"w": jnp.asarray(np.random.default_rng(0).uniform(1, 1.9, size=(N, 1000)), narrow)}
    tx = diloco(1)
    state = jax.vmap(tx.init)(jax.tree.map(lambda x: jnp.broadcast_to(x[:1], x.shape), params))
    updates, state = jax.jit(jax.vmap(tx.update, axis_name="replica"))(
        jax.tree.map(jnp.zeros_like, params), state, params
    )
    landed = optax.apply_updates(params, updates)
    for x, slow in zip(jax.tree.leaves(landed), jax.tree.leaves(state.rule.slow), strict=True):
        assert x.dtype == narrow
        np.testing.assert_array_equal(np.asarray(x), np.asarray(slow.astype(narrow)))


@both
@pytest.mark.parametrize(("layout", "counter_axis"), [(N, 0), (N, None), ((2, 2), 0)])
def test_an_outer_step_is_a_conditional_under_vmap(make, layout, counter_axis):
    """Steps between outer steps only count: no floating-point work, no messages."""
    tx = make(3, axis_of(layout))
    params = random_tree(0, N)
    state_axes = OuterState(count=counter_axis, num_outer_steps=counter_axis, rule=Momentum(slow=0, momentum=0))
    state = jax.vmap(tx.init, out_axes=state_axes)(params)
    if layout == N:
        update = jax.vmap(tx.update, in_axes=(0, state_axes, 0), out_axes=(0, state_axes), axis_name="replica")
    else:
        update = over_replicas(tx.update, layout)
    ran: list[Any] = list(unconditional(jax.make_jaxpr(update)(params, state, params).jaxpr))
    conditionals = [eqn for eqn in ran if eqn.primitive.name == "cond"]
    assert len(conditionals) == 1
    assert conditionals[0].invars[0].aval.shape == ()
    calls = {"cond", "jit", "pjit", "shard_map"}
    work = [e for e in ran if e.primitive.name not in calls and any(v.aval.dtype == jnp.float32 for v in e.outvars)]
    assert not work
    if layout == N:
        assert " conditional(" in compiled(update, params, state, params)


@both
def test_init_does_not_alias_the_parameters(make):
    tx = make(1)
    init = jax.vmap(tx.init)
    update = jax.jit(jax.vmap(tx.update, axis_name="replica"))
    start = random_tree(0, N)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state):
        updates, state = update(params, state, params)
        return optax.apply_updates(params, updates), state

    eager = jax.tree.map(jnp.asarray, start)
    jitted = jax.tree.map(jnp.asarray, start)
    together = jax.jit(lambda: (jax.tree.map(jnp.asarray, start), init(jax.tree.map(jnp.asarray, start))))
    for params, state in ((eager, init(eager)), (jitted, jax.jit(init)(jitted)), together()):
        first = step(params, state)
        assert all(x.is_deleted() for x in jax.tree.leaves((params, state)))
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(step(*first)))


@pytest.mark.parametrize("settings", [{}, {"delay": 1}, {"wire": "modulo4", "fragments": 2}], ids=str)
def test_no_two_arrays_of_a_fresh_state_share_a_buffer(settings):
    """Or a program that it is donated to would refuse it."""
    params = {"w": jnp.ones((64, 64)), "b": jnp.zeros(64)}
    leaves = jax.tree.leaves((params, noloco(2, **settings).init(params)))
    assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves)


def loss_fn(params, x, y):
    return jnp.mean((x @ params["w"] - y) ** 2)


def train_step_of(tx):
    def train_step(params, state, x, y) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return train_step


def batch(step):
    rng = np.random.default_rng(step)
    x = rng.normal(size=(N, 16, 8)).astype(np.float32)
    return x, x.sum(axis=-1)


@both
def test_a_plain_optax_loop_gives_equal_results_under_shard_map_and_vmap(make):
    """Cover a shared and a per-device counter, and a state initialized inside and outside the program.

    `shard_map` checks varying types here.
    """
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2), make(2))
    train_step = train_step_of(tx)
    params = {"w": jnp.zeros((N, 8))}
    state = jax.vmap(tx.init)(params)
    virtual = jax.jit(jax.vmap(train_step, axis_name="replica"))
    own_counter = jax.jit(over_replicas(train_step, (N, 1)))

    def whole_run(params, x, y):
        params = jax.tree.map(lambda x: x[0], params)
        start: Any = (params, tx.init(params))
        batches = (x[:, 0], y[:, 0])

        def body(carry, xy):
            return train_step(carry[0], carry[1], xy[0], xy[1])[:2], None

        (params, state), _ = jax.lax.scan(body, start, batches)
        return jax.tree.map(lambda x: x[None], params), state[-1].count

    specs = {"in_specs": (P("replica"), P(None, "replica"), P(None, "replica")), "out_specs": (P("replica"), P())}
    x, y = (np.stack(arrays) for arrays in zip(*map(batch, range(4)), strict=True))
    from_inside, count = jax.jit(jax.shard_map(whole_run, mesh=mesh_of(N), **specs))(params, x, y)

    here, there = (params, state), (params, state)
    for step in range(4):
        *here, _ = virtual(*here, *batch(step))
        *there, _ = own_counter(*there, *batch(step))
        assert_trees_close(there, here)
    assert_trees_close(from_inside, here[0])
    assert count == 4


def test_replicas_of_a_plain_optax_loop_learn_and_agree():
    """The loop of the documentation."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-2), nj.noloco(nj.RandomPairing(N), sync_every=10))
    train_step = jax.jit(jax.vmap(train_step_of(tx), axis_name="replica"))
    params = {"w": jnp.zeros((N, 8))}
    state = jax.vmap(tx.init)(params)
    losses = []
    for step in range(100):
        params, state, loss = train_step(params, state, *batch(step))
        losses.append(np.mean(loss))
    assert losses[-1] < losses[0] / 100
    assert np.std(params["w"], axis=0).max() < 0.05


def test_importing_the_package_imports_nothing_beyond_jax_and_optax():
    program = """
import sys, jax, optax
before = {name.partition(".")[0] for name in sys.modules}
import noloco_jax
print(*{name.partition(".")[0] for name in sys.modules} - before)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert {name for name in result.stdout.split() if name not in sys.stdlib_module_names} == {"noloco_jax"}
