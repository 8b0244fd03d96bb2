"""Kinds of models: lookup by name, checks of a user's class, and no weight named outside `model`."""

import dataclasses
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from noloco_jax.config import ModelConfig, from_dict
from noloco_jax.errors import UserError
from noloco_jax.metrics.peaks import model_flops_per_token
from noloco_jax.model import architecture
from noloco_jax.model.huggingface import check_has_format
from noloco_jax.model.llama import Llama
from noloco_jax.spmd.sharding import fragments_of, parameter_spec
from noloco_jax.spmd.stages import resize_vocabulary
from support.model_makers import random_params
from support.paths import ROOT

OWN = ModelConfig(kind="support.own_model:Model", hidden_size=16, vocab_size=24)
LAYERED = dataclasses.replace(OWN, kind="support.own_model:Layered", num_layers=4)
# Names of a Llama's weights, as keys; names of one letter are too common to search for outside brackets.
WEIGHTS = r"""["'](?:embed|blocks|head|norm|attention_norm|mlp_norm|gate|up|down)["']|\[["'][qkvo]["']\]"""
# Prometheus has a metric "up".
OTHER_MEANINGS = {"islands/dashboard.py"}


def test_only_the_model_package_names_weights_of_the_llama():
    known = []
    for path in sorted((ROOT / "noloco_jax").rglob("*.py")):
        name = path.relative_to(ROOT / "noloco_jax").as_posix()
        if name.startswith(("model/", "examples/")) or name in OTHER_MEANINGS:
            continue
        found = re.findall(rf"{WEIGHTS}|model\.llama", path.read_text())
        known += [(name, word) for word in found]
    assert not known


def test_the_llama_is_the_default_and_may_be_named_by_its_path():
    assert architecture.architecture_of(ModelConfig()) is Llama
    assert architecture.architecture_of(ModelConfig(kind="noloco_jax.model.llama:Llama")) is Llama


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("lama", "neither 'llama' nor 'moe' nor a class of one's own"),
        ("os.path:", "neither 'llama' nor 'moe' nor a class of one's own"),
        ("no_such_module:Model", "no_such_module cannot be imported.*PYTHONPATH"),
        (
            "support.own_model:Modell",
            "support.own_model has no such model: name a subclass of noloco_jax.model.architecture.M",
        ),
        ("support.own_model:Gate", "support.own_model has no such model"),
    ],
)
def test_a_kind_that_is_no_model_is_refused_in_a_line(given, message):
    with pytest.raises(UserError, match=f"model.kind=.*{message}"):
        architecture.check_architecture(from_dict({"model": {"kind": given}}).model, num_stages=1)


class Base(architecture.Model):
    """Base class of the broken models below."""

    def __init__(self, config, *, rngs):
        self.table = architecture.weight(jnp.ones((config.vocab_size, config.hidden_size)), "vocab", "hidden")

    def hidden(self, ids_BT, *, segments_BT=None):
        return self.table[...][ids_BT]

    def head_kernel(self):
        return self.table[...].T


class Raises(Base):
    def __init__(self, config, *, rngs):
        raise TypeError("no such size")


class HoldsStreams(Base):
    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        self.rngs = rngs


class HoldsList(Base):
    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        self.parts = nnx.List([architecture.weight(jnp.ones(3), None)])


class WrongAxes(Base):
    def __init__(self, config, *, rngs):
        self.table = architecture.weight(jnp.ones((config.vocab_size, config.hidden_size)), "vocab")


class UnknownAxis(Base):
    def __init__(self, config, *, rngs):
        self.table = architecture.weight(jnp.ones((config.vocab_size, config.hidden_size)), "vocab", "width")


class HasNoHead(Base):
    head_kernel = architecture.Model.head_kernel


class HasLossAlone(architecture.Model):
    stages = architecture.Stages("table", "layers", "scale", "answers")

    def __init__(self, config, *, rngs):
        self.table = architecture.weight(jnp.ones((config.vocab_size, config.hidden_size)), "vocab", "hidden")

    def loss_sum(self, batch):
        return jnp.sum(self.table[...]), jnp.float32(1)


class InWrongStages(Base):
    stages = architecture.Stages("table", "layers", "scale", "answers")


@pytest.fixture
def broken(monkeypatch):
    module = types.ModuleType("broken_models")
    for model in (
        KeepsDocumentsApart,
        Raises,
        HoldsStreams,
        HoldsList,
        WrongAxes,
        UnknownAxis,
        HasNoHead,
        HasLossAlone,
        InWrongStages,
    ):
        setattr(module, model.__name__, model)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return lambda name: dataclasses.replace(OWN, kind=f"broken_models:{name}")


