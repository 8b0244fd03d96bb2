"""Results of a run's programs, against numpy: outer steps with the pairing's groups, merging, spread."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import noloco_jax as nj
from noloco_jax.config import from_dict, load_config
from noloco_jax.metrics.evaluate import Validation, evaluate, evaluate_alone
from noloco_jax.spmd.batches import place_batch
from noloco_jax.spmd.compile import compile_programs
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.programs import build_programs
from noloco_jax.train import phases
from noloco_jax.train.run import train
from support import tiny_model
from support.oracle import noloco_step, replica_spread
from support.paths import CONFIGS

TINY = {"kind": tiny_model.KIND, "hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "vocab_size": 32}


def test_a_runs_outer_steps_match_the_oracle_with_the_pairings_groups(config, tmp_path, monkeypatch):
    """Record the inputs and outputs of every outer step within a run of the trainer over several devices."""
    steps: list[tuple[Any, Any, Any]] = []

    def compile_and_watch(*arguments: Any, **options: Any) -> Any:
        programs = compile_programs(*arguments, **options)
        assert programs.outer_step is not None
        outer_step = programs.outer_step

        def watched(params: Any, outer: Any) -> Any:
            before = jax.device_get((params, outer.rule.slow, outer.rule.momentum))
            params, outer = outer_step(params, outer)
            steps.append((before, jax.device_get(params), jax.device_get(outer.rule)))
            return params, outer

        return dataclasses.replace(programs, outer_step=watched)

    monkeypatch.setattr(phases, "compile_programs", compile_and_watch)
    run = load_config(str(config), ["--config.outer.momentum=0.5", "--config.outer.sync_every=4"])
    assert train(run, tmp_path / "run") == 0

    pairing = nj.RandomPairing(run.num_replicas, seed=run.seed)
    drawn = [pairing.pool[int(pairing.pool_index(number))] for number in range(6)]
    for (before, params, rule), groups in zip(steps, drawn, strict=True):
        theta, phi, delta = (jax.tree.leaves(tree) for tree in before)
        after = (jax.tree.leaves(tree) for tree in (params, rule.slow, rule.momentum))
        for inputs, (new_theta, new_phi, new_delta) in zip(
            zip(theta, phi, delta, strict=True), zip(*after, strict=True), strict=True
        ):
            slow, momentum = noloco_step(*inputs, groups=groups, alpha=0.5, beta=0.7, gamma=0.7)
            np.testing.assert_allclose(new_phi, slow, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(new_delta, momentum, rtol=1e-5, atol=1e-6)
            np.testing.assert_array_equal(new_theta, new_phi)
    assert len({tuple(groups) for groups in drawn}) > 1


@pytest.fixture(scope="module")
def replicas() -> Any:
    """Programs of four replicas on two devices, and parameters that differ between the replicas."""
    config = from_dict(
        {
            "num_replicas": 4,
            "model": TINY,
            "data": {"batch_size": 2, "sequence_length": 8},
            "mesh": {"replica": 2},
        }
    )
    programs = build_programs(config, make_mesh(config.mesh, config.num_replicas, jax.devices()[:2]))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.normal(size=x.shape, scale=0.3).astype(x.dtype), programs.state.params)
    return programs, params, jax.device_put(params, jax.tree.map(lambda x: x.sharding, programs.state.params))


def test_merging_gives_every_replica_the_plain_mean(replicas):
    programs, params, placed = replicas
    merged = jax.device_get(programs.merge(placed))
    for x, mean in zip(jax.tree.leaves(params), jax.tree.leaves(merged), strict=True):
        expected = np.broadcast_to(x.astype(np.float64).mean(axis=0), x.shape)
        np.testing.assert_allclose(mean, expected, rtol=1e-6, atol=1e-7)


def test_the_merged_perplexity_is_that_of_the_mean_weights(replicas):
    """Six batches over four replicas: two replicas have one fewer. The oracle is each replica's own loss."""
    programs, params, placed = replicas
    rng = np.random.default_rng(1)
    batches = [
        {name: rng.integers(0, 32, (2, 8), dtype=np.int32) for name in ("input_ids", "labels")} for _ in range(6)
    ]
    batches[2]["labels"][0, :5] = -100  # batches weigh by their number of labels
    figures = evaluate(programs, placed, Validation(batches, {"web": batches[1:]}))

    def mean_loss(weights: Any) -> Any:
        """Return each replica's mean loss on all batches, one at a time."""
        everywhere = [place_batch(dict.fromkeys(range(4), batch), programs.batch) for batch in batches]
        sums, counts = zip(*(programs.evaluate(weights, batch) for batch in everywhere), strict=True)
        return np.sum(sums, axis=0, dtype=np.float64) / np.sum(counts, axis=0, dtype=np.float64)

    shardings = jax.tree.map(lambda x: x.sharding, programs.state.params)
    mean = jax.tree.map(lambda x: np.broadcast_to(x.mean(axis=0), x.shape).astype(x.dtype), params)
    assert figures["perplexity_merged"] == pytest.approx(
        np.exp(mean_loss(jax.device_put(mean, shardings))[0]), rel=1e-5
    )
    np.testing.assert_allclose(figures["perplexity_replicas"], np.exp(mean_loss(placed)), rtol=1e-5)
    assert figures["perplexity"] == pytest.approx(np.exp(mean_loss(placed).mean()), rel=1e-5)
    alone = evaluate(programs, placed, Validation(batches[1:]))  # a source by itself
    for name in ("perplexity", "perplexity_merged"):
        assert figures[f"{name}_by_source"] == {"web": pytest.approx(alone[name], rel=1e-6)}
    assert figures["replica_spread"] == pytest.approx(replica_spread(jax.tree.leaves(params)), rel=1e-6)


