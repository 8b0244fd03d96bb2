"""Configuration: what is accepted, what is refused, and how the refusal reads."""

import json
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from ml_collections import ConfigDict

import noloco_jax.config
from noloco_jax.config import (
    RopeScaling,
    TrainConfig,
    flatten,
    from_dict,
    from_record,
    known_fields,
    load_saved,
    save_config,
    to_dict,
)
from noloco_jax.errors import UserError

ROPE = {"factor": 8, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SOURCE = {"kind": "jsonl", "weight": 1.0, "path": "", "validation_path": ""}


def refusal(values: dict) -> str:
    try:
        from_dict(values)
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)
    raise AssertionError(f"{values} is accepted")


def nested(path: str, value: object) -> dict:
    """Return a mapping that sets one field and the fields that it requires."""
    if path.startswith("model.rope_scaling."):
        return {"model": {"rope_scaling": ROPE | {path.rpartition(".")[2]: value}}}
    if path.startswith("data.mixture.NAME."):
        return {"data": {"mixture": {"NAME": SOURCE | {path.rpartition(".")[2]: value}}}}
    for name in reversed(path.split(".")):
        value = {name: value}
    assert isinstance(value, dict)
    return value


def mixture(*names: str, source: object = SOURCE, **fields: object) -> dict:
    """Return the mapping of a mixture whose sources are all the same."""
    return {"data": {"kind": "mixture", "mixture": dict.fromkeys(names, source)} | fields}


def assert_each_is_refused(cases: Sequence[tuple[dict, Sequence[str]]]) -> None:
    for values, named in cases:
        message = refusal(values)
        for part in named:
            assert part in message, (values, message)


def test_an_empty_configuration_has_the_defaults():
    assert from_dict({}) == from_dict(ConfigDict()) == TrainConfig()


def test_known_fields_are_those_of_a_complete_configuration():
    complete = from_dict({"model": {"rope_scaling": ROPE}, "data": {"kind": "mixture", "mixture": {"NAME": SOURCE}}})
    assert list(known_fields()) == list(flatten(to_dict(complete)))


def test_a_configuration_survives_json():
    config = from_dict({"outer": {"consensus": 0.25}, "model": {"rope_scaling": ROPE}, "sample_prompt": "é\n"})
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config
    assert config.model.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)


def test_a_rope_scaling_of_nones_is_none():
    assert from_dict({"model": {"rope_scaling": dict.fromkeys(ROPE)}}).model.rope_scaling is None


def test_a_record_is_read_as_it_is_though_its_fields_may_contradict_each_other():
    values = {"num_replicas": 1, "num_steps": 3, "outer": {"lr": 1}}
    config = from_record(values)
    assert (config.num_replicas, config.inner.warmup_steps, type(config.outer.lr)) == (1, 20, float)
    with pytest.raises(UserError, match="give a whole number"):
        from_record({"num_replicas": "1"})


def test_an_unknown_field_is_refused_with_the_nearest_name():
    siblings = "the fields there are mesh.replica, mesh.stage, mesh.fsdp, mesh.tensor, mesh.routing"
    assert_each_is_refused(
        [
            ({"outer": {"sync_evry": 3}}, ["unknown config field 'outer.sync_evry': did you mean 'outer.sync_every'"]),
            ({"outer": {"rate": 1.5}}, ["unknown config field 'outer.rate': the fields there are outer.lr"]),
            ({"outer": {"warmup_steps": 3}}, ["did you mean 'inner.warmup_steps'"]),
            ({"sync_every": 3}, ["unknown config field 'sync_every'", "did you mean 'outer.sync_every'"]),
            ({"outr": {"lr": 1.0}}, ["unknown config field 'outr': did you mean 'outer'"]),
            ({"lr": 3}, ["unknown config field 'lr'", "did you mean 'inner.lr' or 'outer.lr'"]),
            ({"model": {"rope_scaling": {"factr": 3}}}, ["did you mean 'model.rope_scaling.factor'"]),
            ({"data": {"seq_len": 3}}, ["unknown config field 'data.seq_len': did you mean 'data.sequence_length'?"]),
            ({"mesh": {"qqqq": 3}}, ["unknown config field 'mesh.qqqq'", siblings]),
        ]
    )