@pytest.mark.parametrize(
    ("name", "num_stages", "message"),
    [
        ("Raises", 1, "it cannot be made from model.*no such size"),
        ("HoldsStreams", 1, "rngs.params.count, a RngCount.* is not a weight that can be trained"),
        ("HoldsList", 1, "parts.0, a Param .* is not a weight"),
        ("WrongAxes", 1, r"table, a Param with the axes \('vocab',\), is not a weight"),
        ("UnknownAxis", 1, "of layer, expert, vocab, hidden, heads, ffn or None"),
        ("HasNoHead", 1, "the loss of tokens .* cannot be traced"),
        ("InWrongStages", 2, "answers does not fit Stages"),
        ("HasLossAlone", 2, "pipeline stages have the loss of the next token"),
    ],
)
def test_a_model_that_would_fail_later_is_refused_in_a_line(broken, name, num_stages, message):
    with pytest.raises(UserError, match=message):
        architecture.check_architecture(broken(name), num_stages)


def test_a_model_with_only_a_loss_is_accepted_for_training_but_not_for_generation(broken):
    architecture.check_architecture(broken("HasLossAlone"), num_stages=1)
    with pytest.raises(UserError, match=r"cannot generate: define .*--config.sample_tokens=0"):
        architecture.check_generates(broken("HasLossAlone"))
    architecture.check_generates(OWN)


class KeepsDocumentsApart(Base):
    def hidden(self, ids_BT, *, segments_BT=None):
        h_BTD = super().hidden(ids_BT)
        return h_BTD if segments_BT is None else h_BTD * segments_BT[..., None]


def test_document_masks_are_refused_for_a_model_that_ignores_segment_ids(broken):
    with pytest.raises(UserError, match=r"does not use segment_ids.*data.document_mask=False"):
        architecture.check_architecture(OWN, num_stages=1, document_mask=True)
    architecture.check_architecture(broken("KeepsDocumentsApart"), num_stages=1, document_mask=True)


def test_pipeline_stages_are_refused_for_a_model_without_stages():
    with pytest.raises(UserError, match=r"names no stages: give --config.mesh.stage=1"):
        architecture.check_architecture(OWN, num_stages=2)


def test_a_custom_model_has_no_hugging_face_format():
    with pytest.raises(UserError, match="to which only llama and moe are converted"):
        check_has_format(OWN)


def test_mesh_axes_follow_from_a_weights_logical_axes():
    axes = {
        path: parameter_spec(LAYERED, tuple(map(jax.tree_util.DictKey, path)))
        for path in architecture.param_axes(LAYERED)
    }
    assert axes == {
        ("tokens",): P(("stage", "tensor"), "fsdp"),
        ("gates", "share"): P("stage", None, "fsdp"),
        ("scale",): P(None),
        ("answers",): P("fsdp", ("stage", "tensor")),
    }


def test_the_vocabulary_of_a_state_with_any_prefix_is_padded():
    params = random_params(OWN)
    wide = resize_vocabulary(OWN, {"mu": params, "count": np.zeros(24)}, 32)
    assert (wide["mu"]["tokens"].shape, wide["mu"]["answers"].shape) == ((32, 16), (16, 32))
    assert wide["count"].shape == (24,) and wide["mu"]["turn"] is params["turn"]
    jax.tree.map(np.testing.assert_array_equal, resize_vocabulary(OWN, wide, 24)["mu"], params)


def test_muon_takes_matrices_but_no_embedding_head_bias_norm_or_router():
    assert architecture.muons(OWN) == {("turn",)}
    assert architecture.muons(LAYERED) == {("gates", "share")}
    for model in (ModelConfig(qk_norm=True, qkv_bias=True), ModelConfig(qk_norm=True, kind="moe", num_experts=4)):
        taken = {path[-1] for path in architecture.muons(model)}
        assert taken == {"q", "k", "v", "o", "gate", "up", "down"}


def test_operations_are_counted_by_the_weights_of_the_matrices():
    config = from_dict({"model": dataclasses.asdict(OWN)})
    assert model_flops_per_token(config.model, 256) == 6 * (16 * 16 + 16 * 24)


def test_equal_fragment_cuts_are_one_object_so_programs_compile_once():
    assert fragments_of(OWN, 2) is fragments_of(dataclasses.replace(OWN), 2)
