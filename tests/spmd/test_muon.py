"""Muon's steps against numpy, one layer's matrix at a time, on every layout."""

import dataclasses
import functools
from collections import Counter
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from noloco_jax.config import InnerConfig, ModelConfig, TrainConfig
from noloco_jax.spmd import sharding
from noloco_jax.spmd.inner import inner_optimizer, learning_rates
from noloco_jax.spmd.mesh import AXES, mesh_of
from support.compiled_text import Found, collectives_in
from support.model_makers import random_params

PyTree = Any
INNER = InnerConfig(optimizer="muon", lr=0.02, adam_lr=3e-3, min_lr=0.002, warmup_steps=2, b2=0.99, weight_decay=0.1)


def run_config(num_layers: int = 2) -> TrainConfig:
    model = ModelConfig(
        hidden_size=16, intermediate_size=48, num_layers=num_layers, num_heads=2, num_kv_heads=1, vocab_size=24
    )
    return TrainConfig(num_steps=5, model=model, inner=INNER)


def gradients_of(config: TrainConfig, num_steps: int) -> list:
    shapes = random_params(config.model)
    rng = np.random.default_rng(1)
    return [jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes) for _ in range(num_steps)]


def orthogonal(x_IO: np.ndarray) -> np.ndarray:
    """Return Newton-Schulz as Jordan prints it, for a matrix with more columns than rows or its transpose."""
    if x_IO.shape[0] > x_IO.shape[1]:
        return orthogonal(x_IO.T).T
    x_IO = x_IO / np.linalg.norm(x_IO)
    for _ in range(5):
        gram = x_IO @ x_IO.T
        x_IO = 3.4445 * x_IO + (-4.7750 * gram + 2.0315 * gram @ gram) @ x_IO
    return x_IO


def muon_in_numpy(
    theta: np.ndarray, gradients: list[np.ndarray], rates: np.ndarray, decay: float = 0.95, share: float = 0.95
) -> np.ndarray:
    """Return one matrix after a step for every gradient, in float64."""
    theta, momentum = theta.astype(np.float64), np.zeros(theta.shape)
    for gradient, rate in zip(gradients, rates, strict=True):
        momentum = decay * momentum + (1 - decay) * gradient
        direction = orthogonal(share * momentum + (1 - share) * gradient)
        scale = np.sqrt(max(1.0, theta.shape[1] / theta.shape[0]))
        theta = theta - rate * (scale * direction + INNER.weight_decay * theta)
    return theta


def adam_in_numpy(theta: np.ndarray, gradients: list[np.ndarray], rates: np.ndarray) -> np.ndarray:
    theta, first, second = theta.astype(np.float64), np.zeros(theta.shape), np.zeros(theta.shape)
    for t, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        first = INNER.b1 * first + (1 - INNER.b1) * gradient
        second = INNER.b2 * second + (1 - INNER.b2) * gradient.astype(np.float64) ** 2
        direction = first / (1 - INNER.b1**t) / (np.sqrt(second / (1 - INNER.b2**t)) + INNER.eps)
        theta = theta - rate * (direction + INNER.weight_decay * theta)
    return theta


@pytest.fixture(scope="module")
def three_steps() -> tuple[PyTree, list[PyTree], PyTree, np.ndarray]:
    return train_three_steps(run_config())


def train_three_steps(config: TrainConfig) -> tuple[PyTree, list[PyTree], PyTree, np.ndarray]:
    """Return parameters, three gradients, the parameters after their steps, and the learning rates."""
    optimizer = inner_optimizer(config.model, config.inner, config.num_steps)
    params, gradients = random_params(config.model), gradients_of(config, 3)
    state, trained = jax.jit(optimizer.init)(params), params
    update = jax.jit(optimizer.update)
    for gradient in gradients:
        updates, state = update(gradient, state, trained)
        trained = jax.tree.map(np.add, trained, updates)
    return params, gradients, trained, learning_rates(config.inner, config.num_steps)[:3]


@pytest.mark.parametrize("name", ["q", "k", "gate", "down"])
def test_every_layers_matrix_is_orthogonalized_separately(three_steps, name):
    params, gradients, trained, rates = three_steps
    for layer in range(2):
        expected = muon_in_numpy(
            params["blocks"][name][layer], [tree["blocks"][name][layer] for tree in gradients], rates
        )
        np.testing.assert_allclose(trained["blocks"][name][layer], expected, rtol=1e-5, atol=2e-5)


