"""The package's example and the recipes of the pages."""

import math
import re
import runpy
import sys
from typing import Any

import jax
import numpy as np
import pytest

from support.at_once import side_by_side
from support.readmes import python_examples
from support.rosters import on_loopback, written


@pytest.fixture(autouse=True)
def as_many_devices_as_the_tests_have(monkeypatch):
    """The recipes set their number where nothing is set."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", str(jax.device_count()))


def test_replicas_and_the_merged_model_of_the_example_command_beat_the_linear_classifier(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mlp", "--inner=muon"])
    runpy.run_module("noloco_jax.examples.mlp", run_name="__main__")
    output = capsys.readouterr().out
    assert output.startswith("4 replicas, 300 steps of muon, ")
    accuracies = re.findall(r"^accuracy of (?:each replica|the merged model):(.*)$", output, re.MULTILINE)
    assert [len(line.split()) for line in accuracies] == [4, 1]
    assert min(float(number) for line in accuracies for number in line.split()) > 0.9
    assert re.search(r"spread of the replicas before the last outer step \S+, after it \S+\n", output)


def recipe(containing: str) -> dict[str, Any]:
    """Run the one Python block of the pages with this text; return its names."""
    ((page, code),) = python_examples(containing)
    names: dict[str, Any] = {"__name__": "recipe"}
    exec(compile(code, page, "exec"), names)
    return names


@pytest.mark.parametrize(
    "containing", ["def on_replicas", "AxisType.Auto,), devices", "jax.set_mesh", "jax.lax.scan(step, carry"]
)
def test_replicas_of_a_recipe_learn_the_targets_and_stay_close(containing):
    names = recipe(containing)
    found = np.asarray(names["weights"] if "weights" in names else names["params"]["w"])
    np.testing.assert_allclose(found, 1, atol=0.2)  # the targets are sums
    assert 0 < found.std(axis=0).max() < 0.05


def test_the_llamas_of_the_nnx_recipe_learn_their_sequences():
    losses = recipe("nnx.Optimizer(model, tx")["losses"]
    assert abs(losses[0].mean() - math.log(256)) < 0.1  # the loss of untrained models
    assert max(losses[-1]) < losses[0].mean() / 2


def test_the_dataclass_of_a_recipe_learns_and_its_merged_model_is_as_good():
    names = recipe("register_dataclass")
    x = np.random.default_rng(0).normal(size=(200, 8)).astype(np.float32)
    assert np.mean((names["merged"](x) - x.sum(axis=-1)) ** 2) < 1  # the targets' variance is 8
    assert abs(names["losses"].mean() / names["loss_of"](names["merged"], names["x"]) - 1) < 0.5  # of one moment


def test_two_islands_of_the_pages_loop_end_with_one_model(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names = ("paris", "berlin")
    written(on_loopback(*names), tmp_path / "roster.toml")
    train, merged = recipe("# island.py")["train"], {}
    side_by_side(*(lambda name=name: merged.update({name: train(name)}) for name in names))
    np.testing.assert_array_equal(merged["paris"]["w"], merged["berlin"]["w"])
    np.testing.assert_allclose(merged["paris"]["w"], 1, atol=0.05)
