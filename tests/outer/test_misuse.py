"""Unusual but legitimate code of an outside user: it does the right thing, or says what is wrong."""

import copy
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
from support.layouts import assert_trees_close, compiled, mesh_of, other_collectives, random_tree

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


def test_a_traced_sync_is_refused_with_the_alternatives():
    tx, params = noloco(), random_tree(0, N)
    step = jax.vmap(lambda sync: tx.update(params, tx.init(params), params, sync=sync), axis_name="replica")
    with pytest.raises(TypeError, match="sync is traced: give True or False, for two programs, or None"):
        jax.eval_shape(step, jnp.ones(N, bool))


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
    assert "all-gather" in other_collectives(hlo)  # the gather that the warning reports


@pytest.mark.parametrize("axis_name", [("replica",), ("host", "gpu"), ("gpu", "slot")])
def test_replicas_may_span_several_axes_or_a_tuple_of_one_axis(axis_name):
    outer = noloco(axis_name=axis_name)
    params = random_tree(0, N)
    state = jax.vmap(noloco().init)(params)._replace(rule=jax.vmap(noloco().init)(random_tree(1, N)).rule)
    expected = jax.jit(jax.vmap(noloco().step, axis_name="replica"))(params, state)

    if axis_name == ("replica",):
        actual = jax.jit(jax.vmap(outer.step, axis_name="replica"))(params, state)
    else:
        shape = {"host": 2, "gpu": 2} if "host" in axis_name else {"gpu": 2}
        mesh = jax.make_mesh(
            tuple(shape.values()),
            tuple(shape),
            (jax.sharding.AxisType.Auto,) * len(shape),
            devices=jax.devices()[: 2 ** len(shape)],
        )

        def block(params, state):
            if "slot" in axis_name:
                return jax.vmap(outer.step, axis_name="slot")(params, state)
            params, state = jax.tree.map(lambda x: x[0], (params, state))
            return jax.tree.map(lambda x: x[None], outer.step(params, state))

        specs = P(tuple(shape))
        mapped = jax.shard_map(block, mesh=mesh, in_specs=specs, out_specs=specs, check_vma="slot" not in axis_name)
        actual = jax.jit(mapped)(params, state)
    assert_trees_close(actual, expected)


def test_a_vmap_axis_before_a_mesh_axis_is_refused_with_the_right_order():
    outer = noloco(axis_name=("slot", "replica"))
    specs = {"in_specs": P("replica"), "out_specs": P("replica"), "check_vma": False}
    block = jax.shard_map(jax.vmap(outer.step, axis_name="slot"), mesh=mesh_of(2), **specs)
    params = random_tree(0, N)
    with pytest.raises(ValueError, match="on axes of a mesh and then on at most one vmap axis, and here 'slot'"):
        jax.eval_shape(block, params, jax.vmap(noloco().init)(params))


def test_mesh_axes_in_another_order_than_the_meshs_are_refused():
    """JAX numbers the devices of a tuple of axes in the mesh's order, whatever the tuple's."""
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    outer, params = nj.noloco(nj.RandomPairing(8), axis_name=("y", "x")), jnp.ones((8, 2))

    def step(params, state):
        return jax.tree.map(lambda x: x[None], outer.step(*jax.tree.map(lambda x: x[0], (params, state))))

    mapped = jax.shard_map(step, mesh=mesh, in_specs=P(("y", "x")), out_specs=P(("y", "x")))
    with pytest.raises(ValueError, match=r"another order than the mesh.*give \('x', 'y'\)"):
        jax.eval_shape(mapped, params, jax.eval_shape(jax.vmap(outer.init), params))


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


@pytest.mark.parametrize("settings", [{}, {"wire": "modulo4", "fragments": 2}, {"wire": "modulo4", "delay": 1}])
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


@pytest.mark.parametrize(
    ("make", "name"), [(noloco, "outer_lr"), (nj.diloco, "outer_momentum"), (nj.sparseloco, "error_decay")]
)
def test_a_text_in_the_place_of_a_number_is_refused(make: Any, name):
    with pytest.raises(TypeError, match="is a text: give a number"):
        make(**{name: "0.7"})


@pytest.mark.parametrize("every", [2.5, lambda step: 1.0 + 0 * step], ids=["a number", "a schedule"])
def test_an_injected_sync_every_that_is_no_integer_is_refused(every):
    tx, params = optax.inject_hyperparams(nj.diloco)(sync_every=every), jnp.zeros(2)
    with pytest.raises(TypeError, match="it must be an integer"):
        jax.eval_shape(vmapped(tx), params, jax.eval_shape(jax.vmap(tx.init), params), params)


