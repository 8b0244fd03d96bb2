"""Messages as grid indices modulo a few bits, in windows that follow how far replicas have moved."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import noloco_jax as nj
from noloco_jax.optim.exchange.blocks import block_counts
from noloco_jax.optim.exchange.modulo import Modulo, _checksum
from noloco_jax.optim.wire_sizes import MODULO_BITS
from support.exchanges import exchange_of

PAIRS = [[0, 3], [1, 2], [4, 6], [5, 7]]
PARTNER = np.array([3, 2, 1, 0, 6, 7, 4, 5])
BITS = MODULO_BITS["modulo4"]
CODE = Modulo("modulo4")


def exchange(tree, movement, groups=PAIRS, layout=8, remembered=None):
    """Return the means that replicas receive in a round of these groups."""
    return exchange_with_memories(tree, movement, groups, layout, remembered)[0]


def exchange_with_memories(tree, movement, groups=PAIRS, layout=8, remembered=None):
    """Return the received means, and the blocks' memories after the round."""
    if remembered is None:
        remembered = jax.tree.map(lambda x: memory_of(x.shape), tree)
    return jax.device_get(_mean(tuple(map(tuple, groups)), layout)(tree, movement, remembered))


@functools.cache
def _mean(groups, layout):
    """Return the compiled round of these groups, which a test calls many times."""

    return jax.jit(exchange_of(groups, "modulo4", layout))


def memory_of(shape):
    """Return empty memories of N replicas' arrays of a shape (N, ...)."""
    return np.zeros((shape[0], *block_counts(shape[1:], len(shape) - 2)), np.uint8)


def replicas(distance, shape=(3, 50), seed=0):
    """Return weights shared by all replicas, plus a difference of about `distance` for each."""
    rng = np.random.default_rng(seed)
    shared = rng.normal(size=shape)
    return {"w": (shared + distance * rng.normal(size=(8, *shape))).astype(np.float32)}


def like(tree, value):
    return jax.tree.map(lambda x: np.full_like(x, value), tree)


@pytest.mark.parametrize("layout", [8, (8, 1), (2, 4)])
def test_a_pair_meets_at_its_midpoint_within_half_a_grid_step(layout):
    """The step is 4.4 / 2^bits of the movement, and up to a fourth of an octave more."""
    distance = 1e-3
    tree = replicas(distance)
    means = exchange(tree, like(tree, 5 * distance), layout=layout)
    step = 4.4 / 2**BITS * 5 * distance * 2**0.3
    difference = tree["w"][PARTNER].astype(np.float64) - tree["w"]
    np.testing.assert_allclose(means["w"] - tree["w"], difference / 2, atol=step / 2 + 1e-7)
    assert np.abs(means["w"] - tree["w"]).max() > 0


@pytest.mark.parametrize("distance", [1e-3, 100.0], ids=lambda x: f"distance {x:g}")
def test_corrections_of_a_pair_are_exactly_opposite_even_for_refused_blocks(distance):
    x = np.random.default_rng(1).standard_t(1, size=(8, 10, 64)).astype(np.float32) * distance
    corrections, remembered = exchange_corrections(x, 1e-3)
    np.testing.assert_array_equal(corrections + corrections[PARTNER], np.zeros_like(corrections))
    np.testing.assert_array_equal(remembered, remembered[PARTNER])


def exchange_corrections(blocks, movement):
    """Return the bare corrections and the blocks' memories; added to larger weights, corrections would be rounded."""
    code, partner = CODE, jnp.asarray(PARTNER)

    @jax.jit
    def exchange(x):
        windows = code.windows(x, jnp.full((*x.shape[:-1], 1), movement), jnp.zeros((*x.shape[:-1], 1), jnp.uint8))
        windows = jnp.maximum(windows, windows[partner])
        sent = code.encode(x, windows, 0)
        return code.correction(sent, sent[partner], windows, 0)

    return jax.device_get(exchange(blocks))


