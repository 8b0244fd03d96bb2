"""Messages as grid indices modulo a few bits, in windows that follow how far replicas have moved."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import noloco_jax as nj
from noloco_jax.exchange.blocks import hidden_last
from noloco_jax.exchange.groups import group_mean
from noloco_jax.exchange.modulo import Modulo
from noloco_jax.wires import MODULO_BITS
from support.layouts import axis_of, compiled, over_replicas, some_devices

PAIRS = [[0, 3], [1, 2], [4, 6], [5, 7]]
PARTNER = np.array([3, 2, 1, 0, 6, 7, 4, 5])
every_wire = pytest.mark.parametrize("wire", MODULO_BITS)


def meet(tree, movement, wire, groups=PAIRS, layout=8):
    """What the replicas receive in a round of these groups."""

    def mean(tree, movement):
        return group_mean(tree, nj.ExplicitPairing([groups]), jnp.int32(0), axis_of(layout), Modulo(wire), movement)

    return jax.device_get(jax.jit(over_replicas(mean, layout))(tree, movement))


def replicas(distance, shape=(3, 50), seed=0):
    """Weights that all replicas share, and of each a difference of about that size."""
    rng = np.random.default_rng(seed)
    shared = rng.normal(size=shape)
    return {"w": (shared + distance * rng.normal(size=(8, *shape))).astype(np.float32)}


def like(tree, value):
    return jax.tree.map(lambda x: np.full_like(x, value), tree)


@every_wire
@pytest.mark.parametrize("layout", [8, (8, 1), (2, 4)])
def test_a_pair_comes_together_by_half_its_difference_to_within_the_step(wire, layout):
    """The step is 18 / 2^bits of the movement, and up to a fourth of an octave more."""
    distance = 1e-3
    tree = replicas(distance)
    means = meet(tree, like(tree, distance), wire, layout=layout)
    share = 0.375 if wire == "modulo3" else 0.5
    step = 18 / 2 ** MODULO_BITS[wire] * distance * 2**0.3
    difference = tree["w"][PARTNER].astype(np.float64) - tree["w"]
    np.testing.assert_allclose(means["w"] - tree["w"], share * difference, atol=share * step + 1e-7)
    assert np.abs(means["w"] - tree["w"]).max() > 0


@every_wire
@pytest.mark.parametrize("distance", [1e-4, 1e-3, 1.0, 100.0], ids=lambda x: f"distance {x:g}")
def test_corrections_are_exactly_opposite_even_where_they_wrap(wire, distance):
    tree = {"w": np.zeros((8, 640), np.float32)} | {"d": replicas(distance)["w"]}
    tree["w"] += np.random.default_rng(1).standard_t(1, size=tree["w"].shape).astype(np.float32) * distance
    corrections = meet_corrections(tree, wire)
    for c in corrections.values():
        np.testing.assert_array_equal(c + c[PARTNER], np.zeros_like(c))
    assert all(np.abs(c).max() > 0 for c in corrections.values())


def meet_corrections(tree, wire, movement=1e-3):
    """The corrections themselves: of weights of some size, what is left of a sum with them is rounded."""
    code = Modulo(wire)

    def one(x):
        windows = code.windows(x, jnp.full_like(x, movement))
        others = jax.lax.all_gather(windows, "replica")[jnp.asarray(PARTNER)[jax.lax.axis_index("replica")]]
        windows = jnp.maximum(windows, others)
        own = code.encode(x, windows)
        other = jax.lax.all_gather(own, "replica")[jnp.asarray(PARTNER)[jax.lax.axis_index("replica")]]
        return code.correction(own, other, windows, x)

    return jax.device_get(jax.jit(jax.vmap(lambda t: jax.tree.map(one, t), axis_name="replica"))(tree))


@every_wire
def test_equal_replicas_stay_bitwise_equal_and_who_is_alone_as_it_is(wire):
    rng = np.random.default_rng(0)
    one = rng.standard_t(1, size=(1, 333)).astype(np.float32)
    tree = {"w": np.broadcast_to(one, (5, 333))}
    means = meet(tree, like(tree, 1e-3), wire, groups=[[0, 3], [1, 2], [4]], layout=5)
    np.testing.assert_array_equal(means["w"], tree["w"])
    apart = replicas(1e-3)
    alone = {"w": apart["w"][:5]}
    means = meet(alone, like(alone, 1e-3), wire, groups=[[0, 3], [1, 2], [4]], layout=5)
    np.testing.assert_array_equal(means["w"][4], alone["w"][4])


@every_wire
def test_both_take_the_larger_window_so_that_who_stood_still_reaches_who_did_not(wire):
    tree = replicas(1.0)
    movement = like(tree, 0.0)
    movement["w"][[0, 1, 4, 5]] = 1.0
    means = meet(tree, movement, wire)
    both = meet(tree, like(tree, 1.0), wire)
    np.testing.assert_array_equal(means["w"], both["w"])


@every_wire
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_so_for_both_of_its_pair_and_in_its_block_alone(wire, value):
    tree = {"w": np.random.default_rng(0).normal(size=(8, 640)).astype(np.float32)}
    clean = meet(tree, like(tree, 1.0), wire)
    broken = {"w": tree["w"].copy()}
    broken["w"][3, 130] = value
    means = meet(broken, like(tree, 1.0), wire)
    block = np.zeros((8, 640), bool)
    block[[0, 3], 128:192] = True
    assert np.isnan(means["w"][block]).all()
    np.testing.assert_array_equal(means["w"][~block], clean["w"][~block])


@every_wire
def test_a_message_is_a_byte_a_block_for_its_window_and_then_the_bits(wire):
    tree = {"w": np.zeros((8, 5 * 64 + 1), np.float32), "b": np.zeros((8, 3), np.float32)}
    mean = functools.partial(
        group_mean, pairing=nj.ExplicitPairing([PAIRS]), index=jnp.int32(0), axis_name="replica", wire=Modulo(wire)
    )
    text = compiled(over_replicas(lambda t, m: mean(t, movement=m), (8, 1)), tree, tree)
    sent = [line for line in text.splitlines() if " collective-permute(" in line]
    assert len(sent) == 2
    sizes = [int(np.prod([int(n) for n in line.split("u8[")[1].split("]")[0].split(",")])) for line in sent]
    assert sum(sizes) == 7 * (1 + 64 * MODULO_BITS[wire] // 8)


@pytest.mark.parametrize(("wire", "limit"), [("float32", 1.1), ("modulo6", 1.2), ("modulo4", 1.5), ("modulo3", 2.2)])
def test_replicas_stay_together_while_the_steps_they_take_become_a_hundredth(wire, limit):
    """Their spread over their steps, at the end; of block codes of 4 bits it would be 30 times the exact one."""
    outer = nj.noloco(nj.RandomPairing(8), 1.0, 0.0, 1.0, sync_every=1, axis_name="replica", wire=wire)
    rng = np.random.default_rng(0)
    params = {"w": np.broadcast_to(0.02 * rng.normal(size=(1, 4096)), (8, 4096)).astype(np.float32)}
    state = jax.vmap(outer.init)(params)
    step = jax.jit(jax.vmap(outer.step, axis_name="replica"))
    rounds, spreads = 120, []
    for round in range(rounds):
        rate = 1e-3 * 0.01 ** (round / rounds)
        moved = {"w": np.asarray(params["w"]) + (rate * rng.normal(size=(8, 4096))).astype(np.float32)}
        params, state = step(moved, state)
        spreads.append(np.asarray(params["w"]).std(0).mean() / rate)
    assert np.mean(spreads[-20:]) < limit


@pytest.mark.parametrize("layout", [8, (8, 1)])
@pytest.mark.parametrize("shape", [(16, 260), (260, 16)], ids=["head", "embedding"])
def test_weights_of_a_token_that_moves_a_hundred_times_as_far_as_its_neighbours_stay_together(shape, layout):
    """Windows that such a token shared with 63 others would be too narrow for it: it would wrap, and wrap for good."""
    outer = nj.noloco(nj.RandomPairing(8), 1.0, 0.0, 1.0, sync_every=1, axis_name=axis_of(layout), wire="modulo4")
    rng = np.random.default_rng(0)
    rate = np.full(260, 1e-4, np.float32)
    rate[::50] = 1e-2
    rate = rate if shape[1] == 260 else rate[:, None]
    params = {"w": np.broadcast_to(0.02 * rng.normal(size=(1, *shape)), (8, *shape)).astype(np.float32)}
    state = jax.vmap(outer.init)(params)
    step = jax.jit(over_replicas(outer.step, layout))
    spreads = []
    for _ in range(60):
        moved = {"w": np.asarray(params["w"]) + (rate * rng.normal(size=(8, *shape))).astype(np.float32)}
        params, state = step(moved, state)
        spreads.append(np.asarray(params["w"]).std(0) / rate)
    fast = np.moveaxis(np.mean(spreads[-20:], axis=0), shape.index(260), 0)[::50]
    assert fast.max() < 3


@pytest.mark.parametrize(("hidden", "block"), [(128, 64), (96, 48)])
@pytest.mark.parametrize("tokens_last", [True, False], ids=["head", "embedding"])
def test_a_block_of_a_sharded_array_is_of_one_token_too(hidden, block, tokens_last):
    mesh = jax.make_mesh((2,), ("tensor",), (AxisType.Auto,), devices=some_devices(2))
    x = jnp.ones((hidden, 256) if tokens_last else (256, hidden))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        windows = Modulo("modulo4").windows(hidden_last(x), hidden_last(x))
    assert windows.shape == (256, hidden // block, 1)
