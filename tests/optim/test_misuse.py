"""Unusual but legitimate code of an outside user: it does the right thing, or says what is wrong."""

import copy
import functools
import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import noloco_jax as nj
from support.compiled_text import collectives_in
from support.layouts import assert_trees_close, has_branch, mesh_of, random_tree, some_devices

N = 4


def noloco(**settings: Any) -> Any:
    every_step: dict[str, Any] = {"sync_every": 1}
    return nj.noloco(nj.RandomPairing(N), **every_step | settings)


def vmapped(tx: Any, **arguments: Any) -> Any:
    return jax.jit(jax.vmap(lambda *args: tx.update(*args, **arguments), axis_name="replica"))


def test_sync_accepts_numpy_booleans():
    tx, params = noloco(), random_tree(0, N)
    state = jax.vmap(tx.init)(params)
    updates = random_tree(1, N)
    for numpys, pythons in ((np.False_, False), (np.True_, True)):
        steps = (vmapped(tx, sync=sync)(updates, state, params) for sync in (numpys, pythons))
        assert_trees_close(*steps)
    passed, _ = vmapped(tx, sync=np.False_)(updates, state, params)
    assert_trees_close(passed, updates, atol=0, rtol=0)


@pytest.mark.parametrize("sync", [None, False, True])
def test_parameters_that_shard_map_replicates_are_refused(sync):
    """Given in_specs=P(), jax.grad sums their gradients over the replicas: an all-reduce at every step."""
    tx = noloco()
    params = {"w": np.ones(3, np.float32)}

    def train_step(params, state, x):
        state, x = jax.tree.map(lambda x: x[0], (state, x))
        grads = jax.grad(lambda p: jnp.sum(p["w"] * x))(params)
        updates, state = tx.update(grads, state, params, sync=sync)
        return jax.tree.map(lambda x: x[None], (optax.apply_updates(params, updates), state))

    specs = (P(), P("replica"), P("replica"))
    step = jax.shard_map(train_step, mesh=mesh_of(N), in_specs=specs, out_specs=P("replica"))
    state = jax.vmap(tx.init)(jax.tree.map(lambda x: np.stack([x] * N), params))
    with pytest.raises(ValueError, match=r"\['w'\] is the same on all devices of axis 'replica'.*in_specs=P"):
        jax.eval_shape(step, params, state, np.ones((N, 3), np.float32))