def test_errors_in_a_mixture_source_name_the_source():
    assert_each_is_refused(
        [
            (
                mixture("web", source=SOURCE | {"kind": "c5"}),
                ["data.mixture.web.kind='c5'", "give one of jsonl"],
            ),
            (mixture("web", source=SOURCE | {"kind": "mixture"}), ["data.mixture.web.kind='mixture'"]),
            (mixture("web", source=SOURCE | {"weight": -1}), ["data.mixture.web.weight=-1.0", "give a number above 0"]),
            (mixture("web", source=SOURCE | {"weight": "1"}), ["data.mixture.web.weight='1' is not allowed"]),
            (
                mixture("web", source=SOURCE | {"wieght": 1}),
                ["data.mixture.web.wieght", "did you mean 'data.mixture.web.weight'"],
            ),
            (mixture("web", source=SOURCE | {"zzz": 1}), ["the fields there are data.mixture.web.kind, "]),
            (mixture("web", source={"kind": "jsonl"}), ["data.mixture.web.weight is missing"]),
            (mixture("web", source=3), ["data.mixture.web: expected a group of fields, got 3"]),
            ({"data": {"mixture": [SOURCE]}}, ["data.mixture: expected groups of fields by name, got ["]),
            *((mixture(name), ["data.mixture: ", "is not a name"]) for name in ("a.b", "", "a b", "x" * 3000)),
        ]
    )


def test_mixtures_ignore_the_order_of_sources_and_sources_of_none():
    assert from_dict(mixture("web", "own")) == from_dict(mixture("own", "web"))
    without = from_dict({"data": {"kind": "mixture", "mixture": {"web": SOURCE, "own": None}}})
    assert without == from_dict(mixture("web")) != from_dict(mixture("own"))


def test_a_mixture_is_hashable_and_survives_pickle_and_json():
    config = from_dict(mixture("web", "own"))
    assert hash(config) == hash(from_dict(mixture("web", "own"))) != hash(from_dict(mixture("web")))
    assert pickle.loads(pickle.dumps(config)) == config == from_dict(json.loads(json.dumps(to_dict(config))))


def test_a_value_of_another_type_is_refused_by_field():
    assert_each_is_refused(
        [
            ({"num_steps": 1.5}, ["num_steps=1.5 is not allowed: give a whole number"]),
            ({"num_steps": True}, ["num_steps=True"]),
            ({"inner": {"lr": True}}, ["inner.lr=True is not allowed: give a number"]),
            ({"num_steps": None}, ["num_steps=None"]),
            ({"data": {"path": 3}}, ["data.path=3 is not allowed: give text"]),
            ({"outer": {"nesterov": 1}}, ["outer.nesterov=1 is not allowed: give True or False"]),
            (
                {"outer": {"consensus": "a"}},
                ["outer.consensus='a' is not allowed: give a number of at least 0 or None"],
            ),
            ({"outer": 3}, ["outer: expected a group of fields, got 3"]),
            ({"outer": None}, ["outer: expected a group of fields"]),
            ({"model": {"rope_scaling": {"factor": 8.0}}}, ["model.rope_scaling.low_freq_factor is missing"]),
        ]
    )


