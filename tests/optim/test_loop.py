"""The outer optimizers as Optax transforms in a user's own loop: schedule, landing, dtypes, buffers, imports."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import noloco_jax as nj
from noloco_jax.optim.rule import Momentum, OuterState
from support.layouts import assert_trees_close, axis_of, mesh_of, over_replicas, random_tree, unconditional

N = 4


def noloco(sync_every, axis_name="replica", **settings):
    pairing = nj.ExplicitPairing(nj.RandomPairing(N).pool)
    return nj.noloco(pairing, sync_every=sync_every, axis_name=axis_name, **settings)


def diloco(sync_every, axis_name="replica", **settings):
    return nj.diloco(sync_every=sync_every, axis_name=axis_name, **settings)


both = pytest.mark.parametrize("make", [noloco, diloco])


@both
def test_updates_pass_through_unchanged_between_outer_steps(make):
    tx, params = make(3), random_tree(0, N)
    update = jax.jit(jax.vmap(tx.update, axis_name="replica"))
    state: Any = jax.vmap(tx.init)(params)
    for step in range(1, 8):
        updates, state = update(random_tree(step, N), state, params)
        unchanged = jax.tree.map(np.array_equal, random_tree(step, N), updates)
        assert all(unchanged.values()) == (step % 3 != 0)
        np.testing.assert_array_equal(state.count, step)


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
    assert (params["w"].dtype, state[-1].rule.slow["w"].dtype) == (narrow, jnp.float32)
    least = float(jnp.finfo(narrow).tiny)  # what is smaller counts as zero
    slow = state[-1].rule.slow["w"].astype(narrow)
    np.testing.assert_allclose(params["w"].astype(float), slow.astype(float), rtol=0, atol=least)
    np.testing.assert_array_equal(params["w"], jnp.broadcast_to(params["w"][:1], params["w"].shape))


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
