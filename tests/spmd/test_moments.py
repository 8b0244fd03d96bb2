"""The inner optimizer's moments, averaged beside the weights."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import noloco_jax as nj
from noloco_jax.config import DataConfig, InnerConfig, MeshConfig, ModelConfig, OuterConfig, TrainConfig
from noloco_jax.methods import method_of
from noloco_jax.outer.fragments import Fragments
from noloco_jax.outer.moments import Moments
from noloco_jax.spmd.compile import compile_programs
from noloco_jax.spmd.inner import inner_optimizer, moment_decays
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.programs import Programs, build_programs
from noloco_jax.spmd.sharding import fragments_of
from support.model_makers import random_params

CONFIG = TrainConfig(
    num_replicas=4,
    model=ModelConfig(hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2, num_kv_heads=2, vocab_size=32),
    inner=InnerConfig(lr=1e-2, min_lr=1e-3, warmup_steps=0),
    outer=OuterConfig(fragments=2, moments=1),
    data=DataConfig(sequence_length=8, batch_size=2),
    mesh=MeshConfig(replica=2),
)
# The axis that fragments cut: the hidden dimension, 16.
HIDDEN = {"embed": 1, "head": 0, "o": 2, "down": 2, "norm": 0, "attention_norm": 1, "mlp_norm": 1}


def config_of(optimizer: str, wire: str) -> TrainConfig:
    inner = dataclasses.replace(CONFIG.inner, optimizer=optimizer)
    return dataclasses.replace(CONFIG, inner=inner, outer=dataclasses.replace(CONFIG.outer, wire=wire))


@functools.cache
def programs_of(config: TrainConfig) -> Programs:
    """Return a run's programs on two devices, with that of its moments compiled."""
    programs = build_programs(config, make_mesh(config, jax.devices()[:2]))
    return compile_programs(config, programs, only=["share_moments"])


@functools.cache
def shared(optimizer: str, round: int, wire: str = "float32") -> tuple[Any, Any, Any]:
    """Return the inner state before and after sharing moments in a round, and its groups; all replicas differ."""
    config = config_of(optimizer, wire)
    programs = programs_of(config)
    rng = np.random.default_rng(0)
    inner = jax.tree.map(  # first moments no larger than the roots of second ones, as gradients give them
        lambda x: jax.device_put(rng.uniform(0.25, 0.5, x.shape).astype(x.dtype), x.sharding), programs.state.inner
    )
    before = jax.device_get(inner)
    assert programs.share_moments is not None
    after = jax.device_get(programs.share_moments(inner, np.int32(round)))
    return before, after, method_of(config).groups(config, round)


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_a_pair_averages_a_fragments_first_moments_and_roots_of_second_moments(optimizer):
    round = 3  # of fragment 1
    before, after, groups = shared(optimizer, round)
    seen = 0
    for (path, old), new in zip(jax.tree.leaves_with_path(before), jax.tree.leaves(after), strict=True):
        names = [getattr(key, "key", getattr(key, "name", "")) for key in path]
        expected = np.array(old)
        if {"mu", "nu", "trace"} & set(names):
            seen += 1
            cut = 1 + HIDDEN.get(names[-1], 1)  # after the replica axis
            mine = (slice(None),) * cut + (slice(1, None, 2),)
            for pair in map(list, groups):
                values = np.array(old)[pair][mine].astype(np.float64)
                mean = np.square(np.sqrt(values).mean(0)) if "nu" in names else values.mean(0)
                rows = expected[pair]
                rows[mine] = mean
                expected[pair] = rows
        np.testing.assert_allclose(new, expected, rtol=1e-5, err_msg=str(names))
    assert seen == {"adam": 24, "muon": 7 + 2 * 5}[optimizer]


def test_moments_travel_as_int4_beside_modulo4_weights():
    after = [jax.tree.leaves(shared("adam", 3, by)[1]) for by in ("modulo4", "int4", "float32")]
    for in_windows, in_blocks in zip(after[0], after[1], strict=True):
        np.testing.assert_array_equal(in_windows, in_blocks)
    assert any((coded != exact).any() for coded, exact in zip(after[0], after[2], strict=True))


