"""Settings that a run may change on resume, records of runs, and their throughput."""

import json
from dataclasses import replace

import pytest

from noloco_jax.checkpoint import record
from noloco_jax.checkpoint.record import (
    make_record,
    permitted_changes,
    version_changes,
)
from noloco_jax.config import TrainConfig, changes, from_dict, from_record, to_dict
from noloco_jax.errors import UserError
from noloco_jax.train.step_log import Throughput

CONFIG = TrainConfig()
OTHER = from_dict(
    {"num_steps": 77, "log_every": 3, "outer": {"sync_every": 5, "nesterov": True}, "data": {"sequence_length": 128}}
)


def test_permitted_changes_are_listed_without_free_or_unused_fields(tmp_path):
    lines = [str(change) for change in permitted_changes(CONFIG, OTHER, tmp_path)]
    assert lines == [
        "num_steps: 1000 before, 77 now",
        "outer.sync_every: 50 before, 5 now",
        "data.sequence_length: 256 before, 128 now",
    ]


def test_a_field_is_compared_if_either_method_uses_it():
    outer = replace(CONFIG.outer, sync_every=5)
    ddp, slow_ddp = (replace(CONFIG, method="ddp", outer=each) for each in (CONFIG.outer, outer))
    assert changes(ddp, slow_ddp) == []
    assert [change.field for change in changes(CONFIG, slow_ddp)] == ["method", "outer.sync_every"]


SCALED = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({}, {"method": "diloco"}),
        ({}, {"seed": 1}),
        ({}, {"model": {"num_layers": 3}}),
        ({}, {"model": {"rope_scaling": SCALED}}),
        ({}, {"inner": {"optimizer": "adamw"}}),
        ({}, {"outer": {"delay": 1}}),
        ({}, {"data": {"add_eos": False}}),
        ({}, {"data": {"shuffle_buffer": 1}}),
        ({}, {"init_from": "llama"}),
        ({"outer": {"wire": "int4"}}, {"outer": {"wire": "modulo4"}}),
        ({"outer": {"wire": "modulo4"}}, {"outer": {"wire": "float32"}}),
    ],
    ids=str,
)
def test_a_change_of_a_must_match_field_or_of_the_arrays_in_the_state_is_refused(before, now, tmp_path):
    with pytest.raises(UserError, match="to resume that run, or another --workdir"):
        permitted_changes(from_dict(before), from_dict(now), tmp_path)


def test_a_change_that_keeps_the_arrays_in_the_state_is_permitted(tmp_path):
    now = from_dict({"outer": {"wire": "float32"}})
    [change] = permitted_changes(from_dict({"outer": {"wire": "int4"}}), now, tmp_path)
    assert change.on_resume == "may change"


def test_changes_of_what_other_fields_leave_unused_are_not_told():
    idle = from_dict({"inner": {"momentum": 0.5}, "mesh": {"routing": "fixed"}})
    assert changes(CONFIG, idle) == []


def test_a_resume_may_leave_out_what_its_run_began_from(tmp_path):
    assert permitted_changes(from_dict({"init_from": "llama"}), CONFIG, tmp_path) == []


def test_an_added_or_removed_source_is_refused_with_the_flag_that_undoes_it(tmp_path):
    web, own = ({"kind": kind, "weight": 1.0} for kind in ("parquet", "jsonl"))
    one, both, heavier = (
        from_dict({"data": {"kind": "mixture", "mixture": mixture}})
        for mixture in ({"web": web}, {"web": web, "own": own}, {"web": web | {"weight": 2.0}})
    )
    with pytest.raises(UserError, match=r"give --config\.data\.mixture\.own=None to"):
        permitted_changes(one, both, tmp_path)
    with pytest.raises(UserError, match=r"give --config\.data\.mixture\.own\.kind=jsonl to"):
        permitted_changes(both, one, tmp_path)
    assert list(map(str, permitted_changes(one, heavier, tmp_path))) == ["data.mixture.web.weight: 1.0 before, 2.0 now"]


def test_a_record_restores_its_config_after_a_json_round_trip():
    made = json.loads(json.dumps(make_record(to_dict(OTHER), {"files": 3}, None)))
    assert from_record(made["config"]) == OTHER
    assert version_changes(made) == []


def test_a_changed_added_or_removed_package_is_reported(monkeypatch):
    monkeypatch.setattr(record, "versions", lambda: {"numpy": "2.0", "flax": "0.13", "jax": "0.10"})
    before = {"versions": {"numpy": "2.0", "flax": "0.12", "optax": "0.2"}}
    assert version_changes(before) == [
        "flax: version 0.12 before, 0.13 now",
        "optax: version 0.2 before, None now",
        "jax: version None before, 0.10 now",
    ]


def test_throughput_is_the_windows_tokens_over_its_seconds():
    now = [0.0]
    meter = Throughput(window=2, clock=lambda: now[0])
    assert meter.tokens_per_second == 0.0
    for seconds in (10.0, 1.0, 3.0):  # the first falls out of the window
        now[0] += seconds
        meter.step(100)
    assert meter.tokens_per_second == 200 / 4.0


def test_throughput_excludes_everything_before_a_reset():
    now = [0.0]
    meter = Throughput(clock=lambda: now[0])
    meter.step(100)
    now[0] = 50.0
    meter.reset()
    now[0] = 52.0
    meter.step(100)
    assert meter.tokens_per_second == 50.0
