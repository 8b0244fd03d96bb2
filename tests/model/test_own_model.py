"""A model of a user's own, `support/own_model.py`, in every mode of use: the trainer knows it by its name alone."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from noloco_jax.config import MeshConfig, OuterConfig, TrainConfig
from noloco_jax.errors import UserError
from noloco_jax.island.command import main as island
from noloco_jax.model import kind
from noloco_jax.model.decode import generate
from support import modes, processes
from support.archipelago import Archipelago
from support.inner_steps import losses
from support.model_makers import random_params
from support.readmes import python_examples

KIND = "support.own_model:Model"
LAYERED = "support.own_model:Layered"


def own(config: TrainConfig, kind: str = KIND) -> TrainConfig:
    """The configuration with a model of one's own."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, kind=kind))


@pytest.mark.parametrize("outer", [OuterConfig(sync_every=2), OuterConfig(sync_every=2, fragments=4)])
def test_outer_steps_are_the_same_in_an_own_loop_one_program_and_islands(outer, tmp_path):
    config = own(dataclasses.replace(modes.CONFIG, outer=outer))
    expected = modes.own_loop(config)
    for mesh in (MeshConfig(replica=2), MeshConfig(replica=2, fsdp=2)):
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), modes.one_program(config, mesh), expected
        )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), modes.islands(config, tmp_path), expected)


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_the_loss_falls_alike_on_one_device_and_with_replicas_sharded(optimizer):
    whole = losses(own(dataclasses.replace(modes.CONFIG, mesh=MeshConfig(replica=1))), 1, optimizer=optimizer)
    cube = own(dataclasses.replace(modes.CONFIG, mesh=MeshConfig(replica=2, fsdp=2, tensor=2)))
    assert all(later < earlier for earlier, later in itertools.pairwise(whole.mean(axis=1)))
    np.testing.assert_allclose(losses(cube, 8, optimizer=optimizer), whole, rtol=1e-5)


@pytest.mark.parametrize("routing", ["fixed", "random"])
def test_a_model_in_stages_is_the_same_on_their_own_devices_as_one_after_another(routing):
    config = own(dataclasses.replace(modes.CONFIG, num_microbatches=2), LAYERED)
    cut = dataclasses.replace(config, mesh=MeshConfig(replica=4, stage=2, routing=routing))
    virtual = dataclasses.replace(config, mesh=MeshConfig(replica=1, stage=2, routing=routing))
    expected = losses(virtual, 1)
    np.testing.assert_allclose(losses(cut, 8), expected, rtol=1e-5)
    if routing == "fixed":
        whole = dataclasses.replace(config, mesh=MeshConfig(replica=1))
        np.testing.assert_allclose(losses(whole, 1), expected, rtol=1e-5)


def test_generation_takes_the_likeliest_token_after_each_whole_pass():
    config = own(modes.CONFIG).model
    params = random_params(config)
    ids = np.asarray(generate(config, params, np.asarray([[5, 9, 2]]), max_new_tokens=6))[0]
    model = kind.from_params(config, params)
    for position in range(3, 9):
        logits_TV = model.logits(model.hidden(ids[None, :position]))[0]
        assert ids[position] == np.argmax(logits_TV[-1])


def test_a_run_over_fsdp_that_is_killed_continues_bitwise(config):
    flags = (f"--config.model.kind={KIND}", "--config.mesh.fsdp=2", "--config.mesh.replica=2")
    whole, killed = config.parent / "whole", config.parent / "killed"
    [(status, output)] = processes.run(config, whole, *flags, devices=4)
    assert status == 0, output
    run = processes.start(config, killed, *flags, devices=4, seconds_per_step=0.1)
    processes.wait_until(processes.reached(killed, 10), run)
    processes.kill(run)
    [(status, output)] = processes.run(config, killed, *flags, devices=4)
    assert status == 0 and "resuming from the checkpoint of step" in output, output
    assert processes.metrics(killed) == processes.metrics(whole)
    mine, theirs = processes.weights(killed), processes.weights(whole)
    assert set(theirs) == {"['tokens']", "['turn']", "['scale']", "['answers']"}
    for name in theirs:
        np.testing.assert_array_equal(mine[name], theirs[name], err_msg=name)
    perplexities = [line["perplexity"] for line in processes.metrics(whole) if line["kind"] == "eval"]
    assert perplexities[-1] < 0.5 * 259


def test_islands_meet_and_one_that_is_killed_resumes(config, tmp_path):
    arguments = (f"--config={config}", f"--config.model.kind={KIND}", "--config.num_replicas=2", "--config.mesh.fsdp=2")
    names = ("berlin", "paris")
    environment = processes.environment(config, devices=2)
    with Archipelago(tmp_path, names, arguments, environment, seconds_per_step=0.3) as islands:
        for name in names:
            islands.start(name)
        running = list(islands.running.values())
        assert processes.wait_until(lambda: islands.step("paris") >= 10, running), islands.said("paris")[-3000:]
        islands.kill("paris")
        islands.start("paris")
        for name in names:
            assert islands.running[name].wait(processes.PATIENCE) == 0, islands.said(name)[-3000:]
        assert "resuming from the checkpoint of step" in islands.said("paris")
        for name in names:
            assert any(line["outcome"] == "met" for line in islands.lines(name, "exchange"))
            assert islands.lines(name, "eval")[-1]["perplexity"] < 0.5 * 259
    merge = ["merge", "--workdirs", *(str(islands.workdir(name)) for name in names), f"--out={tmp_path / 'merged'}"]
    with pytest.raises(UserError, match="has no format of Hugging Face's"):
        island(merge)


def test_the_readmes_model_trains_by_its_name_alone(config):
    ((page, example),) = python_examples("# my_model.py")
    folder = config.parent / "users"
    folder.mkdir()
    (folder / "my_model.py").write_text(example)
    flags = ("--config.model.kind=my_model:Recurrent", "--config.sample_tokens=4", "--config.sample_prompt=a")
    workdir = processes.trained(config, "readme", *flags, folders=[folder])
    perplexities = [line["perplexity"] for line in processes.metrics(workdir) if line["kind"] == "eval"]
    assert page == "noloco_jax/README.md" and perplexities[-1] < 0.5 * 259


def test_a_wrong_kind_is_a_line_before_any_data_are_read(config):
    [(status, output)] = processes.run(
        config, config.parent / "wrong", "--config.model.kind=no_such:Model", "--config.data.path=no_such_folder"
    )
    assert status == 2
    assert "model.kind='no_such:Model': the module no_such cannot be imported" in output