def test_a_second_moment_keeps_a_quarter_where_the_wire_rounds_its_mean_root_to_zero():
    params = {"w": np.ones((4, 8), np.float32)}
    adam = optax.scale_by_adam()
    inner: Any = jax.tree.map(lambda x: x + np.ones_like(x), adam.init(params))

    def rounds_to_zero(tree: Any, number: Any, movement: Any, cuts: Any) -> Any:
        return jax.tree.map(np.zeros_like, tree)

    after = Moments(params, Fragments(), rounds_to_zero).share(inner, jax.numpy.int32(0))
    np.testing.assert_array_equal(after.mu["w"], 0)
    np.testing.assert_array_equal(after.nu["w"], inner.nu["w"] / 4)


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_a_delayed_correction_of_moments_equals_averaging_them_at_once(optimizer):
    delay, number = 3, jax.numpy.int32(2)
    config = dataclasses.replace(CONFIG, inner=InnerConfig(optimizer=optimizer, b1=0.8, b2=0.9, momentum=0.7))
    late = dataclasses.replace(config, outer=dataclasses.replace(config.outer, delay=delay))
    params = random_params(config.model)

    def exchange(tree: Any, number: Any, movement: Any, cuts: Any) -> Any:
        return jax.tree.map(lambda x: 0.75 * x + 0.01, tree)

    at_once = Moments(params, fragments_of(config.model, 2), exchange)
    later = dataclasses.replace(at_once, delay=delay, decays=moment_decays(config.inner))
    states = []
    for moments, optimizer_of in ((at_once, inner_optimizer(config)), (later, inner_optimizer(late))):
        state: Any = jax.jit(optimizer_of.init)(params)
        update = jax.jit(optimizer_of.update)
        for step in range(2 + delay):
            rng = np.random.default_rng(step)
            gradients = jax.tree.map(lambda x, rng=rng: rng.normal(size=x.shape).astype(np.float32), params)
            _, state = update(gradients, state, params)
            if step == 1:
                state = jax.jit(moments.share)(state, number)
        states.append(state)
    expected, (mine, waiting) = states[0], jax.jit(later.enter)(states[1], number)
    assert not any(np.any(x) for x in jax.tree.leaves(waiting))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), mine, expected)
    apart = jax.tree.map(lambda x, y: np.abs(x - y).max(), states[1].inner, expected)
    assert max(jax.tree.leaves(apart)) > 1e-2


def adams(state: Any) -> Any:
    """Return the part of an inner state that holds Adam's moments."""
    [adam] = [part for part in jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "nu")) if hasattr(part, "nu")]
    return adam


@pytest.mark.parametrize("wire", ["float32", "int8", "int4"])
@pytest.mark.parametrize("age", ["of one gradient", "among old ones"])
def test_adam_steps_stay_bounded_for_entries_only_one_replica_has_seen(wire, age):
    """Rare tokens: neither a partner's second moment of zero nor one rounded to zero must make Adam divide by it.

    A block's roots are as large as those of its old entries, beside which the root of one gradient rounds to zero.
    """
    config = config_of("adam", wire)
    programs = programs_of(config)
    rng = np.random.default_rng(0)
    seen = {path: rng.uniform(size=x.shape) < 0.3 for path, x in jax.tree.leaves_with_path(programs.state.params)}
    old = {path: rng.uniform(size=x.shape[1:]) < 0.5 for path, x in jax.tree.leaves_with_path(programs.state.params)}
    b1, b2 = config.inner.b1, config.inner.b2

    def filled(path: tuple, x: jax.Array) -> np.ndarray:
        is_second = any(getattr(key, "name", "") == "nu" for key in path)
        parameter = next((path[i:] for i in range(len(path)) if path[i:] in seen), None)
        if parameter is None:
            return np.zeros(x.shape, x.dtype)
        fresh = seen[parameter] * ((1 - b2) * 0.01 if is_second else (1 - b1) * 0.1)
        aged = old[parameter] & (age == "among old ones")
        return np.where(aged, 1.0 if is_second else 0.1, fresh).astype(np.float32)

    inner = jax.tree.map_with_path(filled, programs.state.inner)
    assert programs.share_moments is not None
    adam = adams(jax.device_get(programs.share_moments(jax.device_put(inner), np.int32(0))))
    most = (1 - b1) / np.sqrt((1 - b2) * (1 - b1 * b1 / b2))
    for mu, nu in zip(jax.tree.leaves(adam.mu), jax.tree.leaves(adam.nu), strict=True):
        assert np.max(np.abs(mu) / (np.sqrt(nu) + 1e-8)) < 1.001 * most


@pytest.mark.parametrize("wire", ["float32", "int4"])
@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adagrad(1e-2),
        optax.amsgrad(1e-2),
        optax.contrib.prodigy(),
        optax.adadelta(1e-2),
        optax.adan(1e-2),
        optax.contrib.simplified_ademamix(1e-2),
        optax.contrib.madgrad(1e-2),
        optax.adafactor(1e-2, min_dim_size_to_factor=1000),
    ],
)
def test_no_second_moment_of_optax_comes_out_below_zero(optimizer, wire):
    """Groups of four: a lossy mean of small values may be below zero, whose square root is NaN."""
    rng = np.random.default_rng(0)
    params = {"w": jnp.zeros((4, 8, 64))}
    gradients = {"w": rng.normal(size=(4, 8, 64)).astype(np.float32) * np.exp(rng.normal(size=(4, 8, 64)))}
    outer = nj.noloco(nj.RandomPairing(4, 4), wire=wire)

    def first_step(params: Any, gradients: Any) -> Any:
        state = optimizer.update(gradients, optimizer.init(params), params)[1]
        outer_state: Any = outer.init(params)
        return state, outer.average_moments(state, params, outer_state)

    step = jax.jit(jax.vmap(first_step, axis_name="replica"))  # operations one by one would each be compiled
    state, shared = step(params, jax.tree.map(jnp.float32, gradients))
    apart = [not np.array_equal(x, y) for x, y in zip(jax.tree.leaves(shared), jax.tree.leaves(state), strict=True)]
    assert any(apart)
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(shared), strict=True):
        assert np.min(after) >= 0 or np.min(before) < 0