def test_a_single_replica_is_evaluated_as_among_others_and_each_source_by_itself(replicas):
    programs, params, placed = replicas
    data = {"batch_size": 2, "sequence_length": 8}
    config = from_dict({"method": "local", "num_replicas": 1, "model": TINY, "data": data})
    alone = build_programs(config, make_mesh(config.mesh, config.num_replicas, jax.devices()[:1]))
    first = jax.device_put(jax.tree.map(lambda x: x[:1], params), jax.devices()[0])
    tokens = np.random.default_rng(2).integers(0, 32, (2, 2, 2, 8), dtype=np.int32)
    batches = [{"input_ids": ids, "labels": labels} for ids, labels in tokens]
    found = evaluate_alone(alone, first, Validation(batches, {"web": batches[1:]}))
    one, two = (evaluate(programs, placed, Validation(part)) for part in (batches, batches[1:]))
    assert found["perplexity"] == pytest.approx(one["perplexity_replicas"][0], rel=1e-5)
    assert found["perplexity_by_source"] == {"web": pytest.approx(two["perplexity_replicas"][0], rel=1e-5)}


def test_moments_and_gradient_norm_are_float32_for_bfloat16_parameters():
    """The first step of Adam from bfloat16 parameters, whose gradient is known: g and g², not rounded to 8 bits."""
    config = from_dict(
        {
            "method": "local",
            "num_replicas": 1,
            "num_microbatches": 2,
            "model": TINY | {"param_dtype": "bfloat16"},
            "inner": {"clip_norm": 100.0},
            "data": {"batch_size": 2, "sequence_length": 8},
        }
    )
    programs = build_programs(config, make_mesh(config.mesh, config.num_replicas, jax.devices()[:1]))
    params, inner, _ = programs.init(jax.random.key(0))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 32, (1, 2, 9), dtype=np.int32)
    batch = place_batch({0: {"input_ids": tokens[0, :, :-1], "labels": tokens[0, :, 1:]}}, programs.batch)
    params, inner, metrics = programs.inner_step(params, inner, batch, np.int32(1))
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    mu, nu = inner[0].mu, inner[0].nu
    assert {x.dtype for x in jax.tree.leaves((mu, nu))} == {jnp.dtype(jnp.float32)}
    gradients = [np.asarray(x, np.float64) / (1 - config.inner.b1) for x in jax.tree.leaves(mu)]
    assert float(metrics.grad_norm[0]) == pytest.approx(np.sqrt(sum((g**2).sum() for g in gradients)), rel=1e-5)
    for g, second in zip(gradients, jax.tree.leaves(nu), strict=True):
        np.testing.assert_allclose(second, (1 - config.inner.b2) * g**2, rtol=1e-3, atol=1e-12)
    rounded = [g.astype(jnp.bfloat16).astype(np.float64) for g in gradients]
    assert any((np.abs(g - r) > 1e-4 * np.abs(g)).any() for g, r in zip(gradients, rounded, strict=True))


@pytest.mark.parametrize("method", ["local", "ddp"])
def test_gradients_are_clipped_to_the_norm_and_with_ddp_after_averaging(method):
    """Adam's first moments after a step are the clipped gradients; clipped first, their average would be shorter."""
    config = from_dict(
        {
            "method": method,
            "num_replicas": 2,
            "model": TINY,
            "inner": {"clip_norm": 1e-3},
            "data": {"batch_size": 2, "sequence_length": 8},
        }
    )
    programs = build_programs(config, make_mesh(config.mesh, config.num_replicas, jax.devices()[:1]))
    params, inner, _ = programs.init(jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 32, (2, 2, 9), dtype=np.int32)
    parts = {i: {"input_ids": tokens[i, :, :-1], "labels": tokens[i, :, 1:]} for i in range(2)}
    _, inner, metrics = programs.inner_step(params, inner, place_batch(parts, programs.batch), np.int32(1))
    clipped = [np.asarray(x, np.float64) / (1 - config.inner.b1) for x in jax.tree.leaves(inner[0].mu)]
    norms = np.sqrt(sum(np.square(g).reshape(2, -1).sum(axis=1) for g in clipped))
    np.testing.assert_allclose(norms, 1e-3, rtol=1e-5)
    assert (np.asarray(metrics.grad_norm) > 1e-2).all()  # the norm before clipping
    alike = all(np.array_equal(g[0], g[1]) for g in clipped)
    assert alike == (method == "ddp")


def shapes(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


@pytest.mark.parametrize(("size", "num_devices"), [("125m", 8), ("1b", 1), ("7b", 8)])
def test_every_program_accepts_a_state_beyond_32_bit_sizes(size, num_devices):
    config = load_config(str(CONFIGS / f"c4_{size}.py"), [])
    programs = build_programs(config, make_mesh(config.mesh, config.num_replicas, jax.devices()[:num_devices]))
    params, inner, outer = programs.state
    assert sum(x.size for x in jax.tree.leaves(params)) > 2**30
    step = jax.ShapeDtypeStruct((), jnp.int32)
    assert programs.outer_step is not None

    assert shapes(jax.eval_shape(programs.init, jax.eval_shape(jax.random.key, 0))) == shapes(programs.state)
    trained = jax.eval_shape(programs.inner_step, params, inner, programs.batch, step)
    assert shapes(trained[:2]) == shapes((params, inner))
    assert shapes(jax.eval_shape(programs.outer_step, params, outer)) == shapes((params, outer))
    assert shapes(jax.eval_shape(programs.merge, params)) == shapes(params)
    assert jax.eval_shape(programs.spread, params).shape == ()
    loss, number = jax.eval_shape(programs.evaluate, params, programs.batch)
    assert loss.shape == number.shape == (config.num_replicas,)
