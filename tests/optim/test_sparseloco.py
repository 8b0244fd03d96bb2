"""SparseLoCo against numpy: sparsification, encoding and the outer step."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import noloco_jax as nj
from noloco_jax.optim.exchange.blocks import tree_from_blocks, tree_in_blocks
from noloco_jax.optim.exchange.sparseloco import Feedback, SparseExchange, decode, encode
from noloco_jax.optim.exchange.sparseloco import sparsified as of_chunks
from noloco_jax.optim.fragments import Fragments
from noloco_jax.optim.rule import OuterState, Outgoing
from noloco_jax.optim.wire_sizes import CHUNK
from support.layouts import axis_of, every_layout, over_replicas, some_devices
from support.oracle import ROUNDED

N = 8
SHAPES = {"scalar": (), "norm": (33,), "matrix": (130, 70)}  # chunks of eight rows, the last of two


def tree(seed: int, n: int = N) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_t(3, size=(n, *shape)).astype(np.float32) for name, shape in SHAPES.items()}


def sparsified(x: np.ndarray, top_k: int = 64) -> np.ndarray:
    """Return Q(TOP-k(x)) of one replica's array, chunk by chunk: eight rows each, or as much of a row as fits."""
    rows = x.reshape(-1, x.shape[-1] if x.ndim else 1)
    if len(rows) >= 32 and 8 * rows.shape[1] <= 4096:
        rows = np.pad(rows, ((0, -len(rows) % 8), (0, 0))).reshape(-1, 8 * rows.shape[1])
    parts = math.ceil(rows.shape[1] / 4096)
    chunk = math.ceil(rows.shape[1] / parts / 8) * 8
    kept = max(4, 4 * math.ceil(chunk * top_k / 4096 / 4))
    length, padding = rows.shape[1], parts * chunk - rows.shape[1]
    flat = np.pad(rows, ((0, 0), (0, padding))).ravel()
    result = np.zeros_like(flat)
    for first in range(0, flat.size, chunk):
        part = flat[first : first + chunk]
        places = np.argsort(-np.abs(part), kind="stable")[:kept]
        sizes = np.abs(part[places])
        is_large = sizes > (sizes.mean(dtype=np.float32) if sizes.min() > 0 else 0)
        for chosen in (is_large, ~is_large):
            if chosen.any():
                size = ROUNDED["bfloat16"](np.asarray(sizes[chosen].mean(dtype=np.float32)))
                result[first + places[chosen]] = np.sign(part[places[chosen]]) * size
    return result.reshape(len(rows), -1)[:, :length].ravel()[: x.size].reshape(x.shape)


def sparsify(x: Any, top_k: int) -> Any:
    """Return Q(TOP-k(x)) of one replica's array, by the exchange."""
    return tree_from_blocks(of_chunks(tree_in_blocks(x, largest=CHUNK), top_k), x, largest=CHUNK)


def stacked(fn: Any, x: np.ndarray) -> np.ndarray:
    return np.stack([fn(one) for one in x])


AWKWARD = {
    "heavy tails": np.random.default_rng(7).standard_t(1, size=9000),
    "zeros": np.zeros(5000),
    "few that are not zero": np.where(np.arange(5000) % 997 == 0, -2.5, 0),
    "all equal": np.full(5000, -0.75),
    "tiny": 1e-30 * np.random.default_rng(1).normal(size=300),
    "one": np.array([3.0]),
    "of 256": np.random.default_rng(2).normal(size=256),
    "of 257": np.random.default_rng(3).normal(size=257),
}


@pytest.mark.parametrize("top_k", [1, 64, 4096])
def test_sparse_arrays_survive_encoding_exactly(top_k):

    @jax.jit  # compiled once for all arrays of a shape
    def travel(x: jax.Array) -> Any:
        chunks = of_chunks(tree_in_blocks(x, largest=CHUNK), top_k)
        code = encode(chunks, top_k)
        arrived = decode(code, chunks.shape[-1], top_k)
        return *(tree_from_blocks(y, x, largest=CHUNK) for y in (chunks, arrived)), code

    for x in (x.astype(np.float32) for x in AWKWARD.values()):
        sparse, arrived, code = travel(x)
        assert code.dtype == jnp.uint8
        np.testing.assert_array_equal(arrived, sparse)
        np.testing.assert_allclose(sparse, sparsified(x, top_k), rtol=2**-7)


