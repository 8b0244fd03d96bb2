"""The quantized mean of all replicas, against numpy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import noloco_jax as nj
from noloco_jax.optim.exchange.all_reduce import AllExchange
from noloco_jax.optim.exchange.wire import Blocks, wire_of
from noloco_jax.optim.rule import Outgoing
from support.exchanges import LAST
from support.layouts import Layout, axis_of, over_replicas, state_at_start
from support.oracle import BITS, ROUNDED, diloco_step, grid_steps

N = 8
LAYOUTS: tuple[Layout, ...] = (N, (8, 1), (4, 2), (1, 8))
SHAPES = {"scalar": (), "norm": (33,), "matrix": (5, 130)}  # 1, 1 and 15 blocks, which 8 devices do not share evenly

every_wire = pytest.mark.parametrize("wire", ROUNDED)


def tree(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_t(3, size=(N, *shape)).astype(np.float32) for name, shape in SHAPES.items()}


def mean_of(message: Any, wire: str, layout: Layout = N) -> Any:
    wire_format: Any = wire_of(wire)
    exchange = AllExchange(wire_format, axis_of(layout))
    mean = over_replicas(lambda x: exchange.mean(Outgoing(x), jnp.int32(0), LAST)[0], layout)
    return jax.device_get(jax.jit(mean)(message))


def assert_is_rounded(actual: np.ndarray, x: np.ndarray, wire: str) -> None:
    """Check that an array is the mean of all replicas' Q(x), within half a step of the grid of that mean."""
    mean = np.stack([ROUNDED[wire](one) for one in x]).mean(axis=0, dtype=np.float64)
    step = grid_steps(mean.astype(np.float32), BITS[wire]) if wire in BITS else 2.0**-7 * np.abs(mean)
    assert np.all(np.abs(actual - mean) <= step * (0.5 + 2**-7) + 1e-6)


@every_wire
def test_all_replicas_receive_the_rounded_mean_of_rounded_messages(wire):
    message = tree(0)
    for name, mean in mean_of(message, wire).items():
        np.testing.assert_array_equal(mean, np.broadcast_to(mean[:1], mean.shape))
        assert_is_rounded(mean[0], message[name], wire)


@pytest.mark.parametrize("wire", ["bfloat16", "int4"])
def test_the_mean_is_bitwise_equal_on_every_layout(wire):
    first, *others = (mean_of(tree(1), wire, layout) for layout in LAYOUTS)
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, other, first)


@pytest.mark.parametrize("nesterov", [False, True])
def test_quantized_diloco_steps_along_the_rounded_mean(nesterov):
    outer = nj.diloco(0.5, 0.25, nesterov, wire="int4")
    slow, momentum = (jax.tree.map(lambda x: np.broadcast_to(x[:1], x.shape), tree(seed)) for seed in (0, 1))
    theta = jax.tree.map(np.add, slow, tree(2))
    params, state = jax.jit(jax.vmap(outer.step, axis_name="replica"))(theta, state_at_start(N, slow, momentum))
    for name, x in theta.items():
        before = {"phi": slow[name], "delta": momentum[name], "alpha": 0.25, "beta": 0.5, "nesterov": nesterov}
        still, _ = diloco_step(slow[name], **before)  # of replicas that have not moved
        gain = 1.25 if nesterov else 1
        assert_is_rounded((state.rule.slow[name][0] - still[0]) / gain, (x - slow[name]) / 2, "int4")
        np.testing.assert_array_equal(params[name], np.broadcast_to(params[name][:1], x.shape))


def test_a_replica_alone_keeps_its_own_message():
    exchange = AllExchange(Blocks("int4"), "replica")
    x = tree(3)["matrix"][:1]
    mean = jax.jit(over_replicas(lambda x: exchange.mean(Outgoing(x), jnp.int32(0), LAST)[0], 1))(x)
    np.testing.assert_array_equal(mean, x)


def test_a_nan_reaches_all_replicas_and_only_its_block():
    x = np.random.default_rng(0).normal(size=(N, 3 * 64)).astype(np.float32)
    bad = x.copy()
    bad[3, 70] = np.nan
    clean, mean = mean_of(x, "int4"), mean_of(bad, "int4")
    assert np.isnan(mean[:, 64:128]).all()
    np.testing.assert_array_equal(np.delete(mean, np.s_[64:128], 1), np.delete(clean, np.s_[64:128], 1))