def test_virtual_replicas_sharded_over_devices_warn_and_recommend_shard_map():
    outer = noloco()
    everywhere = NamedSharding(mesh_of(N), P("replica"))
    params = jax.tree.map(jnp.asarray, random_tree(0, N))
    state = jax.vmap(outer.init)(params)
    step = jax.jit(jax.vmap(outer.step, axis_name="replica"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step.lower(params, state).compile()
    apart = jax.device_put((params, state), everywhere)
    with pytest.warns(UserWarning, match="lie on 4 devices, and every outer step gathers all weights.*shard_map"):
        hlo = step.lower(*apart).compile().as_text() or ""
    assert "all-gather" in {one.kind for one in collectives_in(hlo, {"replica": N})}  # the gather that it reports


def test_replicas_may_span_several_axes_or_a_tuple_of_one_axis():
    params = random_tree(0, N)
    state = jax.vmap(noloco().init)(params)._replace(rule=jax.vmap(noloco().init)(random_tree(1, N)).rule)
    expected = jax.jit(jax.vmap(noloco().step, axis_name="replica"))(params, state)
    step = noloco(axis_name=("replica",)).step
    assert_trees_close(jax.jit(jax.vmap(step, axis_name="replica"))(params, state), expected)

    def block(params, state):
        params, state = jax.tree.map(lambda x: x[0], (params, state))
        return jax.tree.map(lambda x: x[None], noloco(axis_name=("host", "gpu")).step(params, state))

    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("host", "gpu"), auto, devices=some_devices(N))
    mapped = jax.shard_map(block, mesh=mesh, in_specs=P(("host", "gpu")), out_specs=P(("host", "gpu")))
    assert_trees_close(jax.jit(mapped)(params, state), expected)


@pytest.mark.parametrize("other", [{"wire": "modulo4"}, {"delay": 1}], ids=["modulo4", "delay"])
@pytest.mark.parametrize("was_made_with", [True, False])
def test_a_state_of_other_settings_is_refused(other, was_made_with):
    made, used = (noloco(**other), noloco()) if was_made_with else (noloco(), noloco(**other))
    params = random_tree(0, N)
    state = jax.vmap(made.init)(params)
    for step in (vmapped(used), jax.vmap(lambda updates, *args: used.step(*reversed(args)), axis_name="replica")):
        with pytest.raises(ValueError, match=r"the state was made .* other settings"):
            step(params, state, params)


def test_a_state_of_parameters_of_other_shapes_is_refused():
    """Also where NumPy's rules would stretch it: the slow weights of one row would pull all rows to it."""
    made, used = {"w": np.zeros((N, 1, 3), np.float32)}, {"w": np.zeros((N, 4, 3), np.float32)}
    state = jax.eval_shape(jax.vmap(noloco().init), made)
    for step in (noloco().step, lambda params, state: noloco().update(params, state, params)):
        with pytest.raises(ValueError, match="the state was made for other parameters"):
            jax.eval_shape(jax.vmap(step, axis_name="replica"), used, state)


@pytest.mark.parametrize("settings", [{}, {"wire": "modulo4", "fragments": 2}])
def test_a_state_made_inside_shard_map_serves_as_one_made_outside(settings):
    outer, specs = noloco(**settings), {"mesh": mesh_of(N), "in_specs": P("replica"), "out_specs": P("replica")}
    one, two = random_tree(0, N), random_tree(1, N)

    def steps(params, updates, state):
        def step(_, carry):
            return outer.update(*carry, params)

        return jax.lax.fori_loop(0, 2, step, (updates, state))[0]

    @jax.jit
    @partial(jax.shard_map, **specs)
    def inside(params, updates):
        return steps(params, updates, outer.init(params))

    expected = jax.jit(jax.vmap(steps, axis_name="replica"))(one, two, jax.vmap(outer.init)(one))
    batched = jax.tree.map(lambda x: x[:, None], (one, two))
    assert_trees_close(jax.tree.map(lambda x: x[:, 0], inside(*batched)), expected)


@pytest.mark.parametrize("make", [noloco, nj.diloco])
def test_a_numpy_number_leaves_the_states_dtypes(make):
    outer = make(outer_lr=np.float64(0.7), outer_momentum=np.float64(0.5))
    params = jnp.ones((N, 3), jnp.float32)
    state = jax.eval_shape(jax.vmap(outer.init), params)
    _, after = jax.eval_shape(jax.vmap(outer.step, axis_name="replica"), params, state)
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, state)


def test_accumulation_and_skipping_may_wrap_the_inner_optimizer_alone():
    accumulated = optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()
    tx = optax.chain(optax.apply_if_finite(accumulated, 3), optax.chain(optax.identity(), noloco(sync_every=4)))
    params = random_tree(0, N)
    state = jax.vmap(tx.init)(params)
    for step in range(4):
        gradients = random_tree(step, N)
        if step == 0:
            gradients["scalar"][1] = np.nan  # one replica skips this step; the outer counter still counts it
        updates, state = vmapped(tx)(gradients, state, params)
        params = optax.apply_updates(params, updates)
    outer_state: Any = state
    np.testing.assert_array_equal(outer_state[1][1].num_outer_steps, 1)


PARTS: dict[str, Any] = {
    "partition": lambda tx: optax.partition({"on": tx, "off": optax.set_to_zero()}, {"matrix": "on", "scalar": "off"}),
    "selective_transform": lambda tx: optax.selective_transform(tx, freeze_mask={"matrix": False, "scalar": True}),
    "masked": lambda tx: optax.masked(tx, {"matrix": True, "scalar": False}),
}


