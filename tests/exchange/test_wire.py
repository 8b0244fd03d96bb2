"""Messages of a round: one array for all weights, quantized by the wire."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import noloco_jax as nj
from noloco_jax.optim.exchange.blocks import pack, smallest_and_largest, unpack
from noloco_jax.optim.exchange.wire import WIRES, from_code, to_code
from support.exchanges import exchange_of
from support.layouts import axis_of, over_replicas, random_tree, state_at_start
from support.oracle import BITS, ROUNDED, grid_steps, noloco_step
from support.oracle import group_mean as oracle_mean

PAIRS = [[0, 3], [1, 2], [4, 6], [5, 7]]

every_rounding_wire = pytest.mark.parametrize("wire", ROUNDED)
every_block_wire = pytest.mark.parametrize(("wire", "bits"), BITS.items())


def exchange(tree, wire, groups=PAIRS, layout=8, options=None):
    """Return the means that replicas receive in a round of these groups."""
    means, _ = jax.jit(exchange_of(groups, wire, layout), compiler_options=options)(tree)
    return jax.device_get(means)


def sent(wire, x):
    """Return Q(x): one array encoded and decoded by the wire."""
    return np.asarray(_sent(wire, x))


@functools.partial(jax.jit, static_argnums=0)
def _sent(wire, x):
    code: Any = WIRES[wire]
    return from_code(code, code.decode(code.encode(to_code(code, x, None))), x, None)


def heavy_tailed(*shape):
    """Weights of all sizes: most are tiny, a few are enormous, a stretch of whole blocks is zero."""
    rng = np.random.default_rng(7)
    x = (rng.standard_t(1, size=shape) * 10.0 ** rng.integers(-6, 3, size=shape)).astype(np.float32)
    x[..., 64:200] = 0
    return x


@every_rounding_wire
@pytest.mark.parametrize("layout", [8, (2, 4)])
def test_pairs_apply_exactly_opposite_corrections_from_their_rounded_weights(layout, wire):
    trees = random_tree(0, 8) | {"tails": heavy_tailed(8, 333)}
    means = exchange(trees, wire, layout=layout)
    partner = np.empty(8, int)
    for i, j in PAIRS:
        partner[[i, j]] = j, i
    for name, x in trees.items():
        rounded = np.stack([ROUNDED[wire](one) for one in x]).astype(np.float32)
        correction = (rounded[partner] - rounded) / 2
        np.testing.assert_array_equal(correction + correction[partner], 0)
        np.testing.assert_array_equal(means[name], x + correction)


# Each kind of wire with each of the groups, and each layout with every wire and with each of the groups.
@pytest.mark.parametrize(
    ("layout", "groups", "wire"),
    [
        ([6, (3, 2)][(row + column) % 2], groups, wire)
        for row, groups in enumerate([[[0, 1, 2], [3, 4, 5]], [[0, 5, 2, 4], [1, 3]], [[0, 1, 2, 3, 4, 5]]])
        for column, wire in enumerate(["bfloat16", "int8", "int4"])
    ],
)
def test_larger_groups_apply_corrections_towards_the_mean_of_rounded_weights(layout, groups, wire):
    """Leaves fill no whole blocks."""
    trees = random_tree(0, 6) | {"blocks": np.random.default_rng(1).normal(size=(6, 333)).astype(np.float32)}
    means = exchange(trees, wire, groups, layout)
    for name, x in trees.items():
        rounded = np.stack([ROUNDED[wire](one) for one in x]).astype(np.float64)
        correction = oracle_mean(rounded, groups) - rounded
        np.testing.assert_allclose(means[name], x + correction, rtol=1e-5, atol=1e-6)


# Sizes 3 and 7 divide inexactly.
@pytest.mark.parametrize(
    ("group_size", "wire"),
    [(2, "int4"), (3, "float32"), (3, "bfloat16"), (3, "int8"), (7, "float32"), (7, "int4"), (8, "bfloat16")],
)
def test_equal_replicas_keep_their_values_through_every_wire(group_size, wire):
    """The compiler option makes XLA multiply by 1/3 instead of dividing by 3, as in a user's run."""
    x = np.broadcast_to(heavy_tailed(333), (8, 333))
    options = {"xla_backend_optimization_level": 3}
    means = exchange(x, wire, nj.RandomPairing(8, group_size, max_pool=4).pool[-1], options=options)
    np.testing.assert_array_equal(means, x)


