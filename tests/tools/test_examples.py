"""The example learns, and its replicas agree closer after an outer step than before it."""

import functools
import re
import runpy
import sys

import numpy as np
import pytest

from noloco_jax.examples import mlp

STEPS, LEAST = 160, 0.9


@functools.cache
def trained(inner):
    return mlp.train(inner, steps=STEPS)


inners = pytest.mark.parametrize("inner", ["adam", "muon"])


def test_a_linear_classifier_cannot_separate_the_spirals():
    x, arm = mlp.spirals(np.random.default_rng(0), 4000)
    x = np.column_stack([x, np.ones(len(x))])
    weights, *_ = np.linalg.lstsq(x, 2 * arm - 1, rcond=None)
    assert 0.4 < np.mean((x @ weights > 0) == arm) < 0.7


@inners
def test_every_replica_and_the_merged_model_beat_the_linear_classifier(inner):
    replicas, merged, _ = trained(inner)
    assert replicas.shape == (4,)
    assert replicas.min() > LEAST and merged > LEAST


@inners
def test_replicas_differ_before_an_outer_step_and_agree_closer_after(inner):
    *_, spreads = trained(inner)
    every = mlp.SYNC_EVERY
    before, after = np.array(spreads[every - 2 :: every]), np.array(spreads[every - 1 :: every])
    assert len(before) == len(after) == STEPS // every
    assert (before > 1e-6).all()
    assert (after < before).all()
    assert np.mean(after / before) < 0.85


def test_muon_orthogonalizes_steps_of_matrices():
    """The gradient's singular values differ fourfold; those of the step are alike."""
    params = {"kernel": np.ones((3, 4), np.float32), "bias": np.ones(4, np.float32)}
    grads = {
        "kernel": np.eye(3, 4, dtype=np.float32) * np.array([4, 2, 1, 1], np.float32),
        "bias": np.ones(4, np.float32),
    }
    muon = mlp.INNER["muon"]()
    updates = muon.update(grads, muon.init(params), params)[0]
    values = np.linalg.svd(np.asarray(updates["kernel"]), compute_uv=False)
    assert values.min() > 0.5 * values.max()


def test_the_example_runs_as_a_command_and_prints_its_results(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mlp", "--inner=adam"])
    monkeypatch.delitem(sys.modules, "noloco_jax.examples.mlp")
    runpy.run_module("noloco_jax.examples.mlp", run_name="__main__")
    output = capsys.readouterr().out
    assert output.startswith("4 replicas, 300 steps of adam, ")
    assert re.search(r"accuracy of each replica:( \d\.\d{3}){4}\n", output)
    assert re.search(r"accuracy of the merged model: \d\.\d{3}\n", output)
    assert re.search(r"spread of the replicas before the last outer step \S+, after it \S+\n", output)