@pytest.mark.parametrize("wrap", PARTS.values(), ids=PARTS)
def test_outer_steps_may_cover_a_subset_of_the_parameters(wrap):
    whole, params, inner = noloco(fragments=2), random_tree(0, N), random_tree(1, N)
    tx, only = wrap(whole), {"matrix": params["matrix"]}
    updates, _ = vmapped(tx)(inner, jax.vmap(tx.init)(params), params)
    expected, _ = vmapped(whole)({"matrix": inner["matrix"]}, jax.vmap(whole.init)(only), only)
    assert_trees_close(updates["matrix"], expected["matrix"])


def test_hyperparameters_may_be_injected_and_leave_outer_steps_conditional():
    rate = optax.linear_schedule(0.3, 0.1, 10)  # 0.28 at the second step
    injected = optax.inject_hyperparams(nj.noloco)(nj.RandomPairing(N), outer_lr=rate, consensus=0.2, sync_every=2)
    plain, params, inner = noloco(outer_lr=0.28, consensus=0.2, sync_every=2), random_tree(0, N), random_tree(1, N)
    state: Any = jax.vmap(injected.init)(params)
    before, update = jax.vmap(plain.init)(params), jax.vmap(injected.update, axis_name="replica")
    assert has_branch(update, inner, state, params)
    for _ in range(2):
        updates, state = jax.jit(update)(inner, state, params)
        expected, before = vmapped(plain)(inner, before, params)
        assert_trees_close(updates, expected)
    np.testing.assert_allclose(state.hyperparams["outer_lr"], 0.28, rtol=1e-6)


MAKERS: dict[str, Any] = {
    "noloco": noloco,
    "late fragments": lambda **settings: noloco(fragments=2, delay=1, **settings),
    "diloco": nj.diloco,
    "epidemic": lambda **settings: nj.epidemic(nj.RandomNeighbours(N), **settings),
    "sparseloco": nj.sparseloco,
}


@pytest.mark.parametrize("name", ["late fragments", "diloco", "epidemic"])
def test_eager_steps_on_numpy_arrays_equal_jitted_steps(name):
    """Each operation on an array of another shape is compiled: a scalar too where fragments cut it differently."""
    tx, params = MAKERS[name](sync_every=1), random_tree(0, N)
    if name != "late fragments":
        del params["scalar"]
    state, moved = jax.vmap(tx.init)(params), jax.tree.map(lambda x: 1.25 * x, params)
    here = jax.vmap(tx.step, axis_name="replica")(moved, state)
    assert_trees_close(here, jax.jit(jax.vmap(tx.step, axis_name="replica"))(moved, state))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copied_transform_takes_the_same_outer_steps(copied):
    tx, params = noloco(fragments=2, sync_every=2), random_tree(0, N)
    other, state = copied(tx), jax.vmap(tx.init)(params)
    assert type(other) is type(tx) and other.steps.rule == tx.steps.rule
    shapes = [jax.make_jaxpr(jax.vmap(one.step, axis_name="replica"))(params, state) for one in (tx, other)]
    assert str(shapes[0]) == str(shapes[1])


@pytest.mark.parametrize("name", ["noloco", "diloco", "sparseloco", "epidemic"])
def test_a_step_without_an_axis_of_replicas_says_where_it_runs(name):
    """The commonest mistake, of which JAX says "unbound axis name: replica"."""
    outer, params = MAKERS[name](), {"w": jnp.ones(8)}
    with pytest.raises(NameError, match=r"'replica'.*runs inside jax.vmap.*or jax.shard_map.*or pass axis_name="):
        outer.step(params, outer.init(params))
    with pytest.raises(NameError, match="'replica'"):
        outer.update(params, outer.init(params), params)