@pytest.mark.parametrize("make", [noloco, nj.diloco])
def test_a_numpy_number_leaves_the_states_dtypes(make):
    outer = make(outer_lr=np.float64(0.7), outer_momentum=np.float64(0.5), state_dtype="bfloat16")
    params = jnp.ones((N, 3), jnp.float32)
    state = jax.eval_shape(jax.vmap(outer.init), params)
    _, after = jax.eval_shape(jax.vmap(outer.step, axis_name="replica"), params, state)
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, state)


def test_hyperparameters_may_be_injected():
    plain, params = noloco(outer_lr=0.3, consensus=0.2), random_tree(0, N)
    injected = optax.inject_hyperparams(nj.noloco)(
        nj.RandomPairing(N), outer_lr=optax.linear_schedule(0.3, 0.1, 10), consensus=0.2, sync_every=1
    )
    updates = random_tree(1, N)
    expected, _ = vmapped(plain)(updates, jax.vmap(plain.init)(params), params)
    actual, state = vmapped(injected)(updates, jax.vmap(injected.init)(params), params)
    assert_trees_close(actual, expected)
    np.testing.assert_allclose(state.hyperparams["outer_lr"], 0.3, rtol=1e-6)


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
    "multi_transform": lambda tx: optax.multi_transform(
        {"on": optax.chain(optax.identity(), tx), "off": optax.set_to_zero()}, {"matrix": "on", "scalar": "off"}
    ),
    "selective_transform": lambda tx: optax.selective_transform(tx, freeze_mask={"matrix": False, "scalar": True}),
    "masked": lambda tx: optax.masked(tx, {"matrix": True, "scalar": False}),
}


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("wrap", PARTS.values(), ids=PARTS)
def test_outer_steps_may_cover_a_subset_of_the_parameters(wrap, fragments):
    whole, params, inner = noloco(fragments=fragments), random_tree(0, N), random_tree(1, N)
    tx, only = wrap(whole), {"matrix": params["matrix"]}
    updates, _ = vmapped(tx)(inner, jax.vmap(tx.init)(params), params)
    expected, _ = vmapped(whole)({"matrix": inner["matrix"]}, jax.vmap(whole.init)(only), only)
    assert_trees_close(updates["matrix"], expected["matrix"])


def test_an_injected_sync_every_keeps_outer_steps_conditional():
    injected, params = optax.inject_hyperparams(nj.noloco)(nj.RandomPairing(N), sync_every=2), random_tree(0, N)
    plain, inner = noloco(sync_every=2), random_tree(1, N)
    state, before = jax.vmap(injected.init)(params), jax.vmap(plain.init)(params)
    update = jax.vmap(injected.update, axis_name="replica")
    assert " conditional(" in compiled(update, inner, state, params)
    for _ in range(2):
        updates, state = jax.jit(update)(inner, state, params)
        expected, before = vmapped(plain)(inner, before, params)
        assert_trees_close(updates, expected)


@pytest.mark.parametrize(
    ("settings", "name"),
    [({"fragments": 2}, "fragments"), ({"delay": 1}, "delay"), ({"delay": 1, "static_args": "delay"}, "sync_every")],
)
def test_a_traced_setting_that_must_be_static_is_refused_by_name(settings, name):
    static = settings.pop("static_args", ())
    tx: Any = optax.inject_hyperparams(nj.noloco, static_args=static)(nj.RandomPairing(N), sync_every=2, **settings)
    params = random_tree(0, N)
    with pytest.raises(TypeError, match=f"{name} is traced.* static_args"):
        jax.eval_shape(vmapped(tx), params, jax.eval_shape(jax.vmap(tx.init), params), params)


MAKERS: dict[str, Any] = {
    "noloco": noloco,
    "int8": lambda **settings: noloco(wire="int8", **settings),
    "modulo4": lambda **settings: noloco(wire="modulo4", **settings),
    "groups of three": lambda **settings: nj.noloco(nj.RandomPairing(N, 3), **settings),
    "bfloat16 state": lambda **settings: noloco(state_dtype="bfloat16", **settings),
    "late fragments": lambda **settings: noloco(fragments=2, delay=1, **settings),
    "diloco": nj.diloco,
    "epidemic": lambda **settings: nj.epidemic(nj.RandomNeighbours(N), **settings),
    "sparseloco": nj.sparseloco,
}
every_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@every_maker
def test_eager_steps_on_numpy_arrays_equal_jitted_steps(make):
    """Each operation on an array of another shape is compiled: a scalar too where fragments cut it differently."""
    tx, params = make(sync_every=1), random_tree(0, N)
    if make is not MAKERS["late fragments"]:
        del params["scalar"]
    state, moved = jax.vmap(tx.init)(params), jax.tree.map(lambda x: 1.25 * x, params)
    here = jax.vmap(tx.step, axis_name="replica")(moved, state)
    assert_trees_close(here, jax.jit(jax.vmap(tx.step, axis_name="replica"))(moved, state))


