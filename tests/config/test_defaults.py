"""Defaults of each method, which fill the fields that a configuration leaves out."""

import dataclasses
import inspect
import json
from pathlib import Path

import pytest

import noloco_jax as nj
from noloco_jax.config import (
    OuterConfig,
    TrainConfig,
    from_dict,
    load_config,
    overridden,
    save_config,
    unused_settings,
)
from noloco_jax.optim.methods import METHOD_FIELDS
from support.paths import CONFIGS

# Taken from the papers and from the defaults of the four transforms before METHODS existed.
OWN = {
    "noloco": {
        **{"lr": 0.7, "momentum": 0.5, "momentum_of": "steps", "consensus": None, "sync_every": 50},
        **{"group_size": 2, "order": "passes", "wire": "float32"},
    },
    "diloco": {"lr": 0.7, "momentum": 0.9, "sync_every": 100, "nesterov": True, "wire": "float32"},
    "epidemic": {"sync_every": 1, "order": "passes", "wire": "float32", "neighbours": None},
    "sparseloco": {"lr": 1.0, "sync_every": 30, "top_k": 64},
    "ddp": {},
    "local": {},
}
NOTHING = dict.fromkeys(METHOD_FIELDS)


def own_fields(config: TrainConfig) -> dict:
    return {name: getattr(config.outer, name) for name in METHOD_FIELDS}


def loaded(name: str, *overrides: str) -> TrainConfig:
    given = ["--config.data.tokenizer=byte"] if name.startswith("c4_tiny") else []
    file, _, argument = name.partition(":")
    return load_config(f"{CONFIGS / file}.py{':' if argument else ''}{argument}", [*given, *overrides])


@pytest.mark.parametrize("method", OWN)
def test_omitted_fields_take_the_methods_defaults_and_unused_ones_none(method):
    assert own_fields(from_dict({"method": method})) == own_fields(TrainConfig(method=method)) == NOTHING | OWN[method]


def test_the_fields_that_default_to_none_are_those_of_the_method_table():
    fields = dataclasses.fields(OuterConfig)
    assert {field.name for field in fields if field.default is None} == set(METHOD_FIELDS)


@pytest.mark.parametrize("method", ["noloco", "diloco", "epidemic", "sparseloco"])
def test_a_transform_has_the_defaults_of_its_method(method):
    """A method without options is the same whether it is chained in Optax or chosen in a configuration."""
    parameters = dict(inspect.signature(getattr(nj, method)).parameters)
    assert parameters.pop("axis_name").default == "replica"
    for number in ("fragments", "delay"):
        if number in parameters:
            assert parameters.pop(number).default is None
    row = dict(OWN[method])
    if method in ("noloco", "epidemic"):  # their first argument holds these options
        parameters |= inspect.signature(
            {"noloco": nj.RandomPairing, "epidemic": nj.RandomNeighbours}[method]
        ).parameters
        for name in ("num_replicas", "seed", "max_pool", "pairing" if method == "noloco" else "neighbours"):
            parameters.pop(name)
    if method == "sparseloco":  # not in the configuration: the authors' only value
        assert parameters.pop("error_decay").default == 0.95
    names = {"outer_lr": "lr", "outer_momentum": "momentum", "degree": "neighbours"}
    assert {names.get(name, name): parameter.default for name, parameter in parameters.items()} == row


@pytest.mark.parametrize("file", ["quickstart", "c4_bytes", "c4_tiny", "c4_125m", "c4_125m:best", "reddit_7b"])
@pytest.mark.parametrize("method", ["diloco", "epidemic", "sparseloco"])
def test_a_method_chosen_by_flag_ignores_the_settings_of_the_files_method(file, method):
    config = loaded(file, f"--config.method={method}")
    assert own_fields(config) == NOTHING | OWN[method]
    assert unused_settings(config) == []


def test_flags_override_the_defaults_of_a_method_chosen_by_flag():
    for flags in (
        ["--config.method=diloco", "--config.outer.momentum=0.3", "--config.outer.sync_every=20"],
        ["--config.outer.sync_every=20", "--config.outer.momentum=0.3", "--config.method=diloco"],
    ):
        outer = loaded("quickstart", *flags).outer
        assert (outer.lr, outer.momentum, outer.nesterov, outer.sync_every) == (0.7, 0.3, True, 20)


def test_references_to_a_method_field_keep_the_files_value_unless_a_flag_sets_it(tmp_path):
    file = tmp_path / "a.py"
    file.write_text(
        "from ml_collections import ConfigDict\n\ndef get_config():\n"
        "    config = ConfigDict({'outer': {'sync_every': 10, 'lr': 0.6, 'delay': 3}})\n"
        "    config.eval_every = config.outer.get_oneway_ref('sync_every') * 5\n    return config\n"
    )
    plain, with_flag = (
        load_config(str(file), ["--config.method=diloco", *more]) for more in ([], ["--config.outer.sync_every=20"])
    )
    assert (plain.outer.sync_every, plain.outer.lr, plain.outer.delay, plain.eval_every) == (100, 0.7, 3, 50)
    assert (with_flag.outer.sync_every, with_flag.eval_every) == (20, 100)


def test_a_frozen_configuration_takes_flags(tmp_path):
    file = tmp_path / "a.py"
    file.write_text(
        "from ml_collections import FrozenConfigDict\n\ndef get_config():\n"
        "    return FrozenConfigDict({'num_replicas': 2, 'seed': 3})\n"
    )
    config = load_config(str(file), ["--config.num_replicas=4"])
    assert (config.num_replicas, config.seed) == (4, 3)


def test_changing_the_method_of_a_saved_configuration_drops_its_method_settings(tmp_path):
    saved = save_config(loaded("quickstart"), tmp_path)
    record = json.loads(Path(saved).read_text())
    assert (record["outer"]["momentum"], record["outer"]["sync_every"], record["outer"]["nesterov"]) == (0.5, 10, None)
    for config in (
        load_config(str(saved), ["--config.method=diloco"]),
        overridden(loaded("quickstart"), ["--config.method=diloco"]),
    ):
        assert own_fields(config) == NOTHING | OWN["diloco"]
    assert load_config(str(saved)) == loaded("quickstart")


def test_settings_that_the_method_ignores_are_listed():
    outer = {"outer": {"sync_every": 5, "nesterov": True, "group_size": 3}}
    assert unused_settings(from_dict(outer)) == ["outer.nesterov=True"]
    assert unused_settings(from_dict({"method": "diloco"} | outer)) == ["outer.group_size=3"]
    settings = ["outer.sync_every=5", "outer.group_size=3", "outer.nesterov=True"]
    assert unused_settings(from_dict({"method": "ddp"} | outer)) == settings
    assert unused_settings(TrainConfig()) == []


def test_settings_that_go_with_others_are_listed_without_them():
    alone = {"model": {"num_experts": 16}, "inner": {"momentum": 0.5}, "sample_prompt": "a"}
    names = ["sample_prompt='a'", "model.num_experts=16", "inner.momentum=0.5"]
    assert sorted(unused_settings(from_dict(alone))) == sorted(names)
    beside = {
        "model": alone["model"] | {"kind": "moe"},
        "inner": alone["inner"] | {"optimizer": "muon", "schedule": "wsd"},
    }
    assert unused_settings(from_dict(alone | beside | {"sample_tokens": 3})) == []
    constant = {"inner": {"schedule": "constant", "min_lr": 1e-3, "lr": 1e-2}}
    assert unused_settings(from_dict(constant)) == ["inner.min_lr=0.001"]