def test_momentums_share_is_quasi_hyperbolic():
    inner = dataclasses.replace(INNER, momentum=0.98, momentum_share=0.8)
    params, gradients, trained, rates = train_three_steps(dataclasses.replace(run_config(), inner=inner))
    weights = [tree["blocks"]["q"][1] for tree in (params, *gradients)]
    expected = muon_in_numpy(weights[0], weights[1:], rates, 0.98, 0.8)
    np.testing.assert_allclose(trained["blocks"]["q"][1], expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("path", [("embed",), ("head",), ("norm",), ("blocks", "mlp_norm")])
def test_adam_steps_other_parameters_at_its_own_rate_on_the_same_schedule(three_steps, path):
    params, gradients, trained, rates = three_steps
    for name in path:
        params, trained, gradients = params[name], trained[name], [tree[name] for tree in gradients]
    expected = adam_in_numpy(params, gradients, rates * INNER.adam_lr / INNER.lr)
    np.testing.assert_allclose(trained, expected, rtol=1e-5, atol=1e-6)


def test_adams_rate_defaults_to_a_tenth_of_muons():
    config = run_config()
    config = dataclasses.replace(config, inner=dataclasses.replace(INNER, adam_lr=None))
    optimizer = inner_optimizer(config.model, config.inner, config.num_steps)
    params, [gradient] = random_params(config.model), gradients_of(config, 1)
    updates: PyTree
    updates, _ = jax.jit(optimizer.update)(gradient, jax.jit(optimizer.init)(params), params)
    rates = learning_rates(config.inner, config.num_steps)[:1] / 10
    expected = adam_in_numpy(params["embed"], [gradient["embed"]], rates)
    np.testing.assert_allclose(params["embed"] + updates["embed"], expected, rtol=1e-5, atol=1e-6)


@functools.cache
def updated(config: TrainConfig, mesh: Mesh) -> tuple[PyTree, list[Found]]:
    """Return one update of two replicas on a mesh, and the collectives of the compiled program."""
    optimizer = inner_optimizer(config.model, config.inner, config.num_steps)
    params = jax.tree.map(lambda x: np.stack([x, -x]), random_params(config.model))
    gradient = jax.tree.map(lambda x: np.stack([x, 2 * x + 1]), gradients_of(config, 1)[0])
    specs = sharding.param_specs(config.model, params, mesh)
    state_specs = sharding.inner_specs(optimizer, params, specs)
    at, state_at = sharding.shardings(mesh, specs), sharding.shardings(mesh, state_specs)
    update = jax.shard_map(
        jax.vmap(optimizer.update),
        mesh=mesh,
        in_specs=sharding.manual((specs, state_specs, specs)),
        out_specs=sharding.manual((specs, state_specs)),
        axis_names=set(sharding.MANUAL_AXES),
        check_vma=False,
    )
    state = jax.device_put(jax.vmap(optimizer.init)(params), state_at)
    arguments = jax.device_put(gradient, at), state, jax.device_put(params, at)
    compiled = jax.jit(update, out_shardings=(at, state_at)).lower(*arguments).compile()
    return jax.device_get(compiled(*arguments)[0]), collectives_in(compiled.as_text() or "", dict(mesh.shape))


def test_optimizer_state_is_sharded_like_its_parameters():
    config = run_config()
    params = jax.tree.map(lambda x: np.stack([x, x]), random_params(config.model))
    specs = sharding.param_specs(config.model, params, mesh(replica=2, fsdp=2, tensor=2))
    state = sharding.inner_specs(inner_optimizer(config.model, config.inner, config.num_steps), params, specs)
    assert optax.tree.get(state, "trace")["blocks"]["down"] == P("replica", "stage", "tensor", "fsdp")
    for moment in ("mu", "nu"):
        assert optax.tree.get(state, moment)["embed"] == P("replica", ("stage", "tensor"), "fsdp")
    assert {spec for path, spec in jax.tree.leaves_with_path(state) if "count" in jax.tree_util.keystr(path)} == {
        P("replica")
    }


def mesh(**sizes: int) -> Mesh:
    return mesh_of(dict.fromkeys(AXES, 1) | sizes, jax.devices())


@pytest.mark.parametrize(
    ("num_layers", "sizes"),
    [(4, {"fsdp": 2}), (3, {"fsdp": 2, "tensor": 2})],
    ids=["fsdp", "fsdp and tensor, layers not divided"],
)
def test_sharded_matrices_are_exchanged_by_all_to_all_once_and_back(num_layers, sizes):
    config = run_config(num_layers)
    updates, found = updated(config, mesh(replica=2, **sizes))
    exchanges = Counter({("all-to-all", (axis,)): 2 * 7 for axis in sizes})  # seven stacks of matrices
    assert Counter((one.kind, one.axes) for one in found) == exchanges
    expected, nothing = updated(config, mesh(replica=1))
    assert not nothing
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), updates, expected)


def test_stages_orthogonalize_their_own_layers_without_communication():
    config = run_config(4)
    updates, found = updated(config, mesh(replica=2, stage=2))
    assert not found
    expected, _ = updated(config, mesh(replica=1))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), updates, expected)