def test_a_pairing_that_never_mixes_all_replicas_warns_with_the_separate_groups():
    with pytest.warns(UserWarning, match=r"never mixes all replicas: \[0, 1\] and \[2, 3\] meet in none"):
        nj.noloco(nj.ExplicitPairing([[[0, 1], [2, 3]], [[0], [1], [3, 2]]]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nj.noloco(nj.ExplicitPairing([[[0, 1], [2, 3]], [[0], [1, 2], [3]]]))


def test_seeds_may_be_batched_around_the_replicas():
    """All seeds share one counter, so that outer steps stay conditional."""
    tx = noloco(sync_every=2)
    seeds = [random_tree(seed, N) for seed in range(3)]
    stacked = jax.tree.map(lambda *x: np.stack(x), *seeds)
    update = jax.vmap(jax.vmap(tx.update, axis_name="replica"))
    state = jax.vmap(jax.vmap(tx.init))(stacked)
    assert has_branch(update, stacked, state, stacked)
    updates, state = jax.jit(update)(stacked, state, stacked)
    updates, _ = jax.jit(update)(updates, state, stacked)
    for seed, tree in enumerate(seeds):
        own, own_state = vmapped(tx)(tree, jax.vmap(tx.init)(tree), tree)
        own, _ = vmapped(tx)(own, own_state, tree)
        assert_trees_close(jax.tree.map(lambda x, seed=seed: x[seed], updates), own)


@pytest.mark.parametrize("wire", ["int8", "modulo4", "sparse"])
def test_arrays_without_elements_pass_through_an_outer_step(wire):
    tx = nj.sparseloco(sync_every=1) if wire == "sparse" else nj.noloco(nj.RandomPairing(2), wire=wire)
    params = {"empty": jnp.zeros((2, 3, 0)), "w": jnp.arange(16.0).reshape(2, 8)}
    state: Any = jax.jit(jax.vmap(tx.init))(params)
    after: Any = jax.jit(jax.vmap(tx.step, axis_name="replica"))(params, state)[0]
    assert after["empty"].shape == (2, 3, 0) and np.isfinite(after["w"]).all()


def shapes(make: Any, method: str, *leading: Any, axis_name: str = "replica", **arguments: Any) -> Any:
    """Trace a method of a transform, of (params, state), for virtual replicas."""
    params = random_tree(0, N)
    state = jax.eval_shape(jax.vmap(make.init), params)
    call = functools.partial(getattr(make, method), *leading, **arguments)
    return jax.eval_shape(jax.vmap(call, axis_name=axis_name), params, state)


def injected(make: Any, *args: Any, static_args: Any = (), **settings: Any) -> Any:
    """Trace an update of a transform whose settings are traced."""
    tx: Any = optax.inject_hyperparams(make, static_args=static_args)(*args, **settings)
    params = random_tree(0, N)
    return jax.eval_shape(vmapped(tx), params, jax.eval_shape(jax.vmap(tx.init), params), params)


def traced_sync() -> Any:
    tx, params = noloco(), random_tree(0, N)
    step = jax.vmap(lambda sync: tx.update(params, tx.init(params), params, sync=sync), axis_name="replica")
    return jax.eval_shape(step, jnp.ones(N, bool))


def on_axes(names: tuple[str, ...], mesh: Any, spec: P, slots: bool) -> Any:
    """Trace a step of replicas on axes of a mesh, with slots of a device or without."""
    outer, params = nj.noloco(nj.RandomPairing(8), axis_name=names), jnp.ones((8, 2))

    def one(params, state):
        return jax.tree.map(lambda x: x[None], outer.step(*jax.tree.map(lambda x: x[0], (params, state))))

    block = jax.vmap(outer.step, axis_name="slot") if slots else one
    mapped = jax.shard_map(block, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=not slots)
    return jax.eval_shape(mapped, params, jax.eval_shape(jax.vmap(outer.init), params))


def grid() -> Any:
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def leaf(value: Any) -> list[Any]:
    """Initialise and step with a parameter that has no mean."""
    params = {"a": np.zeros(2, np.float32), "w": value}
    return [lambda: noloco().init(params), lambda: noloco().step(params, None)]


untyped: Any = nj
PAIRS, GRAPHS = nj.RandomPairing(4), nj.RandomNeighbours(4)
REFUSED: list[tuple[Any, type[Exception], str]] = [
    # parameters
    (leaf(np.zeros(2, np.int32)), TypeError, r"\['w'\] is of int32 and has no mean over replicas.*optax.masked"),
    (leaf(np.zeros(2, bool)), TypeError, r"\['w'\] is of bool and has no mean"),
    (leaf(0.5), TypeError, r"\['w'\] is a Python float: give an array, such as jnp.asarray\(0.5\)"),
    (leaf(jax.random.key(0)), TypeError, r"\['w'\] is a PRNG key and has no mean over replicas: keep it out"),
    (leaf(np.zeros(2)), TypeError, r"\['w'\] is of float64 and outer steps compute in float32: convert it"),
    (leaf(np.zeros(2, np.complex64)), TypeError, r"\['w'\] is of complex64 and outer steps compute in float32"),
    # calls
    (traced_sync, TypeError, "sync is traced: give True or False, for two programs, or None"),
    (lambda: shapes(noloco(), "apply"), ValueError, "no stored correction without a delay"),
    (lambda: noloco().update({}, noloco().init({})), ValueError, "needs the parameters"),
    (lambda: nj.diloco().update({}, nj.diloco().init({})), ValueError, "needs the parameters"),
    # axes: JAX numbers the devices of a tuple of axes in the mesh's order, whatever the tuple's
    (
        lambda: on_axes(("slot", "replica"), mesh_of(2), P("replica"), slots=True),
        ValueError,
        "on axes of a mesh and then on at most one vmap axis, and here 'slot'",
    ),
    (
        lambda: on_axes(("y", "x"), grid(), P(("y", "x")), slots=False),
        ValueError,
        r"another order than the mesh.*give \('x', 'y'\)",
    ),
    (lambda: shapes(nj.epidemic(nj.RandomNeighbours(8)), "step"), ValueError, "of 8 replicas, axis 'replica' holds 4"),
    # traced settings
    (lambda: injected(nj.diloco, sync_every=2.5), TypeError, "it must be an integer"),
    (lambda: injected(nj.diloco, sync_every=lambda step: 1.0 + 0 * step), TypeError, "it must be an integer"),
    (lambda: injected(nj.noloco, PAIRS, fragments=2, sync_every=2), TypeError, "fragments is traced.* static_args"),
    (lambda: injected(nj.noloco, PAIRS, delay=1, sync_every=2), TypeError, "delay is traced.* static_args"),
    (
        lambda: injected(nj.noloco, PAIRS, delay=1, sync_every=2, static_args="delay"),
        TypeError,
        "sync_every is traced.* static_args",
    ),
    (lambda: injected(nj.sparseloco, sync_every=4), TypeError, "top_k is traced and must be known: name it in the"),
    # settings
    (lambda: noloco(outer_lr="0.7"), TypeError, "is a text: give a number"),
    (lambda: untyped.noloco(GRAPHS), TypeError, "pairing is RandomNeighbours: give groups of replicas, such as nj.R"),
    (lambda: untyped.noloco(4), TypeError, "pairing is int: give groups of replicas, such as nj.RandomP"),
    (lambda: untyped.epidemic(PAIRS), TypeError, "neighbours is RandomPairing: give graphs, such as nj.RandomNei"),
    (lambda: nj.RandomPairing(0), ValueError, "num_replicas is 0"),
    (lambda: nj.RandomPairing(4, 1), ValueError, "group_size is 1 with num_replicas 4: choose from 2 to 4"),
    (lambda: nj.RandomPairing(4, 5), ValueError, "group_size is 5 with num_replicas 4: choose from 2 to 4"),
    (lambda: nj.RandomPairing(4, max_pool=0), ValueError, "max_pool is 0"),
    (lambda: nj.ExplicitPairing([]), ValueError, "rounds is empty"),
    (
        lambda: nj.ExplicitPairing([[[0, 1], [1, 2]]]),
        ValueError,
        r"round 0 holds replicas \[0, 1, 1, 2\]: each of 0",
    ),
    (
        lambda: nj.ExplicitPairing([[[0, 1], [2]], [[0, 1]]]),
        ValueError,
        r"round 1 holds replicas \[0, 1\]: each of 0",
    ),
    (lambda: nj.ExplicitPairing([[[0, 1], []]]), ValueError, "round 0"),
    (lambda: nj.ExplicitPairing([[[1, 2]]]), ValueError, r"round 0 holds replicas \[1, 2\]: each of 0..1"),
    (lambda: nj.noloco(PAIRS, outer_momentum=1.0), ValueError, r"outer_momentum is 1.0: it must be in \[0, 1\)"),
    (lambda: nj.noloco(PAIRS, sync_every=0), ValueError, "sync_every is 0: it must be at least 1"),
    (lambda: nj.noloco(PAIRS, consensus=float("nan")), ValueError, "consensus is nan: it must be finite"),
    (lambda: nj.noloco(PAIRS, outer_lr=-1.0), ValueError, "outer_lr is -1.0: it must be finite and at least 0"),
    (lambda: nj.noloco(PAIRS, wire="int3"), ValueError, "wire is 'int3': choose from 'float32', 'bfloat16'"),
    (lambda: nj.RandomPairing(4, order="sorted"), ValueError, "order is 'sorted': choose from 'passes', 'independent'"),
    (lambda: nj.RandomPairing(4, seed=-1), ValueError, "seed is -1"),
    (lambda: nj.diloco(outer_lr=float("inf")), ValueError, "outer_lr is inf"),
    (lambda: nj.RandomNeighbours(4, 4), ValueError, "degree is 4 with num_replicas 4: choose from 1 to 3"),
    (lambda: nj.RandomNeighbours(4, 0), ValueError, "degree is 0 with num_replicas 4: choose from 1 to 3"),
    (lambda: nj.RandomNeighbours(0), ValueError, "num_replicas is 0"),
    (lambda: nj.RandomNeighbours(4, order="often"), ValueError, "order is 'often'"),
    (lambda: nj.epidemic(GRAPHS, wire="modulo4"), ValueError, "wire='modulo4' is for equal groups of 2, 4, 8, "),
    (lambda: nj.diloco(wire="modulo4"), ValueError, "wire='modulo4' is for equal groups of 2, 4, 8, "),
    (lambda: nj.noloco(PAIRS, fragments=-1), ValueError, "fragments is -1"),
    (lambda: nj.noloco(PAIRS, sync_every=3, delay=4), ValueError, "delay=4 is not between 0 and the sync_every=3"),
    (lambda: nj.RandomPairing(6, order="hypercube"), ValueError, "must be powers of two, choose 'passes'"),
    (lambda: nj.RandomPairing(8, 3, order="hypercube"), ValueError, "8 replicas in groups of 3: both must be"),
    (lambda: nj.sparseloco(error_decay=1.5), ValueError, r"error_decay is 1.5: it must be in \[0, 1\]"),
    (lambda: nj.sparseloco(top_k=0), ValueError, "top_k is 0: it must be between 1 and 4096"),
    (lambda: nj.sparseloco(top_k=5000), ValueError, "top_k is 5000"),
]


@pytest.mark.parametrize(("calls", "error", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_misuse_is_refused_in_one_clear_line(calls, error, message):
    for call in calls if isinstance(calls, list) else [calls]:
        with pytest.raises(error, match=message):
            call()