@every_maker
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copied_transform_takes_the_same_outer_steps(make, copied):
    tx, params = make(sync_every=2), random_tree(0, N)
    other, state = copied(tx), jax.vmap(tx.init)(params)
    assert type(other) is type(tx) and other.steps.rule == tx.steps.rule
    shapes = [jax.make_jaxpr(jax.vmap(one.step, axis_name="replica"))(params, state) for one in (tx, other)]
    assert str(shapes[0]) == str(shapes[1])


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (np.zeros(2, np.int32), r"\['w'\] is of int32 and has no mean over replicas.*optax.masked"),
        (np.zeros(2, bool), r"\['w'\] is of bool and has no mean"),
        (0.5, r"\['w'\] is a Python float: give an array, such as jnp.asarray\(0.5\)"),
        (jax.random.key(0), r"\['w'\] is a PRNG key and has no mean over replicas: keep it out of the parameters"),
        (np.zeros(2), r"\['w'\] is of float64 and outer steps compute in float32: convert it to float32"),
        (np.zeros(2, np.complex64), r"\['w'\] is of complex64 and outer steps compute in float32"),
    ],
    ids=["integers", "booleans", "a Python float", "a PRNG key", "float64", "complex"],
)
def test_leaves_that_have_no_mean_are_refused_by_name(leaf, message):
    """Issue 52, item 28: in one clear line, at `init` already."""
    for call in (noloco().init, lambda params: noloco().step(params, None)):
        with pytest.raises(TypeError, match=message):
            call({"a": np.zeros(2, np.float32), "w": leaf})


def test_a_stored_correction_without_a_delay_is_refused():
    params = random_tree(0, N)
    state = jax.vmap(noloco().init)(params)
    with pytest.raises(ValueError, match="no stored correction without a delay"):
        jax.eval_shape(jax.vmap(noloco().apply, axis_name="replica"), params, state)


@pytest.mark.parametrize(
    "make",
    [noloco, nj.diloco, nj.sparseloco, lambda: nj.epidemic(nj.RandomNeighbours(N))],
    ids=["noloco", "diloco", "sparseloco", "epidemic"],
)
def test_a_step_without_an_axis_of_replicas_says_where_it_runs(make):
    """Issue 52, item 28: the commonest mistake, of which JAX says "unbound axis name: replica"."""
    outer, params = make(), {"w": jnp.ones(8)}
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
    assert " conditional(" in compiled(update, stacked, state, stacked)
    updates, state = jax.jit(update)(stacked, state, stacked)
    updates, _ = jax.jit(update)(updates, state, stacked)
    for seed, tree in enumerate(seeds):
        own, own_state = vmapped(tx)(tree, jax.vmap(tx.init)(tree), tree)
        own, _ = vmapped(tx)(own, own_state, tree)
        assert_trees_close(jax.tree.map(lambda x, seed=seed: x[seed], updates), own)


@pytest.mark.parametrize("pairing", [nj.RandomNeighbours(4), 4, "pairs"])
def test_what_is_no_pairing_is_refused(pairing):
    with pytest.raises(TypeError, match=r"pairing is \w+: give groups of replicas, such as nj.RandomPairing\(N\)"):
        nj.noloco(pairing)


@pytest.mark.parametrize("neighbours", [nj.RandomPairing(4), 4])
def test_what_is_no_graph_is_refused(neighbours):
    with pytest.raises(TypeError, match=r"neighbours is \w+: give graphs, such as nj.RandomNeighbours\(N\)"):
        nj.epidemic(neighbours)


def test_an_injected_top_k_is_refused_with_what_to_do():
    tx = optax.inject_hyperparams(nj.sparseloco)(outer_lr=0.7, sync_every=4)
    params = {"w": jnp.ones((2, 8))}
    with pytest.raises(TypeError, match="top_k is traced and must be known: name it in the static_args"):
        jax.jit(jax.vmap(tx.update, axis_name="replica"))(params, jax.vmap(tx.init)(params), params)


@pytest.mark.parametrize("make", [MAKERS["noloco"], nj.sparseloco], ids=["noloco", "sparseloco"])
@pytest.mark.parametrize("wire", ["int8", "modulo4"])
def test_arrays_without_elements_pass_through_an_outer_step(make, wire):
    tx = nj.sparseloco(sync_every=1) if make is nj.sparseloco else nj.noloco(nj.RandomPairing(2), wire=wire)
    params = {"empty": jnp.zeros((2, 3, 0)), "w": jnp.arange(16.0).reshape(2, 8)}
    state: Any = jax.jit(jax.vmap(tx.init))(params)
    after: Any = jax.jit(jax.vmap(tx.step, axis_name="replica"))(params, state)[0]
    assert after["empty"].shape == (2, 3, 0) and np.isfinite(after["w"]).all()