@pytest.mark.parametrize("layout", [8, (2, 4)])
def test_an_outer_step_through_int4_keeps_the_replica_mean_of_float32(layout):
    """One program computes message and step: a sender that rounded its own copy differently would shift the mean."""
    theta, slow, momentum = ({"w": np.random.default_rng(seed).normal(size=(8, 999))} for seed in range(3))
    state = state_at_start(8, *jax.tree.map(np.float32, (slow, momentum)))
    pairing = nj.RandomPairing(8)
    groups = pairing.pool[int(pairing.pool_index(0))]
    outer = nj.noloco(pairing, 0.7, 0.5, 0.4, axis_name=axis_of(layout), wire="int4")
    params, state = jax.jit(over_replicas(outer.step, layout))(jax.tree.map(np.float32, theta), state)
    expected, _ = noloco_step(theta["w"], slow["w"], momentum["w"], groups=groups, alpha=0.5, beta=0.7, gamma=0.4)
    received = np.asarray(params["w"], np.float64)
    assert np.abs(received - expected).max() > 0.1  # four bits are coarse
    np.testing.assert_allclose(received.mean(axis=0), expected.mean(axis=0), atol=1e-6)


@every_rounding_wire
def test_an_unpaired_replica_keeps_its_values_through_a_rounding_wire(wire):
    x = heavy_tailed(3, 333)
    np.testing.assert_array_equal(exchange(x, wire, [[0, 1], [2]], 3)[2], x[2])


@every_block_wire
def test_quantization_errors_are_at_most_half_a_grid_step_of_the_block(wire, bits):
    for scale in (1.0, 100.0, 1e-30):
        x = heavy_tailed(1000) * np.float32(scale)
        assert np.all(np.abs(sent(wire, x).astype(np.float64) - x) <= grid_steps(x, bits) / 2)


@every_block_wire
@pytest.mark.parametrize("size", [1e-36, 1e-38, 1e-44])
def test_blocks_at_the_end_of_the_range_stay_tiny(wire, bits, size):
    del bits
    x = np.zeros(192, np.float32)
    x[[3, 70]] = size, -size / 3
    assert np.abs(sent(wire, x)).max() < 2e-36  # not NaN either


@every_block_wire
def test_a_blocks_largest_weight_has_bfloat16_precision_and_zeros_are_exact(wire, bits):
    x = np.zeros(192, np.float32)
    x[[3, 70]] = 1.2345, -6.789e-5
    limit = 2 ** (bits - 1) - 1
    received = sent(wire, x)
    assert np.flatnonzero(received).tolist() == [3, 70]
    np.testing.assert_array_equal(received[[3, 70]], np.sign(x[[3, 70]]) * limit * grid_steps(x, bits)[[3, 70]])
    np.testing.assert_allclose(received, x, rtol=2**-8)


@pytest.mark.parametrize(
    ("groups", "wire"), [(PAIRS, "bfloat16"), (PAIRS, "int4"), ([[0, 1, 2], [3, 4, 5], [6, 7]], "int4")]
)
def test_non_finite_values_reach_their_group_and_affect_only_their_block(groups, wire):
    x = np.random.default_rng(0).normal(size=(8, 80 * 64)).astype(np.float32)  # XLA treats 4096 numbers differently
    trees = {"clean": x} | {name: x.copy() for name in ("nan", "inf", "-inf")}
    for name in ("nan", "inf", "-inf"):
        trees[name][0, 70] = float(name)
    means = exchange(trees, wire, groups)
    (group,) = [group for group in groups if 0 in group]
    block = np.zeros(x.shape, bool)
    block[group, 64:128] = True
    for name in ("nan", "inf", "-inf"):
        assert not np.isfinite(means[name][group, 70]).any()
        np.testing.assert_array_equal(means[name][~block], means["clean"][~block])


@pytest.mark.parametrize("shape", [(3, 64), (64, 64), (2, 4096), (8192, 4)])
def test_the_extremes_of_a_row_are_those_of_numpy_with_nan_and_infinities(shape):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    x[0], x[1, :2], x[1, 2] = -0.0, (-np.inf, 0.0), -1e-40
    for nan in (np.nan, -np.nan, np.uint32(0x7F800001).view(np.float32)):
        x[2 % shape[0], 1] = nan
        smallest, largest = jax.jit(smallest_and_largest)(x)
        np.testing.assert_array_equal(smallest, np.abs(x).min(axis=-1, keepdims=True))
        np.testing.assert_array_equal(largest, np.abs(x).max(axis=-1, keepdims=True))


@pytest.mark.parametrize("bits", [2, 4, 8, 12])
def test_packed_numbers_fill_their_bits_and_unpack_unchanged(bits):
    numbers = np.random.default_rng(bits).integers(2**bits, size=(5, 64)).astype(np.uint32)
    packed = pack(jnp.asarray(numbers), bits)
    assert packed.dtype == jnp.uint8 and packed.shape == (5, 8 * bits)
    np.testing.assert_array_equal(unpack(packed, bits), numbers)