def test_both_partners_refuse_a_block_beyond_the_window_and_widen_it_enough():
    """Values leave the window up or down, in any places, by half a window or by several windows."""
    rng = np.random.default_rng(0)
    half = 2.2e-3  # for a movement of 1e-3
    for places, windows in [(1, 0.5), (1, 1), (1, -1), (1, 7), (3, 1), (20, -2), (64, 1)]:
        x = np.broadcast_to(rng.normal(size=(1, 5, 64)), (8, 5, 64)).astype(np.float32)
        for pair in PAIRS:
            x[pair[0], 2, rng.choice(64, places, replace=False)] += np.float32(2.4 * half * windows)
        corrections, remembered = exchange_corrections(x, 1e-3)
        assert not corrections.any()
        wide = 2.0 ** ((remembered[:, 2].astype(float) - 120) / 4) * 2**BITS / 2
        assert (wide >= 3 * half).all()
        assert (remembered[:, [0, 1, 3, 4]] < remembered[:, 2:3]).all()


def test_a_refused_block_converges_within_60_rounds():
    """A hundred windows apart, as after a partition or from another run's weights."""
    tree = {"w": np.zeros((8, 64), np.float32)}
    tree["w"][[0, 1, 4, 5]] = 0.3
    remembered = {"w": memory_of(tree["w"].shape)}
    for _ in range(60):
        means, remembered = exchange_with_memories(tree, like(tree, 1e-3), remembered=remembered)
        tree = {"w": np.asarray(means["w"])}
    assert np.abs(tree["w"] - tree["w"][PARTNER]).max() < 1e-3
    np.testing.assert_allclose(tree["w"].mean(axis=0), 0.15, atol=1e-6)


@pytest.mark.parametrize("values", [(0.0, 1.0), (0.0, 251.0)])
def test_no_difference_passes_the_check_for_long(values):
    """One of a multiple of 256 windows had a check byte of 0 and was accepted for ever."""
    outer = nj.noloco(nj.RandomPairing(2), 1.0, 0.0, 1.0, wire="modulo4")
    params: Any = {"w": jnp.stack([jnp.full((4, 64), value) for value in values])}
    state: Any = jax.vmap(outer.init)(params)
    step = jax.jit(jax.vmap(outer.step, axis_name="replica"))
    for _ in range(100):
        params, state = step(params, state)
    np.testing.assert_allclose(params["w"], np.mean(values), atol=1e-2 * abs(values[1] - values[0]))


def test_an_undetected_difference_is_detected_in_another_outer_step():
    """Two entries wrap by amounts whose weighed sum happens to vanish in some outer steps, but not in all."""
    numbers = np.zeros((1, 64), np.int32)
    numbers[0, :2] = 3, -5
    checksums = jax.jit(jax.vmap(lambda number: _checksum(jnp.asarray(numbers), number)))(jnp.arange(2000))
    assert 0 < (np.asarray(checksums) == 0).sum() < 40


@pytest.mark.parametrize("distance", [6e3, 1e5, 1e9])
def test_blocks_that_moved_far_converge_too(distance):
    tree = replicas(distance)
    means = exchange(tree, like(tree, 5 * distance))
    assert np.isfinite(means["w"]).all()
    apart = np.abs(tree["w"] - tree["w"][PARTNER]).mean()
    assert np.abs(means["w"] - means["w"][PARTNER]).mean() < 0.8 * apart


def test_equal_replicas_and_unpaired_replicas_keep_their_weights_bitwise():
    rng = np.random.default_rng(0)
    one = rng.standard_t(1, size=(1, 333)).astype(np.float32)
    tree = {"w": np.broadcast_to(one, (5, 333))}
    means = exchange(tree, like(tree, 1e-3), groups=[[0, 3], [1, 2], [4]], layout=5)
    np.testing.assert_array_equal(means["w"], tree["w"])
    apart = replicas(1e-3)
    alone = {"w": apart["w"][:5]}
    means = exchange(alone, like(alone, 1e-3), groups=[[0, 3], [1, 2], [4]], layout=5)
    np.testing.assert_array_equal(means["w"][4], alone["w"][4])


