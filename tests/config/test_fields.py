"""Configuration: what is accepted, what is refused, and how the refusal reads."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from ml_collections import ConfigDict

import noloco_jax.config.fields
from noloco_jax.config.fields import (
    RopeScaling,
    TrainConfig,
    from_dict,
    known_fields,
    load_saved,
    save_config,
    to_dict,
    validate,
)
from noloco_jax.errors import UserError

ROPE = {"factor": 8, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def refusal(values: dict) -> str:
    with pytest.raises(UserError) as raised:
        from_dict(values)
    message = str(raised.value)
    assert "\n" not in message
    return message


def nested(path: str, value: object) -> dict:
    for name in reversed(path.split(".")):
        value = {name: value}
    assert isinstance(value, dict)
    return value


def test_nothing_given_is_the_defaults():
    assert from_dict({}) == from_dict(ConfigDict()) == TrainConfig()


def test_the_defaults_are_consistent():
    validate(TrainConfig())


def test_configurations_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig().num_steps = 1  # type: ignore[misc]


def test_a_configuration_survives_json():
    config = from_dict({"outer": {"consensus": 0.25}, "model": {"rope_scaling": ROPE}, "sample_prompt": "é\n"})
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config
    assert config.model.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)


def test_a_config_dict_is_read_like_a_mapping():
    values = {"num_replicas": 6, "outer": {"group_size": 3}}
    assert from_dict(ConfigDict(values)) == from_dict(values)


def test_an_int_is_a_float_where_one_is_due():
    assert type(from_dict({"outer": {"lr": 1, "consensus": 1}}).outer.lr) is float


def test_a_rope_scaling_of_nones_is_none():
    assert from_dict({"model": {"rope_scaling": dict.fromkeys(ROPE)}}).model.rope_scaling is None


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"outer": {"sync_evry": 3}}, "'outer.sync_evry': did you mean 'outer.sync_every'"),
        ({"sync_every": 3}, "did you mean 'outer.sync_every'"),
        ({"outr": {"lr": 1.0}}, "'outr': did you mean 'outer'"),
        ({"lr": 3}, "did you mean 'inner.lr' or 'outer.lr'"),
        ({"model": {"rope_scaling": {"factr": 3}}}, "did you mean 'model.rope_scaling.factor'"),
        ({"mesh": {"qqqq": 3}}, "the fields there are mesh.replica, mesh.stage, mesh.fsdp, mesh.tensor, mesh.routing"),
    ],
)
def test_an_unknown_field_is_refused_with_the_nearest_name(values, named):
    message = refusal(values)
    assert message.startswith("unknown config field") and named in message


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"num_steps": 1.5}, "num_steps: expected int, got 1.5 (float)"),
        ({"num_steps": True}, "num_steps: expected int, got True (bool)"),
        ({"num_steps": None}, "num_steps: expected int, got None"),
        ({"data": {"path": 3}}, "data.path: expected str, got 3 (int)"),
        ({"outer": {"nesterov": 1}}, "outer.nesterov: expected bool"),
        ({"outer": {"consensus": "a"}}, "outer.consensus: expected float or None"),
        ({"outer": 3}, "outer: expected a group of fields, got 3"),
        ({"outer": None}, "outer: expected a group of fields"),
        ({"model": {"rope_scaling": {"factor": 8.0}}}, "model.rope_scaling.low_freq_factor is missing"),
    ],
)
def test_a_value_of_another_type_is_refused_by_field(values, named):
    assert named in refusal(values)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"model": {"num_heads": 3}}, ["model.hidden_size=256", "model.num_heads=3"]),
        ({"model": {"num_heads": 8, "num_kv_heads": 3}}, ["model.num_heads=8", "model.num_kv_heads=3"]),
        ({"model": {"hidden_size": 12, "num_heads": 4}}, ["model.hidden_size=12", "model.num_heads=4", "even"]),
        ({"model": {"rope_scaling": ROPE | {"low_freq_factor": 4.0}}}, ["low_freq_factor=4.0", "high_freq_factor=4.0"]),
        ({"num_steps": 10, "inner": {"warmup_steps": 11}}, ["inner.warmup_steps=11", "num_steps=10"]),
        ({"inner": {"lr": 1e-4, "min_lr": 2e-4}}, ["inner.min_lr=0.0002", "inner.lr=0.0001"]),
        ({"num_replicas": 4, "outer": {"group_size": 5}}, ["outer.group_size=5", "num_replicas=4"]),
        ({"outer": {"group_size": 1}}, ["outer.group_size=1", "2"]),
        ({"num_replicas": 1}, ["noloco", "num_replicas=1", "local"]),
        ({"num_microbatches": 3}, ["data.batch_size=8", "num_microbatches=3"]),
        ({"mesh": {"replica": 3}}, ["num_replicas=4", "mesh.replica=3"]),
        ({"mesh": {"fsdp": -1}}, ["mesh.replica", "mesh.fsdp", "-1"]),
        ({"mesh": {"replica": 1, "stage": -1}}, ["mesh.stage=-1"]),
        ({"mesh": {"tensor": 0}}, ["mesh.tensor=0"]),
        ({"mesh": {"stage": 3}}, ["model.num_layers=4", "mesh.stage=3"]),
        ({"mesh": {"stage": 2}, "model": {"tie_embeddings": True}}, ["model.tie_embeddings=True", "mesh.stage=2"]),
        ({"method": "local", "num_replicas": 1, "mesh": {"stage": 2}}, ["mesh.routing='random'", "num_replicas=1"]),
        ({"data": {"tokenizer": ""}}, ["data.tokenizer", "byte"]),
    ],
)
def test_fields_that_contradict_each_other_are_refused_with_both_values(values, named):
    message = refusal(values)
    for part in named:
        assert part in message


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("method", "nolocco"),
        ("data.kind", "txt"),
        ("model.dtype", "bfloat"),
        ("model.remat", "ful"),
        ("outer.state_dtype", "f32"),
        ("mesh.routing", "randm"),
    ],
)
def test_a_word_outside_its_choices_is_refused_by_name(path, value):
    message = refusal(nested(path, value))
    assert f"{path}={value!r}" in message and ("did you mean" in message or "choose one of" in message)


@pytest.mark.parametrize("path", [path for path, field in known_fields().items() if field.type in (int, float)])
def test_no_number_may_be_below_minus_one_or_infinite(path):
    def values(number: float) -> dict:
        if "rope_scaling" in path:
            return {"model": {"rope_scaling": ROPE | {path.rpartition(".")[2]: number}}}
        return nested(path, number)

    assert f"{path}=-2" in refusal(values(-2))
    if known_fields()[path].type is float:
        assert f"{path}=inf" in refusal(values(float("inf")))


@pytest.mark.parametrize("values", [{"method": method, "num_replicas": 1} for method in ("diloco", "ddp", "local")])
def test_one_replica_trains_with_every_method_that_needs_no_partner(values):
    assert from_dict(values).num_replicas == 1


def test_stages_with_fixed_routing_need_no_second_replica():
    from_dict({"method": "local", "num_replicas": 1, "mesh": {"stage": 2, "routing": "fixed"}})


def test_a_saved_configuration_is_loaded_again(tmp_path):
    config = from_dict({"outer": {"consensus": 0.25}, "num_steps": 77})
    path = save_config(config, tmp_path / "run")
    assert path == tmp_path / "run" / "config.json"
    assert load_saved(tmp_path / "run") == config
    assert [file.name for file in path.parent.iterdir()] == ["config.json"]


@pytest.mark.parametrize("text", [None, "{", '{"num_stepz": 3}'])
def test_a_missing_or_broken_saved_configuration_is_named(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json"):
        load_saved(tmp_path)


def test_reading_a_configuration_imports_no_jax():
    package = Path(noloco_jax.config.__file__).parent
    program = (
        "import sys, types; package = sys.modules['noloco_jax'] = types.ModuleType('noloco_jax'); "
        f"package.__path__ = [{str(package)!r}]; import noloco_jax.config.flags; "  # without the package's own imports
        "sys.exit(any(name.split('.')[0] in ('jax', 'flax', 'optax') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
