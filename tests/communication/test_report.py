"""Collectives of every method on every kind of mesh: who crosses replicas, what is unexpected, and the command."""

import math
from fractions import Fraction
from typing import Any

import jax
import pytest

from noloco_jax.config import from_dict
from noloco_jax.errors import UserError
from noloco_jax.formatting import format_bytes
from noloco_jax.spmd.compile import PROGRAMS
from noloco_jax.spmd.traffic import Collective
from noloco_jax.tools import communication as command
from noloco_jax.tools.communication import Report, inspect_run, unexpected_collectives
from support import tiny_model

TINY = {"kind": tiny_model.KIND, "hidden_size": 16, "intermediate_size": 32, "vocab_size": 64}
NUMEL = 2 * 64 * 16 + 16 + 2 * 2 * 16 * 32  # of two layers


def report_of(method: str, num_replicas: int, outer: dict[str, Any] | None = None, **mesh: int):
    config = from_dict(
        {
            "method": method,
            "num_replicas": num_replicas,
            "num_microbatches": 2 if "stage" in mesh else 1,
            "model": TINY | {"num_layers": 2},
            "outer": outer or {},
            "data": {"batch_size": 16, "sequence_length": 8},
            "mesh": {"replica": -1} | mesh,
        }
    )
    return inspect_run(config, jax.devices()[:8])


def across(report: Report, program: str) -> set[tuple[str, tuple[str, ...]]]:
    return {(one.operation, one.axes) for one in report.collectives[program] if "replica" in one.axes}