def test_the_windows_of_a_replica_without_a_partner_do_not_narrow():
    """It has learned nothing of its distance from the others."""
    tree, groups = {"w": replicas(1e-3)["w"][:5]}, [[0, 3], [1, 2], [4]]
    _, before = exchange_with_memories(tree, like(tree, 1e-3), groups, layout=5)
    _, after = exchange_with_memories(tree, like(tree, 0.0), groups, 5, before)
    assert before["w"][4].min() > 0
    np.testing.assert_array_equal(after["w"][4], before["w"][4])


def test_both_partners_use_the_larger_of_their_windows():
    tree = replicas(1.0)
    movement = like(tree, 0.0)
    movement["w"][[0, 1, 4, 5]] = 5.0
    means = exchange(tree, movement)
    both = exchange(tree, like(tree, 5.0))
    np.testing.assert_array_equal(means["w"], both["w"])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_non_finite_value_makes_only_its_block_nan_at_both_partners(value):
    tree = {"w": np.random.default_rng(0).normal(size=(8, 6400)).astype(np.float32)}
    clean = exchange(tree, like(tree, 5.0))
    broken = {"w": tree["w"].copy()}
    broken["w"][3, 130] = value
    means = exchange(broken, like(tree, 5.0))
    block = np.zeros((8, 6400), bool)
    block[[0, 3], 128:192] = True
    assert np.isnan(means["w"][block]).all()
    np.testing.assert_array_equal(means["w"][~block], clean["w"][~block])


def test_windows_that_held_nan_follow_the_distance_again_once_the_weights_are_repaired():
    tree = replicas(1e-3, (3, 64))
    broken = {"w": tree["w"].copy()}
    broken["w"][3, 1, 5] = np.nan
    _, after = exchange_with_memories(broken, like(tree, 5e-3))
    means = exchange(tree, like(tree, 5e-3), remembered=after)["w"]
    step = 4.4 / 2**BITS * 5e-3 * 2**0.3
    difference = tree["w"][PARTNER].astype(np.float64) - tree["w"]
    np.testing.assert_allclose(means - tree["w"], difference / 2, atol=step / 2 + 1e-7)


def test_a_movement_that_is_not_finite_makes_only_its_block_nan():
    tree = {"w": np.random.default_rng(0).normal(size=(8, 6400)).astype(np.float32)}
    movement = like(tree, 5.0)
    clean = exchange(tree, movement)["w"]
    movement["w"][3, 130] = np.nan
    means = exchange(tree, movement)["w"]
    assert np.isnan(means[[0, 3], 128:192]).all()
    np.testing.assert_array_equal(np.delete(means, np.s_[128:192], axis=1), np.delete(clean, np.s_[128:192], axis=1))


@pytest.mark.parametrize(("wire", "limit"), [("float32", 1.1), ("modulo4", 1.5)])
def test_replicas_stay_close_while_their_steps_shrink_a_hundredfold(wire, limit):
    """Bound the final ratio of spread to step size; 4-bit block formats would be 30 times worse than float32."""
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


@pytest.mark.parametrize("shape", [(16, 260), (260, 16)], ids=["head", "embedding"])
def test_tokens_that_move_a_hundred_times_faster_than_others_stay_close(shape):
    """A window shared with 63 slower tokens would be too narrow: such a token would wrap and never recover."""
    outer = nj.noloco(nj.RandomPairing(8), 1.0, 0.0, 1.0, wire="modulo4")
    rng = np.random.default_rng(0)
    rate = np.full(260, 1e-4, np.float32)
    rate[::50] = 1e-2
    rate = rate if shape[1] == 260 else rate[:, None]
    params = {"w": np.broadcast_to(0.02 * rng.normal(size=(1, *shape)), (8, *shape)).astype(np.float32)}
    state = jax.vmap(outer.init)(params)
    step = jax.jit(jax.vmap(outer.step, axis_name="replica"))
    spreads = []
    for _ in range(60):
        moved = {"w": np.asarray(params["w"]) + (rate * rng.normal(size=(8, *shape))).astype(np.float32)}
        params, state = step(moved, state)
        spreads.append(np.asarray(params["w"]).std(0) / rate)
    fast = np.moveaxis(np.mean(spreads[-20:], axis=0), shape.index(260), 0)[::50]
    assert fast.max() < 3