def test_fields_that_contradict_each_other_are_refused_with_both_values():
    assert_each_is_refused(
        [
            ({"model": {"num_heads": 3}}, ["model.hidden_size=256", "model.num_heads=3"]),
            ({"model": {"num_heads": 8, "num_kv_heads": 3}}, ["model.num_heads=8", "model.num_kv_heads=3"]),
            ({"model": {"hidden_size": 12, "num_heads": 4}}, ["model.hidden_size=12", "model.num_heads=4", "even"]),
            ({"model": {"head_dim": 7}}, ["model.head_dim is 7, which rotary embedding cannot pair up"]),
            (
                {"model": {"kind": "moe", "num_experts": 2, "experts_per_token": 3}},
                ["model.experts_per_token=3 is more"],
            ),
            ({"model": {"kind": "moe", "hidden_size": 30, "num_heads": 4}}, ["not a multiple of model.num_heads=4"]),
            (nested("model.rope_scaling.low_freq_factor", 4.0), ["low_freq_factor=4.0", "high_freq_factor=4.0"]),
            ({"inner": {"lr": 1e-4, "min_lr": 2e-4}}, ["inner.min_lr=0.0002", "inner.lr=0.0001"]),
            ({"inner": {"weight_decay": 0.1}}, ["inner.weight_decay=0.1", "inner.optimizer='adam'", "optimizer=adamw"]),
            ({"inner": {"optimizer": "adamw", "adam_lr": 1e-3}}, ["inner.adam_lr=0.001", "inner.optimizer='adamw'"]),
            ({"num_replicas": 4, "outer": {"group_size": 5}}, ["outer.group_size=5", "num_replicas=4"]),
            ({"outer": {"group_size": 1}}, ["outer.group_size=1", "2"]),
            ({"num_replicas": 1}, ["noloco", "num_replicas=1", "local"]),
            ({"method": "diloco", "outer": {"wire": "modulo4"}}, ["outer.wire='modulo4'", "method='diloco'", "'int4'"]),
            ({"outer": {"group_size": 3, "wire": "modulo4"}}, ["outer.wire='modulo4'", "outer.group_size=3", "'int8'"]),
            ({"method": "epidemic", "num_replicas": 1}, ["method='epidemic'", "num_replicas=1"]),
            ({"method": "epidemic", "outer": {"neighbours": 4}}, ["outer.neighbours=4", "num_replicas=4", "3"]),
            (
                {"num_replicas": 6, "outer": {"order": "hypercube"}},
                ["outer.order='hypercube'", "num_replicas=6", "'passes'"],
            ),
            ({"method": "epidemic", "outer": {"wire": "modulo4"}}, ["outer.wire='modulo4'", "outer.wire='int8'"]),
            ({"method": "epidemic", "outer": {"offload": True}}, ["outer.offload=True", "method='epidemic'"]),
            ({"method": "sparseloco", "outer": {"wire": "int8"}}, ["outer.wire='int8'", "method='sparseloco'"]),
            (
                {"method": "sparseloco", "outer": {"delay": 1}},
                ["outer.delay=1", "'sparseloco'", "outer.delay=0"],
            ),
            ({"method": "local", "outer": {"offload": True}}, ["outer.offload=True", "method='local'"]),
            ({"method": "ddp", "outer": {"wire": "int8"}}, ["outer.wire='int8'", "method='ddp'"]),
            ({"keep_period": 700, "checkpoint_every": 500}, ["keep_period=700", "checkpoint_every=500"]),
            ({"outer": {"delay": 51}}, ["outer.delay=51", "give 50"]),
            ({"num_microbatches": 3}, ["data.batch_size=8", "num_microbatches=3"]),
            ({"mesh": {"replica": 3}}, ["num_replicas=4", "mesh.replica=3"]),
            ({"mesh": {"fsdp": -1}}, ["mesh.replica", "mesh.fsdp", "-1"]),
            ({"mesh": {"stage": 3}}, ["model.num_layers=4", "mesh.stage=3"]),
            ({"mesh": {"stage": 2}, "model": {"tie_embeddings": True}}, ["model.tie_embeddings=True", "mesh.stage=2"]),
            ({"model": {"remat": "stage"}}, ["model.remat='stage'", "mesh.stage=1"]),
            ({"method": "local", "num_replicas": 1, "mesh": {"stage": 2}}, ["mesh.routing='random'", "num_replicas=1"]),
            ({"data": {"mixture": {"web": SOURCE}}}, ["data.mixture.web", "data.kind='text'", "data.kind=mixture"]),
            ({"data": {"kind": "mixture"}}, ["data.kind='mixture'", "names no source", "data.mixture.NAME.kind"]),
            (mixture("web", path="a"), ["data.path='a'", "--config.data.mixture.web.path"]),
            (mixture("web", validation_path="a"), ["data.validation_path='a'", "--config.data.mixture.web."]),
            (
                mixture("web", text_column="a"),
                ["--config.data.mixture.web.text_column", "--config.data.text_column=text "],
            ),
        ]
    )


def test_all_mistakes_of_a_configuration_are_told_at_once():
    for values, expected in [
        (
            {"num_stepz": 3, "seed": -1, "inner": {"lr": "fast", "b9": 1}, "mesh": 3, "data": {"mixture": {"a": {}}}},
            ["num_stepz", "seed=-1", "inner.lr='fast'", "inner.b9", "mesh: ", "mixture.a.kind", "mixture.a.weight"],
        ),
        (
            {
                "num_replicas": 1,
                "num_microbatches": 3,
                "inner": {"min_lr": 1.0},
                "data": {"kind": "mixture"},
                "mesh": {"stage": 3},
                "model": {"num_heads": 3, "num_kv_heads": 3},
            },
            ["num_heads=3", "names no source", "min_lr=1.0", "batch_size=8", "averages pairs", "stage=3", "routing"],
        ),
    ]:
        with pytest.raises(UserError) as raised:
            from_dict(values)
        found = [*raised.value.args]
        assert all(any(part in message for message in found) for part in expected), found
        assert len(found) == len(expected), found
        assert ". Also: ".join(found) == str(raised.value)


