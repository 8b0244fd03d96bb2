"""Communication of every method on every kind of mesh, against its promises.

The model is a Llama where the communication inside a replica is at issue, and otherwise the tiny model.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import pytest

from noloco_jax.communication.promises import broken_promises, verdict
from noloco_jax.communication.report import PROGRAMS, Report, inspect_run
from noloco_jax.config import from_dict
from noloco_jax.formatting import format_bytes
from noloco_jax.spmd.hlo import Collective, Traffic
from noloco_jax.train.messages import messages_of
from support.traffic import MODEL, TINY
from support.traffic import tiny_numel as numel

INNER, OUTER = ("inner_step",), ("outer_step",)


def report_of(
    method: str,
    num_replicas: int,
    num_devices: int = 8,
    only: tuple[str, ...] = INNER + OUTER,
    group_size: int = 2,
    num_layers: int = 1,
    batch_size: int = 4,
    wire: str = "float32",
    model: dict[str, Any] = TINY,
    more: Mapping[str, Any] = MappingProxyType({}),
    **mesh: int,
) -> Report:
    config = from_dict(
        {
            "method": method,
            "num_replicas": num_replicas,
            "num_microbatches": 2 if "stage" in mesh else 1,
            "model": model | {"num_layers": num_layers},
            "outer": {"group_size": group_size, "wire": wire, **more},
            "data": {"batch_size": batch_size, "sequence_length": 8},
            "mesh": {"replica": -1} | mesh,
        }
    )
    return inspect_run(config, jax.devices()[:num_devices], only)


@pytest.mark.parametrize(
    ("num_processes", "mesh", "axes"),
    [
        (1, {"fsdp": 2}, None),
        (4, {"fsdp": 2}, None),
        (8, {"fsdp": 2}, {"fsdp"}),
        (2, {"fsdp": 8}, {"fsdp"}),
        (4, {"fsdp": 2, "tensor": 2}, {"fsdp", "tensor"}),
        (8, {"stage": 2}, {"stage"}),
    ],
)
def test_batches_are_shared_only_inside_replicas_that_span_processes(num_processes, mesh, axes):
    inside = math.prod(mesh.values())
    config = from_dict(
        {
            "method": "ddp",
            "num_replicas": 8 // inside,
            "num_microbatches": 2 if "stage" in mesh else 1,
            "model": TINY | {"num_layers": 2},
            "data": {"batch_size": 16, "sequence_length": 8},
            "mesh": {"replica": -1} | mesh,
        }
    )
    report = inspect_run(config, jax.devices(), ("share_batch",), num_processes=num_processes)
    assert ("share_batch" in report.traffic) == (axes is not None)
    if axes is not None:
        assert axes_of(report, "share_batch") == axes
        assert 2 * 4 * 16 * 8 <= report.traffic["share_batch"].extent(lambda c: c.bytes)[1] <= 2 * 2 * 4 * 16 * 8
        assert broken_promises(report) == []


def across(report: Report, program: str) -> dict[str, set[tuple[str, ...]]]:
    """Map each kind of collective that crosses replicas to its axes."""
    kinds: dict[str, set[tuple[str, ...]]] = {}
    for collective in report.traffic[program].collectives():
        if "replica" in collective.axes:
            kinds.setdefault(collective.kind, set()).add(collective.axes)
    return kinds


def axes_of(report: Report, program: str) -> set[str]:
    return {axis for collective in report.traffic[program].collectives() for axis in collective.axes}


def sent(report: Report, program: str) -> tuple[int, int]:
    """Return the least and the most bytes that a device sends to other replicas."""
    return report.traffic[program].extent(lambda c: c.bytes * ("replica" in c.axes))


def test_noloco_sends_one_message_of_the_parameters_size_to_one_partner():
    report = report_of("noloco", 8, only=PROGRAMS)
    assert axes_of(report, "inner_step") == set()
    assert across(report, "outer_step") == {"collective-permute": {("replica",)}}
    assert axes_of(report, "outer_step") == {"replica"}
    assert report.parameter_bytes == 4 * numel(1) and report.num_pairings == 7
    assert sent(report, "outer_step") == (4 * numel(1), 4 * numel(1))
    outer = report.traffic["outer_step"]
    assert {outer.num_branches(collective) for collective in outer.collectives()} == {7}
    assert broken_promises(report) == []
    inner_line, outer_line, evaluation_line = verdict(report)
    assert inner_line == "inner step: nothing crosses replica"
    assert "a replica sends 7.23 kB to its partner (its parameters are 7.23 kB)" in outer_line
    assert evaluation_line.endswith("every replica waits for all others")


def test_fsdp_inside_replicas_crosses_no_replica_and_sends_shards():
    report = report_of("noloco", 4, fsdp=2)
    assert axes_of(report, "inner_step") == {"fsdp"}
    assert across(report, "outer_step") == {"collective-permute": {("replica",)}}
    assert axes_of(report, "outer_step") == {"replica"}
    assert sent(report, "outer_step")[1] == report.parameter_bytes < 0.6 * 4 * numel(1)


def test_the_verdict_says_that_the_bytes_of_a_shard_are_those_of_one_device():
    report = report_of("noloco", 4, only=PROGRAMS, fsdp=2)
    (outer_line,) = (line for line in verdict(report) if line.startswith("outer step"))
    shard = format_bytes(report.parameter_bytes)
    assert f"each of the 2 devices of a replica sends {shard} to its partner (its parameters are {shard})" in outer_line


@pytest.mark.parametrize(
    ("num_replicas", "group_size", "wire"),
    [
        *((4, 2, wire) for wire in ("float32", "bfloat16", "int4", "modulo4")),
        (4, 4, "float32"),
        (4, 4, "int8"),
        (8, 8, "int8"),
    ],
)
def test_a_replica_sends_the_bytes_that_its_run_reports(num_replicas, group_size, wire):
    """Every member of a group sends its whole message to each other."""
    report = report_of("noloco", num_replicas, num_replicas, OUTER, group_size, wire=wire)
    reported = messages_of(report.config, report.mesh_shape)
    assert sent(report, "outer_step") == (reported.of_outer_step(0),) * 2
    assert broken_promises(report) == []


@pytest.mark.parametrize(
    ("mesh", "group_size", "wire"),
    [
        ({"fsdp": 2}, 2, "int8"),
        ({"fsdp": 2}, 4, "float32"),
        ({"tensor": 2}, 3, "int8"),
        ({"fsdp": 2, "tensor": 2}, 2, "int4"),
    ],
)
def test_sharded_arrays_are_encoded_without_communication_inside_replicas(mesh, group_size, wire):
    """Every device has whole blocks of hidden states, as in all but tiny models."""
    num_devices = group_size * math.prod(mesh.values())
    model = TINY | {"hidden_size": 128}
    report = report_of("noloco", group_size, num_devices, OUTER, group_size, wire=wire, model=model, **mesh)
    assert axes_of(report, "outer_step") == {"replica"}


def test_fsdp_reduces_and_gathers_weights_and_not_activations():
    def weights(batch_size: int) -> tuple[int, int]:
        report = report_of("local", 2, num_devices=4, only=INNER, batch_size=batch_size, model=MODEL, fsdp=2)
        traffic = report.traffic["inner_step"]
        counted = {"all-reduce", "all-gather", "reduce-scatter"}
        return traffic.extent(lambda c: c.bytes * (c.kind in counted and not c.operands[0].startswith("s32")))

    assert weights(4) == weights(8)


def test_fsdp_and_tensor_together_stay_inside_replicas():
    report = report_of("noloco", 2, model=MODEL, fsdp=2, tensor=2)
    assert axes_of(report, "inner_step") == {"fsdp", "tensor"}
    assert across(report, "outer_step") == {"collective-permute": {("replica",)}}
    assert broken_promises(report) == []


def test_ddp_of_a_single_sharded_replica_is_fsdp():
    assert axes_of(report_of("ddp", 1, num_devices=4, fsdp=4), "inner_step") == {"fsdp"}


def test_replicas_that_share_a_device_send_at_most_the_devices_block():
    report = report_of("noloco", 8, num_devices=4)
    assert axes_of(report, "inner_step") == set()
    assert across(report, "outer_step") == {"collective-permute": {("replica",)}}
    assert sent(report, "outer_step") == (0, 2 * 4 * numel(1))
    assert broken_promises(report) == []


@pytest.mark.parametrize(
    ("model", "inside"),
    [(TINY, {}), (TINY, {"fsdp": 2}), (MODEL, {"tensor": 2})],
    ids=["whole", "fsdp", "tensor"],
)
def test_stages_send_to_the_next_stage_of_other_replicas_and_nothing_else(model, inside):
    report = report_of("noloco", 2, num_devices=8 if inside else 4, num_layers=2, model=model, stage=2, **inside)
    assert across(report, "inner_step") == {"collective-permute": {("replica", "stage")}}
    assert across(report, "outer_step") == {"collective-permute": {("replica",)}}
    assert broken_promises(report) == []


def test_diloco_reduces_over_all_replicas_in_outer_steps():
    report = report_of("diloco", 4, num_devices=4, only=OUTER)
    assert across(report, "outer_step") == {"all-reduce": {("replica",)}}
    assert sent(report, "outer_step") == (4 * numel(1), 4 * numel(1))


def bytes_of(report) -> float:
    """Return the bytes a replica sends in an outer step, by the log."""
    return messages_of(report.config, report.mesh_shape).of_outer_step(0)


def test_epidemic_sends_its_weights_to_three_of_seven_others():
    report = report_of("epidemic", 8, only=PROGRAMS)
    assert across(report, "outer_step") == {"collective-permute": {("replica",)}}
    assert sent(report, "outer_step") == (3 * 4 * numel(1),) * 2 == (bytes_of(report),) * 2
    assert broken_promises(report) == []
    assert "to each of its 3 partners" in "\n".join(verdict(report))


def test_sparseloco_gathers_its_packed_messages_from_all_replicas():
    report = report_of("sparseloco", 4, num_devices=4, only=OUTER)
    assert across(report, "outer_step") == {"all-gather": {("replica",)}}
    gathered = report.traffic["outer_step"].collectives()
    assert {operand.split("[")[0] for collective in gathered for operand in collective.operands} == {"u8"}
    assert 3 * sent(report, "outer_step")[1] == bytes_of(report)
    assert broken_promises(report) == []


@pytest.mark.parametrize(("mesh", "inside"), [({"fsdp": 2}, {"fsdp"}), ({"stage": 2}, set())], ids=str)
def test_sparse_messages_gather_chunks_inside_fsdp_replicas_but_not_between_stages(mesh, inside):
    report = report_of("sparseloco", 2, 2 * math.prod(mesh.values()), OUTER, num_layers=2, **mesh)
    assert axes_of(report, "outer_step") == {"replica"} | inside
    assert broken_promises(report) == []


def test_ddp_reduces_over_all_replicas_in_every_step():
    report = report_of("ddp", 4, num_devices=4)
    assert across(report, "inner_step") == {"all-reduce": {("replica",)}}
    assert sent(report, "inner_step") == (4 * numel(1), 4 * numel(1))
    assert "outer_step" not in report.traffic and broken_promises(report) == []


@pytest.mark.parametrize("method", ["noloco", "diloco"])
def test_replicas_on_one_device_send_nothing(method):
    assert axes_of(report_of(method, 4, num_devices=1, only=OUTER), "outer_step") == set()


@pytest.mark.parametrize(
    ("method", "program", "collective"),
    [
        ("ddp", "share_batch", Collective("reduce-scatter", ("replica", "fsdp"), 4, ("s32[1]",))),
        ("local", "inner_step", Collective("all-reduce", ("replica",), 4, ("f32[]",))),
        ("noloco", "inner_step", Collective("all-gather", ("replica", "fsdp"), 4, ("f32[1]",))),
        ("noloco", "inner_step", Collective("collective-permute", ("replica",), 4, ("f32[1]",))),
        ("diloco", "inner_step", Collective("all-reduce", ("replica",), 4, ("f32[]",))),
        ("noloco", "outer_step", Collective("all-reduce", ("replica",), 4, ("f32[]",))),
        ("noloco", "outer_step", Collective("collective-permute", ("replica",), 101, ("u8[101]",))),
    ],
)
def test_a_broken_promise_is_named(method, program, collective):
    traffic = {name: Traffic() for name in PROGRAMS}
    traffic[program].always[collective] += 1
    config = from_dict({"method": method, "num_replicas": 4, "outer": {"group_size": 2}})
    report = Report(config, {"replica": 4, "stage": 1, "fsdp": 2, "tensor": 1}, 100, 3, traffic)
    assert len(broken_promises(report)) == 1
    assert any(line.startswith("BROKEN PROMISE: ") for line in verdict(report))
