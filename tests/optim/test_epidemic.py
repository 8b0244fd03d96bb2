"""Epidemic Learning against numpy: the graphs, and the outer step that averages along them."""

import math
from typing import Any

import jax
import numpy as np
import pytest

import noloco_jax as nj
from noloco_jax.optim.rule import OuterState
from support.layouts import assert_trees_close, axis_of, over_replicas
from support.oracle import ROUNDED

N = 8
SIZES = [(2, 1), (5, 2), (6, 3), (8, 3), (8, 7), (96, 7), (100, 1)]

every_size = pytest.mark.parametrize(("n", "degree"), SIZES)


def tree(seed: int, n: int = N) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(n, *shape)).astype(np.float32) for name, shape in {"a": (6, 4), "b": ()}.items()}


def start(rule: Any = ()) -> OuterState:
    zeros: Any = np.zeros(N, np.int32)
    return OuterState(zeros, zeros, rule)


def weights(graph: Any) -> np.ndarray:
    """Return the mixing matrix W: the values after a round are W times those before it."""
    matrix = np.zeros((len(graph), len(graph)))
    for i, *senders in graph:
        matrix[i, [i, *senders]] = 1 / (1 + len(senders))
    return matrix


@every_size
def test_every_replica_has_degree_senders_and_degree_receivers(n, degree):
    for graph in nj.RandomNeighbours(n, degree, seed=3).pool:
        assert [i for i, *_ in graph] == list(range(n))
        assert all(len({i, *senders}) == 1 + degree for i, *senders in graph)
        np.testing.assert_allclose(weights(graph).sum(axis=0), 1)
        for k in range(1, 1 + degree):  # one collective moves this position of all groups
            assert sorted(group[k] for group in graph) == list(range(n))


@pytest.mark.parametrize(("n", "degree"), [(2, 1), (5, 2), (6, 3), (8, 3), (8, 7), (9, 8)])
def test_the_full_pool_mixes_at_the_papers_rate_for_regular_graphs(n, degree):
    """E[WᵀW] scales deviations from the mean by β_s = (1 − s / (n − 1)) / (s + 1) (Lemma 1, EL-Oracle)."""
    pool = nj.RandomNeighbours(n, degree).pool
    assert len(pool) == math.comb(n - 1, degree)
    mean = np.full((n, n), 1 / n)
    expected = mean + (1 - degree / (n - 1)) / (degree + 1) * (np.eye(n) - mean)
    np.testing.assert_allclose(np.mean([weights(g).T @ weights(g) for g in pool], axis=0), expected, atol=1e-12)


def test_a_sampled_pool_has_the_maximum_size_and_uses_shifts_evenly():
    pool = nj.RandomNeighbours(96, 7, seed=1).pool
    assert len(set(pool)) == len(pool) == 64
    shifts = np.bincount([group for graph in pool for group in graph[0][1:]], minlength=96)[1:]
    assert shifts.sum() == 64 * 7 and shifts.min() >= 3 and shifts.max() <= 5
    assert nj.RandomNeighbours(96, 7, seed=2).pool != pool


def test_the_default_number_of_neighbours_is_log2_of_the_replicas_rounded_up():
    assert [nj.RandomNeighbours(n).degree for n in (1, 2, 3, 8, 9, 96)] == [0, 1, 2, 3, 4, 7]


@pytest.mark.parametrize("layout", [8, (8, 1), (4, 2), 5, (5, 1), (2, 3), 1])
def test_outer_steps_average_along_the_graph_of_their_round(layout):
    n = layout if isinstance(layout, int) else math.prod(layout)
    neighbours = nj.RandomNeighbours(n, seed=5)
    step = jax.jit(over_replicas(nj.epidemic(neighbours, axis_name=axis_of(layout)).step, layout))
    zeros: Any = np.zeros(n, np.int32)
    state = OuterState(zeros, zeros, ())
    for round in range(3):
        theta = tree(round, n)
        params, state = jax.device_get(step(theta, state))
        matrix = weights(neighbours.pool[int(neighbours.pool_index(round))])
        assert_trees_close(params, {name: np.tensordot(matrix, x, 1) for name, x in theta.items()})
        np.testing.assert_array_equal(state.num_outer_steps, round + 1)


@pytest.mark.parametrize("wire", ROUNDED)
@pytest.mark.parametrize("layout", [8, (4, 2)])
def test_a_rounding_wire_preserves_the_mean_and_equal_replicas(layout, wire):
    outer = nj.epidemic(nj.RandomNeighbours(N, seed=5), axis_name=axis_of(layout), wire=wire)
    step = jax.jit(over_replicas(outer.step, layout))
    theta = tree(2)
    theta["a"] = theta["a"].swapaxes(1, 2)  # blocks lie along the longest dimension, the oracle's along the last
    params, _ = step(theta, start())
    for name, x in theta.items():
        rounded = np.stack([ROUNDED[wire](one) for one in x]).astype(np.float64)
        matrix = weights(nj.RandomNeighbours(N, seed=5).pool[int(nj.RandomNeighbours(N, seed=5).pool_index(0))])
        np.testing.assert_allclose(params[name], x + np.tensordot(matrix, rounded, 1) - rounded, atol=1e-6)
        np.testing.assert_allclose(np.mean(params[name], axis=0), x.mean(axis=0), atol=1e-6)
    same = jax.tree.map(lambda x: np.broadcast_to(x[:1], x.shape), theta)
    params, _ = step(same, start())
    jax.tree.map(np.testing.assert_array_equal, params, same)


def test_a_delayed_correction_averages_its_fragment_only():
    neighbours = nj.RandomNeighbours(N, seed=5)
    outer = nj.epidemic(neighbours, sync_every=2, fragments=2, delay=1)
    step, correct = (jax.jit(jax.vmap(fn, axis_name="replica")) for fn in (outer.step, outer.apply))
    theta = {"a": tree(0)["a"]}
    state: Any = jax.vmap(outer.init)(theta)
    assert state.rule == ()
    params, state = step(theta, state)
    assert_trees_close(params, theta)  # alone, a replica stays where it is
    params, state = correct(params, state)
    matrix = weights(neighbours.pool[int(neighbours.pool_index(0))])
    expected = theta["a"].copy()
    expected[:, ::2] = np.tensordot(matrix, expected, 1)[:, ::2]
    assert_trees_close(params["a"], expected)