@pytest.mark.parametrize(
    ("method", "outer", "mesh", "operation"),
    [
        ("noloco", {}, {}, "ppermute"),
        ("noloco", {"wire": "modulo4", "fragments": 2}, {"stage": 2}, "ppermute"),
        ("noloco", {"wire": "modulo4", "group_size": 4}, {"fsdp": 2}, "ppermute"),
        ("epidemic", {}, {"fsdp": 2}, "ppermute"),
        ("diloco", {}, {"stage": 2}, "psum"),
        ("diloco", {"wire": "int4"}, {"fsdp": 2}, "all_to_all"),
        ("sparseloco", {}, {"fsdp": 2}, "all_gather"),
    ],
)
def test_only_the_exchange_of_the_method_crosses_replicas(method, outer, mesh, operation):
    report = report_of(method, 8 // math.prod(mesh.values()), outer, **mesh)
    routed = {("ppermute", ("replica", "stage"))} if "stage" in mesh else set()
    assert across(report, "inner_step") == routed
    expected = {"all_to_all", "all_gather"} if operation == "all_to_all" else {operation}
    assert {kind for kind, _ in across(report, "outer_step")} == expected
    assert not across(report, "evaluate")
    assert unexpected_collectives(report) == []


def test_ddp_averages_gradients_in_every_step():
    report = report_of("ddp", 8)
    assert across(report, "inner_step") == {("psum", ("replica",))}
    assert unexpected_collectives(report) == []


def test_a_delayed_exchange_runs_over_the_hosts_and_alone_crosses_replicas():
    report = report_of("noloco", 8, {"sync_every": 4, "delay": 2})
    assert "outer_step" not in report.collectives
    assert across(report, "exchange") == {("ppermute", ("replica",))}
    assert not any(across(report, program) for program in ("inner_step", "local_step", "store", "correct_step"))


def test_replicas_that_share_a_device_send_the_devices_block_in_one_message():
    report = report_of("noloco", 16)
    found = report.collectives["outer_step"]
    assert report.parameter_bytes == 4 * NUMEL
    assert {one.bytes for one in found} == {2 * 4 * NUMEL}


def test_replicas_of_one_device_send_nothing():
    assert report_of("noloco", 4, replica=1).collectives["outer_step"] == []


@pytest.mark.parametrize(
    ("method", "program", "operation", "axes"),
    [
        ("ddp", "share_batch", "reduce_scatter", ("replica", "fsdp")),
        ("local", "inner_step", "psum", ("replica",)),
        ("noloco", "inner_step", "all_gather", ("replica", "fsdp")),
        ("noloco", "inner_step", "ppermute", ("replica",)),
        ("noloco", "outer_step", "psum", ("replica",)),
        ("noloco", "evaluate", "psum", ("replica",)),
    ],
)
def test_a_collective_that_the_method_does_not_allow_is_named(method, program, operation, axes):
    found: dict[str, list[Collective]] = {name: [] for name in PROGRAMS}
    found[program].append(Collective(operation, axes, 4, Fraction(4), Fraction(1)))
    config = from_dict({"method": method, "num_replicas": 4})
    (line,) = unexpected_collectives(Report(config, {"replica": 4, "stage": 1, "fsdp": 2, "tensor": 1}, 100, found))
    assert line == f"{program}: {operation} of 4 B crosses {', '.join(axes)}"


def test_more_bytes_than_the_parameters_are_named():
    sent = [Collective("ppermute", ("replica",), 106, Fraction(106), Fraction(1))]
    config = from_dict({"num_replicas": 4})
    report = Report(config, {"replica": 4, "stage": 1, "fsdp": 1, "tensor": 1}, 100, {"outer_step": sent})
    assert unexpected_collectives(report) == ["outer step: a device sends 106 B, and its parameters are 100 B"]


CONFIG = f"""
def get_config():
    model = dict(kind={tiny_model.KIND!r}, hidden_size=16, intermediate_size=32, vocab_size=24, num_layers=1)
    return dict(num_replicas=3, model=model, data=dict(batch_size=2, sequence_length=8), mesh=dict(replica=3))
"""
PARAMETER_BYTES = 4 * (2 * 24 * 16 + 16 + 2 * 16 * 32)


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "tiny.py"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def devices(monkeypatch):
    """Make JAX look uninitialized: it then has as many of the tests' devices as the command asks for."""
    there, updates = jax.devices(), {}
    monkeypatch.setattr(jax.config, "update", updates.__setitem__)
    monkeypatch.setattr(jax, "devices", lambda: there[: updates["jax_num_cpu_devices"]])
    return updates


def test_the_command_prints_a_table_for_the_devices_asked_for(config_file, devices, capsys):
    assert command.main([f"--config={config_file}", "--devices=3"]) == 0
    assert devices == {"jax_platforms": "cpu", "jax_num_cpu_devices": 3}
    output = capsys.readouterr().out
    assert "noloco, 3 replicas, mesh replica 3 x stage 1 x fsdp 1 x tensor 1" in output
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in output.splitlines() if line.startswith("|")]
    rows = {row[0]: row[1:] for row in lines[2:]}
    assert set(rows) == set(PROGRAMS) - {"share_batch", "correct_step"}
    sent = format_bytes(PARAMETER_BYTES * 2 / 3)
    assert rows["outer_step"] == ["ppermute", "replica", "1", format_bytes(PARAMETER_BYTES), sent]
    assert rows["inner_step"] == ["none", "", "", "", ""]


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["--devices=2"], "3 devices"), (["--devices=0"], "--devices=0"), (["--device=2"], "--devices")],
)
def test_bad_input_is_refused_in_one_line(config_file, arguments, named):
    with pytest.raises(UserError, match=named) as caught:
        command.main([f"--config={config_file}", *arguments])
    assert "\n" not in str(caught.value)


def test_an_unexpected_collective_is_printed_with_status_1(config_file, capsys, monkeypatch):
    found = [Collective("psum", ("replica",), 4, Fraction(4), Fraction(1))]

    def report(config, devices):
        return Report(config, {"replica": 3, "stage": 1, "fsdp": 1, "tensor": 1}, 100, {"inner_step": found})

    monkeypatch.setattr(command, "inspect_run", report)
    monkeypatch.setattr(command, "use_cpu_cores", lambda *_: None)
    assert command.main([f"--config={config_file}"]) == 1
    assert "UNEXPECTED: inner_step: psum of 4 B crosses replica" in capsys.readouterr().out