def test_a_warmup_longer_than_the_run_is_shortened_to_a_tenth_with_a_line():
    with pytest.warns(UserWarning, match=r"inner\.warmup_steps=50 is more than num_steps=20: shortened to 2, a tenth"):
        assert from_dict({"num_steps": 20, "inner": {"warmup_steps": 50}}).inner.warmup_steps == 2
    assert from_dict({"num_steps": 20, "inner": {"warmup_steps": 20}}).inner.warmup_steps == 20


def test_every_field_refuses_values_outside_its_choices_or_range_by_name():
    outside = {
        path: [
            *(["qqqq", allowed.choices[0][:-1] + "q"] if allowed.choices else []),
            *([field.type(allowed.minimum - 1), field.type(-2)] if allowed.minimum is not None else []),
            *([field.type(allowed.above), field.type(-2)] if allowed.above is not None else []),
            *([field.type(allowed.below)] if allowed.below is not None else []),
            *([0] if allowed.besides is not None else []),
            *([""] if allowed.nonempty else []),
            *([float("inf"), float("nan")] if field.type is float else []),
        ]
        for path, field in known_fields().items()
        for allowed in [field.allowed]
    }
    for path, values in outside.items():
        assert values or known_fields()[path].type in (str, bool), f"{path} is a number without a range"
        for value in values:
            message = refusal(nested(path, value))
            assert f"{path}={value!r}" in message, message


def test_refusals_say_which_values_are_allowed():
    assert_each_is_refused(
        [
            (nested("method", "nolocco"), ["method='nolocco' is not allowed: give one of noloco, diloco"]),
            (nested("elastic", "zzz"), ["give one of '', merge, copy"]),
            (nested("num_steps", 0), ["num_steps=0 is not allowed: give a whole number of at least 1"]),
            (nested("inner.lr", 0.0), ["give a number above 0"]),
            (nested("inner.b1", 1.0), ["give a number of at least 0 and below 1"]),
            (nested("mesh.fsdp", 0), ["give a whole number of at least 1, or -1"]),
            (nested("data.tokenizer", ""), ["data.tokenizer='' is not allowed: give text, not empty"]),
            (nested("inner.lr", float("inf")), ["inner.lr=inf is not allowed", "finite"]),
            (nested("num_steps", 2**31), ["num_steps=2147483648 is not allowed", "up to 2147483647"]),
        ]
    )


def test_values_at_the_edges_of_ranges_are_accepted():
    edges = {"inner.b1": 0.0, "outer.momentum": 0.0, "outer.consensus": 0.0, "seed": 0, "inner.clip_norm": 0.0}
    edges |= {"eval_every": 0, "keep_period": 0, "log_every": 2**31 - 1, "mesh.replica": -1, "inner.lr": 1e-4}
    for path, value in edges.items():
        from_dict({"inner": {"min_lr": 0.0}} | nested(path, value))


def test_one_replica_trains_with_every_method_that_needs_no_partner():
    from_dict({"method": "local", "num_replicas": 1, "mesh": {"stage": 2, "routing": "fixed"}})
    for method in ("diloco", "ddp", "local"):
        assert from_dict({"method": method, "num_replicas": 1}).num_replicas == 1


def test_a_saved_configuration_is_loaded_again(tmp_path):
    config = from_dict({"outer": {"consensus": 0.25}, "num_steps": 77})
    path = save_config(config, tmp_path / "run")
    assert path == tmp_path / "run" / "config.json"
    assert load_saved(tmp_path / "run") == config
    assert [file.name for file in path.parent.iterdir()] == ["config.json"]


def test_a_missing_or_broken_saved_configuration_is_named(tmp_path):
    for text in (None, "{", '{"num_stepz": 3}', "3"):
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=r"config\.json"):
            load_saved(tmp_path)


def test_reading_a_configuration_imports_no_jax():
    package = Path(noloco_jax.config.__file__).parent.parent
    program = (
        "import sys, types; package = sys.modules['noloco_jax'] = types.ModuleType('noloco_jax'); "
        f"package.__path__ = [{str(package)!r}]; import noloco_jax.config.reference; "  # not the package's imports
        "sys.exit(any(name.split('.')[0] in ('jax', 'flax', 'optax', 'numpy') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
