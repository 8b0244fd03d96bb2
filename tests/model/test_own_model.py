"""A user's own model, `support/own_model.py`, which the package does not know.

Most other tests train one too, `support/tiny_model.py`: in a user's loop, one program, stages and islands.
"""

import dataclasses
import itertools

import numpy as np

from noloco_jax.config import MeshConfig, TrainConfig
from support import modes, processes
from support.inner_steps import losses
from support.readmes import python_examples

KIND = "support.own_model:Model"
LAYERED = "support.own_model:Layered"


def own(config: TrainConfig, kind: str = KIND) -> TrainConfig:
    """Return the configuration with a user's own model."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, kind=kind))


def test_the_loss_falls_alike_on_one_device_and_with_replicas_sharded():
    whole = losses(own(dataclasses.replace(modes.CONFIG, mesh=MeshConfig(replica=1))), 1, optimizer="muon")
    cube = own(dataclasses.replace(modes.CONFIG, mesh=MeshConfig(replica=2, fsdp=2, tensor=2)))
    assert all(later < earlier for earlier, later in itertools.pairwise(whole.mean(axis=1)))
    np.testing.assert_allclose(losses(cube, 8, optimizer="muon"), whole, rtol=1e-5)


def test_stages_on_their_own_devices_train_like_stages_on_one():
    config = own(dataclasses.replace(modes.CONFIG, num_microbatches=2), LAYERED)
    found = [
        losses(dataclasses.replace(config, mesh=MeshConfig(replica=1, stage=2, routing="random")), num_devices)
        for num_devices in (2, 1)
    ]
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_the_readmes_model_trains_by_its_name_alone(config):
    ((page, example),) = python_examples("# my_model.py")
    folder = config.parent / "users"
    folder.mkdir()
    (folder / "my_model.py").write_text(example)
    flags = ("--config.model.kind=my_model:Recurrent", "--config.sample_tokens=4", "--config.sample_prompt=a")
    workdir = processes.trained(config, "readme", *flags, folders=[folder])
    perplexities = [line["perplexity"] for line in processes.metrics(workdir) if line["kind"] == "eval"]
    assert page == "noloco_jax/README.md" and perplexities[-1] < 0.5 * 259