@pytest.mark.parametrize(("size", "number"), [(10 * 4096, 10 * (64 * 14 // 8 + 4)), (100, 4 + 4 + 4 // 4)])
def test_an_encoded_message_has_the_papers_number_of_bytes(size, number):
    code = jax.eval_shape(lambda x: encode(tree_in_blocks(x, largest=CHUNK), 64), jnp.ones(size))
    assert code.size == number and code.dtype == jnp.uint8


@pytest.mark.parametrize("number", [2, 200], ids=lambda number: f"{number} chunks")
@pytest.mark.parametrize("others", ["many", "few", "none"])
def test_a_nan_is_received_as_nan_and_leaves_other_chunks_alone(others, number):
    """Beside it the chunk has more nonzero entries than are kept, fewer, or none; XLA's CPU maximum passes over it."""
    x = np.random.default_rng(0).normal(size=(number, 4096)).astype(np.float32)
    x[0, {"many": 4096, "few": 20, "none": 0}[others] :] = 0
    x[0, 17] = np.nan
    sparse, code = jax.jit(lambda x: (y := of_chunks(x, 64), encode(y, 64)))(x)
    arrived = np.asarray(jax.jit(lambda code: decode(code, 4096, 64))(code))
    np.testing.assert_array_equal(arrived, sparse)
    kept = arrived[0] != 0
    assert kept.sum() == 64 and kept[17] and np.isnan(arrived[0][kept]).all()
    np.testing.assert_array_equal(arrived[1], sparsified(x[1]))


@every_layout
def test_outer_steps_match_the_papers_algorithm_round_by_round(layout):
    """Compare with Algorithm 1, the sign of Δ reversed; all replicas end bitwise equal."""
    alpha, beta = 0.8, 0.9
    outer = nj.sparseloco(alpha, beta, axis_name=axis_of(layout))
    step = jax.jit(over_replicas(outer.step, layout))
    slow = jax.tree.map(lambda x: np.broadcast_to(x[:1], x.shape).copy(), tree(0))
    zeros: Any = np.zeros(N, np.int32)
    state: Any = OuterState(zeros, zeros, Feedback(slow, tree(1)))
    for round in range(3):
        theta = jax.tree.map(np.add, state.rule.slow, tree(2 + round))
        before = state
        params, state = jax.device_get(step(theta, state))
        for name, x in theta.items():
            phi, error = before.rule.slow[name], before.rule.error[name]
            total = np.float32(beta) * error + (x - phi)
            sent = stacked(sparsified, total)
            np.testing.assert_allclose(state.rule.slow[name], phi + alpha * sent.mean(axis=0), rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(state.rule.error[name], total - sent, atol=0.02)  # the sizes have 8 bits
            np.testing.assert_array_equal(params[name], state.rule.slow[name])
            np.testing.assert_array_equal(params[name], np.broadcast_to(params[name][:1], x.shape))


def test_error_feedback_loses_nothing():
    """With β = 1, the entries sent and the error left add up to Δ; with α = 1, weights move by the entries sent."""
    outer = nj.sparseloco(1.0, 1.0)
    step = jax.jit(jax.vmap(outer.step, axis_name="replica"))
    params: Any = jax.tree.map(lambda x: np.broadcast_to(x[:1], x.shape), tree(0))
    state, first = jax.vmap(outer.init)(params), params
    moved = jax.tree.map(np.zeros_like, params)
    for round in range(5):
        theta = jax.tree.map(np.add, params, tree(1 + round))
        moved = jax.tree.map(lambda total, x, phi: total + (x - phi), moved, theta, params)
        params, state = jax.device_get(step(theta, state))
    assert isinstance(state, OuterState)
    for name, total in moved.items():
        sent = params[name][0] - first[name][0]
        np.testing.assert_allclose(sent + state.rule.error[name].mean(axis=0), total.mean(axis=0), atol=2e-5)


def test_every_fragment_has_its_own_error_feedback():
    outer = nj.sparseloco(1.0, 0.9, sync_every=2, fragments=2)
    step = jax.jit(jax.vmap(outer.step, axis_name="replica"))
    params = {"x": np.zeros((N, 64, 64), np.float32)}
    theta = {"x": np.random.default_rng(0).normal(size=(N, 64, 64)).astype(np.float32)}
    after, state = step(theta, jax.vmap(outer.init)(params))
    is_first = np.arange(64) // 4 % 2 == 0  # runs of 4 rows
    part = theta["x"][:, is_first]
    sent = stacked(sparsified, part)
    np.testing.assert_allclose(after["x"][:, is_first], np.broadcast_to(sent.mean(axis=0), part.shape), atol=1e-2)
    np.testing.assert_array_equal(after["x"][:, ~is_first], theta["x"][:, ~is_first])
    np.testing.assert_array_equal(state.rule.error["x"][:, ~is_first], 0)


def test_a_sharded_array_is_sent_like_an_unsharded_one():
    axes = ("replica", "fsdp", "tensor")
    mesh = jax.make_mesh((2, 2, 2), axes, (AxisType.Auto,) * 3, devices=some_devices(8))
    exchange, specs = (
        SparseExchange(64, "replica"),
        {"blocks": P("replica", None, "fsdp", "tensor"), "norm": P("replica")},
    )
    on_mesh = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    shapes = {"blocks": (2, 2, 64, 128), "norm": (2, 64)}
    last = Fragments(1, lambda path, shape: len(shape) - 1)
    rng = np.random.default_rng(0)
    x = {name: rng.normal(size=shapes[name]).astype(np.float32) for name in shapes}

    def body(block: Any) -> Any:
        found, _ = exchange.mean(Outgoing(jax.tree.map(lambda x: x[0], block)), 0, last)
        return jax.tree.map(lambda x: x[None], (found.own, found.mean))

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=P("replica"), out_specs=P("replica"), axis_names={"replica"}, check_vma=False
    )
    sent, mean = jax.device_get(jax.jit(mapped, out_shardings=(on_mesh, on_mesh))(jax.device_put(x, on_mesh)))
    for name in shapes:
        np.testing.assert_array_equal(sent[name], [np.asarray(sparsify(one, 64)) for one in x[name]])
        np.testing.assert_allclose(mean[name], np.broadcast_to(sent[name].mean(axis=0), shapes[name]), atol=1e-7)


def test_entries_of_one_size_run_under_debug_nans():
    """None of them is larger than the mean; not compiled, as `jax_debug_nans` runs a program that found a NaN."""
    x = jnp.array([2.0, -2.0, 2.0, -2.0, 2.0, -2.0, 2.0, -2.0])
    with jax.debug_nans(True), jax.disable_jit():
        sent = sparsify(x, 4096)
    np.testing.assert_array_equal(sent, x)