@pytest.mark.parametrize("delay", [0, 1])
def test_an_outer_step_changes_the_windows_of_its_fragment_alone(delay):
    fragments = {"sync_every": 2, "fragments": 2, "delay": delay}
    outer = nj.noloco(nj.RandomPairing(8), 1.0, 0.0, 1.0, axis_name="replica", wire="modulo4", **fragments)
    tree = replicas(1.0, (4, 128))  # of each row every second weight is one block, and the others are one
    state: Any = jax.vmap(outer.init)(tree)
    step: Any = jax.jit(jax.vmap(outer.step, axis_name="replica"))
    for number in range(4):
        before = state.windows["w"]
        moved = {"w": tree["w"] * 10.0**number}
        _, state = step(moved, state)
        changed = np.asarray(state.windows["w"] != before)
        assert changed.shape == (8, 4, 2)
        assert changed[..., number % 2].all() and not changed[..., 1 - number % 2].any()


RARE = [
    # replicas, outer lr, momentum, consensus, momentum of, chance of a push a round
    (8, 0.7, 0.7, 0.7, "steps", 0.1),
    (8, 1.0, 0.3, 1.0, "corrections", 0.01),
]


@pytest.mark.parametrize("setting", RARE, ids=lambda setting: f"{setting[0]} replicas, pushed {setting[-1]:g}")
def test_rarely_moving_rows_stay_close_and_converge_once_they_stop(setting):
    """Embedding rows of rare tokens move like this; a window that forgets would wrap there repeatedly."""
    exact, coded = (spreads(setting, wire) for wire in ("float32", "modulo4"))
    assert rms(coded[100:200]) < 3 * rms(exact[100:200])  # four bits are coarse
    assert coded[-1].max() < 5e-2 * rms(coded[100:200])


def test_too_high_a_momentum_of_corrections_warns():
    with pytest.warns(UserWarning, match="outer_momentum 0.8 of corrections.*wire='modulo4'.*use at most 0.6"):
        nj.noloco(nj.RandomPairing(8), 0.7, 0.8, 0.7, wire="modulo4", momentum_of="corrections")


def rms(x):
    return np.sqrt(np.mean(np.square(x)))


def spreads(setting, wire, pushed=200, quiet=140, rows=24):
    """Return the replicas' spread, (rounds, rows): rows are pushed at random for `pushed` rounds, then not."""
    n, lr, momentum, consensus, momentum_of, chance = setting
    outer = nj.noloco(nj.RandomPairing(n), lr, momentum, consensus, sync_every=1, wire=wire, momentum_of=momentum_of)
    rng = np.random.default_rng(0)
    params = {"w": np.broadcast_to(0.02 * rng.normal(size=(1, rows, 64)), (n, rows, 64)).astype(np.float32)}
    pushes = 1e-3 * rng.normal(size=(pushed + quiet, n, rows, 64)) * (rng.random((pushed + quiet, n, rows, 1)) < chance)
    pushes[pushed:] = 0
    step = jax.vmap(outer.step, axis_name="replica")

    def round_of(carry, push):
        params, state = step({"w": carry[0]["w"] + push}, carry[1])
        return (params, state), jnp.std(params["w"], axis=0)

    _, found = jax.jit(lambda *args: jax.lax.scan(round_of, args[:2], args[2]))(
        params, jax.vmap(outer.init)(params), pushes.astype(np.float32)
    )
    return np.sqrt(np.mean(np.square(found), axis=-1))