def test_moments_of_a_bare_array_and_of_scalars_are_averaged_and_counters_are_not():
    adam, outer = optax.adam(1e-2), nj.noloco(nj.RandomPairing(2))
    for params in (jnp.zeros((2, 8)), {"w": jnp.zeros((2, 8)), "scalar": jnp.zeros(2)}):
        gradients = jax.tree.map(lambda x: jnp.arange(1.0, 1 + x.size).reshape(x.shape), params)
        state: Any = jax.jit(jax.vmap(adam.update))(gradients, jax.jit(jax.vmap(adam.init))(params), params)[1]
        outer_state: Any = jax.jit(jax.vmap(outer.init))(params)
        shared: Any = jax.jit(jax.vmap(outer.average_moments, axis_name="replica"))(state, params, outer_state)
        for before, after in zip(jax.tree.leaves(state[0].mu), jax.tree.leaves(shared[0].mu), strict=True):
            np.testing.assert_allclose(after, np.broadcast_to(np.mean(before, axis=0), before.shape), rtol=1e-6)
        np.testing.assert_array_equal(shared[0].count, state[0].count)


def test_factored_moments_stay_and_a_state_without_moments_is_refused():
    params = {"w": jnp.zeros((2, 8, 64))}
    outer = nj.noloco(nj.RandomPairing(2), wire="int8", fragments=2)

    def shared(state: Any, outer: Any = outer) -> Any:
        outer_state = jax.jit(jax.vmap(outer.init))(params)
        return jax.jit(jax.vmap(outer.average_moments, axis_name="replica"))(state, params, outer_state)

    factored = optax.adafactor(1e-2, min_dim_size_to_factor=4, momentum=0.9)
    assert jax.tree.structure(shared(jax.jit(jax.vmap(factored.init))(params)))
    with pytest.raises(ValueError, match="the inner state has no array of a parameter's path and shape"):
        shared(jax.jit(jax.vmap(optax.sgd(1e-2).init))(params))
    with pytest.raises(ValueError, match="sparseloco averages no moments"):
        shared(jax.jit(jax.vmap(optax.adam(1e-2).init))(params), nj.sparseloco())


@pytest.mark.parametrize(("b1", "b2"), [(0.9, 0.999), (0.9, 0.95), (0.0, 0.9)])
def test_the_least_root_is_what_the_worst_gradients_give(b1, b2):
    moments = Moments({}, Fragments(), lambda *arguments: None, decays={"mu": b1, "nu": b2})
    worst, others = (b1 / b2) ** np.arange(400)[::-1], np.random.default_rng(0).normal(size=(100, 400))
    shares = []
    for gradients in (worst, *others):
        first = second = 0.0
        for gradient in gradients:
            first, second = b1 * first + (1 - b1) * gradient, b2 * second + (1 - b2) * gradient**2
        shares.append(np.sqrt(second) / abs(first))
    assert shares[0] == pytest.approx(moments.least_root, rel=1e-3)
    assert min(shares) >= moments.least_root * (1 - 1e-6)


def test_a_late_correction_leaves_no_root_below_the_least_of_its_first_moment():
    params = {"w": np.ones((4, 8), np.float32)}
    moments = Moments(params, Fragments(), lambda *arguments: None, delay=3, decays={"mu": 0.9, "nu": 0.999})
    inner: Any = optax.scale_by_adam().init(params)
    correction = inner._replace(count=None, mu={"w": np.full((4, 8), 0.5, np.float32)})
    after = moments.corrected(inner, correction, jax.numpy.int32(0), 3)
    np.testing.assert_allclose(after.mu["w"], 0.5 * 0.9**3, rtol=1e-6)
    np.testing.assert_allclose(np.sqrt(after.nu["w"]), moments.least_root * 0.5 * 0.9**3, rtol=1e-5)


class Kernel(NamedTuple):
    """Parameters named like the moments of optimizers."""

    nu: Any
    scale: Any


@pytest.mark.parametrize("wire", ["float32", "int4"])
@pytest.mark.parametrize(
    "optimizer",
    [optax.adam(1e-2), optax.adam(1e-2, b1=0.3), optax.adabelief(1e-2), optax.adamax(1e-2), optax.amsgrad(1e-2)],
    ids=["adam", "adam of short memory", "adabelief", "adamax", "amsgrad"],
)
def test_equal_replicas_keep_the_moments_of_any_optimizer(optimizer, wire):
    outer, state = nj.noloco(nj.RandomPairing(2), wire=wire), None
    params = Kernel(*(jnp.ones((2, 2, 8)) for _ in Kernel._fields))
    state = jax.vmap(optimizer.init)(params)
    for size in (-3.0, 0.01, 5.0):
        _, state = jax.vmap(optimizer.update)(jax.tree.map(lambda x, by=size: by * x, params), state, params)
    outer_state: Any = jax.vmap(outer.init)(params)
    after = jax.vmap(outer.average_moments, axis_name="replica")(state, params, outer_state)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), after, state)
