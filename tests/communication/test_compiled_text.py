"""Collectives read from jaxprs, against the text of the programs that XLA compiles for them."""

import math
from typing import Any

import jax
import pytest

from noloco_jax.config import TrainConfig, from_dict
from noloco_jax.spmd.compile import arguments_of
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.pipeline.routes import route_pool
from noloco_jax.spmd.programs import build_programs
from noloco_jax.train.bytes_sent import bytes_sent_of, num_pairings
from support import tiny_model
from support.compiled_text import Found, collectives_in

LLAMA = {"hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "num_kv_heads": 2, "vocab_size": 24}
TINY = {"kind": tiny_model.KIND, "hidden_size": 16, "intermediate_size": 32, "vocab_size": 24}


def config_of(method: str, num_replicas: int, outer: dict[str, Any] | None = None, model=TINY, **mesh) -> TrainConfig:
    return from_dict(
        {
            "method": method,
            "num_replicas": num_replicas,
            "num_microbatches": 2,
            "model": model | {"num_layers": mesh.get("stage", 1)},
            "outer": outer or {},
            "data": {"batch_size": 4, "sequence_length": 8},
            "mesh": {"replica": num_replicas} | mesh,
        }
    )


def compiled(config: TrainConfig, program: str) -> list[Found]:
    programs = build_programs(config, make_mesh(config.mesh, config.num_replicas, jax.devices()))
    lowered = getattr(programs, program).lower(*arguments_of(programs)[program])
    text = lowered.compile({"xla_backend_optimization_level": 0}).as_text()
    return collectives_in(text, dict(programs.mesh.shape))


def config_mesh(config: TrainConfig) -> dict[str, int]:
    return {axis: getattr(config.mesh, axis) for axis in ("replica", "stage", "fsdp", "tensor")}


def across(found: list[Found]) -> list[Found]:
    return [one for one in found if "replica" in one.axes]


@pytest.mark.parametrize(
    ("num_replicas", "outer", "mesh"),
    [
        (4, {"group_size": 3, "wire": "int8"}, {}),
        (4, {"wire": "int4"}, {"stage": 2}),
        (4, {"wire": "modulo4", "fragments": 2}, {}),
    ],
)
def test_messages_of_an_outer_step_are_those_of_the_compiled_branches(num_replicas, outer, mesh):
    config = config_of("noloco", num_replicas, outer, **mesh)
    found = across(compiled(config, "outer_step"))
    assert {one.kind for one in found} == {"collective-permute"}
    total = sum(one.bytes * one.num_pairs for one in found)
    sent = bytes_sent_of(config, config_mesh(config)).outer_step
    assert total == pytest.approx(sent * num_pairings(config) * num_replicas, rel=1e-12)


def test_messages_of_a_routed_inner_step_are_those_of_the_compiled_branches():
    """Two switches, forward and back, have a branch for each route, and run at each of three ticks."""
    config = config_of("noloco", 4, stage=2)
    found = across(compiled(config, "inner_step"))
    assert {one.kind for one in found} == {"collective-permute"}
    num_branches = len({tuple(routes.flat) for routes in route_pool(4, 2, config.seed, "random")})
    total = sum(one.bytes * one.num_pairs for one in found) * 3 / num_branches
    assert total == pytest.approx(bytes_sent_of(config, config_mesh(config)).inner_step * 4, rel=1e-12)


@pytest.mark.parametrize(
    ("method", "program", "field"),
    [("diloco", "outer_step", "outer_step"), ("ddp", "inner_step", "inner_step"), ("noloco", "merge", "final_merge")],
)
def test_an_all_reduce_sends_the_bytes_of_a_ring(method, program, field):
    config = config_of(method, 4, {"final_merge": True} if method == "noloco" else {})
    found = across(compiled(config, program))
    assert {one.kind for one in found} == {"all-reduce"}
    sent = getattr(bytes_sent_of(config, config_mesh(config)), field)
    assert sent == sum(one.bytes for one in found) * 2 * 3 / 4 > 0


@pytest.mark.parametrize(
    ("method", "outer", "kinds", "mesh"),
    [
        ("diloco", {"wire": "int4"}, {"all-to-all", "all-gather"}, {"stage": 2}),
        ("sparseloco", {}, {"all-gather"}, {"fsdp": 2}),
    ],
)
def test_encoded_messages_to_all_send_their_bytes_once(method, outer, kinds, mesh):
    config = config_of(method, 4, outer, **mesh)
    found = across(compiled(config, "outer_step"))
    assert {one.kind for one in found} == kinds
    sent = sum(one.bytes for one in found) * 3 / 4 * math.prod(mesh.values())  # by all devices of a replica
    assert bytes_sent_of(config, config_mesh(config)).outer_step == sent > 0


@pytest.mark.parametrize(
    ("program", "mesh"),
    [
        ("inner_step", {"fsdp": 2, "tensor": 2}),
        ("inner_step", {"stage": 2, "tensor": 2}),
        ("outer_step", {"fsdp": 2, "tensor": 2}),
    ],
)
def test_xla_adds_no_collective_across_replicas(program, mesh):
    """Only messages between stages and those of outer steps cross; what XLA adds stays inside a replica."""
    found = across(compiled(config_of("noloco", 2, model=LLAMA, **mesh), program))
    crossing = {(one.kind, one.axes) for one in found}
    routed = {("collective-permute", ("replica", "stage"))} if "stage" in mesh else set()
    expected = {"inner_step": routed, "outer_step": {("collective-permute", ("replica",))}}
    assert crossing == expected[program]


def test_sharded_arrays_are_encoded_without_communication_inside_replicas():
    """Every device has whole blocks of hidden states, as in all but tiny models."""
    config = config_of("noloco", 2, {"wire": "int4"}, TINY | {"hidden_size": 128}, fsdp=2, tensor=2)
    assert {one.axes for one in compiled(config, "outer_step")} == {("replica",)}


def test_fsdp_reduces_and_gathers_weights_and_not_activations():
    def weights(batch_size: int) -> int:
        values = {"batch_size": batch_size, "sequence_length": 8}
        config = from_dict(
            {"method": "local", "num_replicas": 2, "model": LLAMA | {"num_layers": 1}, "data": values}
            | {"mesh": {"replica": 2, "fsdp": 2}}
        )
        found = compiled(config, "inner_step")
        assert {one.axes for one in found} == {("fsdp",)}
        return sum(one.bytes for one in found if one.kind in ("all-reduce", "all-gather", "reduce-scatter"))

    tokens = 4 * 4 * 8 * 4
    assert abs(weights(8) - weights(4)) <= tokens
