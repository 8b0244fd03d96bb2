"""What compiled programs communicate: the reader of HLO, and the promises of every method on every kind of mesh.

The mesh of the small examples is a=2, b=2, c=2: device 4a + 2b + c.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from noloco_jax import inspect
from noloco_jax.config import from_dict
from noloco_jax.parallel.collectives import Collective, Traffic, read_hlo

CUBE = {"a": 2, "b": 2, "c": 2}
ROOT = Path(__file__).parents[1]


def module(body: str, computations: str = "", partitions: int = 8) -> str:
    return (
        f"HloModule test, is_scheduled=true, num_partitions={partitions}\n{computations}\n\n"
        f"ENTRY %main.1_spmd (x: f32[4,8]) -> f32[4,8] {{\n  %x = f32[4,8]{{1,0}} parameter(0)\n{body}\n}}\n"
    )


def only(traffic: Traffic) -> Collective:
    (collective,) = traffic.collectives()
    return collective


# --- the reader, on text whose groups are worked out by hand


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", ("c",)),
        ("{{0,2},{1,3},{4,6},{5,7}}", ("b",)),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("a",)),
        ("{{0,3},{1,2},{4,7},{5,6}}", ("b", "c")),
        ("{{0,1,2,3},{4,5,6,7}}", ("b", "c")),
        ("{{0,1,2,3,4,5,6,7}}", ("a", "b", "c")),
        ("{{0,1,2},{3},{4},{5},{6,7}}", ("b", "c")),
        ("{{0},{1},{2},{3},{4},{5},{6},{7}}", ()),
        ("{}", ("a", "b", "c")),
        ("[4,2]<=[8]", ("c",)),
        ("[2,4]<=[8]", ("b", "c")),
        ("[1,8]<=[8]", ("a", "b", "c")),
        ("[8,1]<=[8]", ()),
        ("[4,2]<=[2,4]T(1,0)", ("a",)),  # columns of [[0 1 2 3] [4 5 6 7]]
        ("[4,2]<=[2,2,2]T(0,2,1)", ("b",)),
        ("[2,4]<=[2,2,2]T(1,0,2)", ("a", "c")),
        ("mesh['x'=2,'y'=4] {'x'}", ("a",)),
        ("mesh['x'=2,'y'=4] {'y'}", ("b", "c")),
        ("mesh['x'=2,'y'=4] {'y':(1)2}", ("b",)),
        ("mesh['x'=2,'y'=4] {'y':(2)2}", ("c",)),
        ("mesh['x'=8] {'x':(1)2,'x':(4)2}", ("a", "c")),
        ("mesh['x'=2,'y'=2,'z'=2] {'x','z'}", ("a", "c")),
        ("mesh[x=2,y=4] {x}", ("a",)),
        ("mesh['x'=2,'y'=4] {}", ()),
        ("mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'x'}", ("c",)),  # x: 0 2 4 6, then 1 3 5 7
        ("mesh['x'=4,'y'=2], device_ids=(0,4,1,5,2,6,3,7) {'y'}", ("a",)),
    ],
)
def test_groups_in_any_notation_cross_the_axes_in_which_their_devices_differ(groups, axes):
    line = f"  ROOT %r = f32[4,8] all-reduce(%x), channel_id=1, replica_groups={groups}, use_global_device_ids=true"
    assert only(read_hlo(module(line + ", to_apply=%add"), CUBE)).axes == axes


@pytest.mark.parametrize(
    ("pairs", "axes"),
    [
        ("{{0,4},{4,0}}", ("a",)),
        ("{{0,1},{1,0},{2,6}}", ("a", "c")),
        ("{{0,6},{6,0}}", ("a", "b")),
        ("{{0,0},{5,5}}", ()),
        ("{}", ()),
    ],
)
def test_a_permute_crosses_the_axes_in_which_its_pairs_differ(pairs, axes):
    line = f"  ROOT %r = f32[4,8] collective-permute(%x), channel_id=1, source_target_pairs={pairs}"
    assert only(read_hlo(module(line), CUBE)).axes == axes


def test_groups_without_global_ids_are_of_whole_programs():
    line = "  ROOT %r = f32[4,8] all-reduce(%x), channel_id=1, replica_groups={{0}}, to_apply=%add"
    assert only(read_hlo(module(line), CUBE)).axes == ("a", "b", "c")


def test_a_collective_without_a_channel_stays_on_its_device():
    line = "  ROOT %r = f32[4,8] all-reduce(%x), replica_groups={}, to_apply=%add"
    assert only(read_hlo(module(line), CUBE)).axes == ()


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[4,8]{1,0}", 128),
        ("bf16[4,8]{1,0:T(8,128)(2,1)}", 64),
        ("pred[3]", 3),
        ("s4[6]", 3),
        ("f8e4m3fn[5]", 5),
        ("c64[2]", 16),
        ("f32[]", 4),
        ("(f32[2], /*index=1*/u8[3])", 11),
    ],
)
def test_bytes_are_those_of_the_operand(shape, size):
    body = (
        f"  %y = {shape} custom-call(%x)\n"
        "  ROOT %r = f32[1] all-gather(%y), channel_id=1, replica_groups=[4,2]<=[8], use_global_device_ids=true"
    )
    assert only(read_hlo(module(body), CUBE)).bytes == size


def test_a_tuple_of_operands_is_one_collective_of_all_their_bytes():
    body = (
        "  %y = bf16[6]{0} convert(%x)\n"
        "  %r = (f32[4,8]{1,0}, /*index=1*/bf16[6]{0}) all-reduce(%x, /*index=1*/%y), channel_id=1, "
        "replica_groups=[4,2]<=[8], use_global_device_ids=true, to_apply=%add"
    )
    expected = Collective("all-reduce", ("c",), 4 * 32 + 2 * 6, ("f32[4,8]", "bf16[6]"))
    assert only(read_hlo(module(body), CUBE)) == expected


ASYNC = """
%wrapped (p: f32[4,8]) -> f32[1,8] {
  %p = f32[4,8]{1,0} parameter(0)
  ROOT %rs = f32[1,8] reduce-scatter(%p), channel_id=4, replica_groups=[2,4]<=[8], use_global_device_ids=true
}, execution_thread="parallel"
"""


@pytest.mark.parametrize(
    ("lines", "kind", "axes"),
    [
        (
            "  %s = f32[4,8] all-reduce-start(%x), channel_id=1, replica_groups=[4,2]<=[8], "
            "use_global_device_ids=true\n  ROOT %d = f32[4,8] all-reduce-done(%s)",
            "all-reduce",
            ("c",),
        ),
        (
            "  %s = (f32[4,8], f32[8,8]) all-gather-start(%x), channel_id=1, replica_groups=[4,2]<=[2,4]T(1,0), "
            "dimensions={0}, use_global_device_ids=true\n  ROOT %d = f32[8,8] all-gather-done(%s)",
            "all-gather",
            ("a",),
        ),
        (
            "  %s = (f32[4,8]{1,0}, f32[4,8]{1,0}, u32[], u32[]) collective-permute-start(%x), channel_id=1, "
            "source_target_pairs={{0,2},{2,0}}\n  ROOT %d = f32[4,8]{1,0} collective-permute-done(%s)",
            "collective-permute",
            ("b",),
        ),
        (
            "  %s = ((f32[4,8]), f32[1,8], s32[]) async-start(%x), calls=%wrapped\n"
            "  ROOT %d = f32[1,8] async-done(%s)",
            "reduce-scatter",
            ("b", "c"),
        ),
        (
            "  %t = token[] after-all()\n"
            "  %s = (f32[4,8], u32[], token[]) send(%x, %t), channel_id=1, "
            'frontend_attributes={_xla_send_recv_source_target_pairs="{{0,1},{1,0}}"}\n'
            "  %d = token[] send-done(%s), channel_id=1",
            "collective-permute",
            ("c",),
        ),
    ],
)  # fmt: skip
def test_an_asynchronous_collective_counts_once_by_its_operand(lines, kind, axes):
    traffic = read_hlo(module(lines, ASYNC), CUBE)
    assert only(traffic) == Collective(kind, axes, 128, ("f32[4,8]",))
    assert traffic.times(only(traffic)) == (1, 1)


def test_a_transfer_to_the_host_is_not_communication():
    body = "  %t = token[] after-all()\n  %s = token[] send(%x, %t), channel_id=1, is_host_transfer=true"
    assert not read_hlo(module(body), CUBE)


def permute(size: int, pairs: str) -> str:
    return (
        f"%of_{size} (p: f32[{size}]) -> f32[{size}] {{\n  %p = f32[{size}] parameter(0)\n"
        f"  ROOT %r = f32[{size}] collective-permute(%p), channel_id=1, source_target_pairs={pairs}\n}}\n"
    )


LOOP = permute(2, "{{0,1},{1,0}}") + "%still (p: pred[]) -> pred[] {\n  ROOT %p = pred[] parameter(0)\n}\n"


def test_a_loop_of_known_length_repeats_its_collectives():
    body = (
        "  %w = f32[2] while(%x), condition=%still, body=%of_2, "
        'metadata={op_name="while/body"}, backend_config={"known_trip_count":{"n":"7"}}'
    )
    traffic = read_hlo(module(body, LOOP), CUBE)
    assert traffic.exact and traffic.times(only(traffic)) == (7, 7)


def test_a_loop_of_unknown_length_is_said_to_be_inexact():
    traffic = read_hlo(module("  %w = f32[2] while(%x), condition=%still, body=%of_2", LOOP), CUBE)
    assert not traffic.exact and traffic.times(only(traffic)) == (1, 1)


def test_a_conditional_counts_one_branch_and_not_their_sum():
    branches = permute(2, "{{0,1}}") + permute(10, "{{0,4}}") + permute(6, "{{0,1}}")
    body = (
        "  %s = f32[2] conditional(%x, %x, %x), branch_computations={%of_2, %of_10, %of_6}\n"
        "  %t = f32[2] collective-permute(%x), channel_id=1, source_target_pairs={{0,1}}"
    )
    traffic = read_hlo(module(body, branches), CUBE)
    assert traffic.extent(lambda collective: collective.bytes) == (4 * (32 + 2), 4 * (32 + 10))
    found = {c.operands: (traffic.times(c), traffic.num_branches(c)) for c in traffic.collectives()}
    assert found == {
        ("f32[4,8]",): ((1, 1), 0),
        ("f32[10]",): ((0, 1), 3),
        ("f32[6]",): ((0, 1), 3),
        ("f32[2]",): ((0, 1), 3),
    }


def test_a_conditional_in_a_loop_takes_a_branch_each_time():
    branches = permute(2, "{{0,1}}") + permute(10, "{{0,4}}")
    loop = (
        "%body (p: f32[2]) -> f32[2] {\n  %p = f32[2] parameter(0)\n"
        "  ROOT %c = f32[2] conditional(%p, %p, %p), true_computation=%of_2, false_computation=%of_10\n}\n"
    )
    body = '  %w = f32[2] while(%x), condition=%still, body=%body, backend_config={"known_trip_count":{"n":"3"}}'
    traffic = read_hlo(module(body, branches + loop), CUBE)
    assert traffic.extent(lambda collective: collective.bytes) == (3 * 8, 3 * 40)


def test_an_unknown_notation_is_an_error_and_not_silence():
    line = "  ROOT %r = f32[4,8] all-reduce(%x), channel_id=1, replica_groups=<new>, use_global_device_ids=true"
    with pytest.raises(ValueError, match="unknown form of replica_groups"):
        read_hlo(module(line), CUBE)


def test_a_program_of_other_devices_is_an_error():
    with pytest.raises(ValueError, match="not one of 8 partitions"):
        read_hlo(module("", partitions=4), CUBE)


# --- the reader, on real programs whose collectives are known


def cube_of(order: list[int]) -> Mesh:
    devices = np.array(jax.devices())[order].reshape(2, 2, 2)
    return Mesh(devices, tuple(CUBE), axis_types=(AxisType.Auto,) * 3)


def traffic_of(body: Callable[..., Any], mesh: Mesh) -> Traffic:
    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("a", "b", "c"), out_specs=P("a", "b", "c"), check_vma=False)
    hlo = jax.jit(mapped).lower(jax.ShapeDtypeStruct((8, 8, 8), jnp.float32)).compile().as_text()
    assert hlo is not None
    return read_hlo(hlo, CUBE)


def shift(x: jax.Array, axis: str) -> jax.Array:
    return lax.ppermute(x, axis, [(0, 1), (1, 0)])


BLOCK = 4 * 4**3  # bytes on a device
OPERATIONS = {
    "all-reduce": lax.psum,
    "all-gather": partial(lax.all_gather, tiled=True),
    "all-to-all": partial(lax.all_to_all, split_axis=0, concat_axis=1, tiled=True),
    "collective-permute": shift,
}


@pytest.mark.parametrize("axis", CUBE)
@pytest.mark.parametrize("kind", OPERATIONS)
def test_a_collective_over_one_axis_crosses_it_alone(kind, axis):
    collective = only(traffic_of(lambda x: OPERATIONS[kind](x, axis), cube_of(list(range(8)))))
    assert (collective.kind, collective.axes, collective.bytes) == (kind, (axis,), BLOCK)


@pytest.mark.parametrize("axes", [("a", "b"), ("a", "c"), ("b", "c"), ("a", "b", "c")])
def test_a_sum_over_several_axes_crosses_them(axes):
    assert only(traffic_of(lambda x: lax.psum(x, axes), cube_of(list(range(8))))).axes == axes


def test_axes_are_those_of_the_mesh_whatever_the_order_of_its_devices():
    assert only(traffic_of(lambda x: lax.psum(x, "b"), cube_of([5, 3, 0, 6, 1, 7, 2, 4]))).axes == ("b",)


def test_a_routed_message_in_a_loop_crosses_both_axes_once_a_turn():
    ring = [(i, (i + 1) % 4) for i in range(4)]  # (a, b): 0 1 2 3
    cross = [(0, 3), (3, 0), (1, 2), (2, 1)]

    def body(x):
        def turn(x, route):
            send = [partial(lax.ppermute, axis_name=("a", "b"), perm=perm) for perm in (ring, cross)]
            return jnp.sin(lax.switch(route, send, x)), None

        return lax.scan(turn, x, lax.axis_index("c") + jnp.arange(5))[0]

    traffic = traffic_of(body, cube_of(list(range(8))))
    collective = only(traffic)
    assert (collective.kind, collective.axes) == ("collective-permute", ("a", "b"))
    assert traffic.times(collective) == (5, 5) and traffic.num_branches(collective) == 2


# --- runs

MODEL = {"hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "num_kv_heads": 2, "vocab_size": 24}
INNER, OUTER = ("inner_step",), ("outer_step",)


def numel(num_layers: int) -> int:
    return 2 * 24 * 16 + 16 + num_layers * (2 * 16 + 4 * 16 * 16 + 3 * 16 * 32)


def report_of(
    method: str,
    num_replicas: int,
    num_devices: int = 8,
    only: tuple[str, ...] = INNER + OUTER,
    group_size: int = 2,
    num_layers: int = 1,
    batch_size: int = 4,
    **mesh: int,
) -> inspect.Report:
    config = from_dict(
        {
            "method": method,
            "num_replicas": num_replicas,
            "num_microbatches": 2 if "stage" in mesh else 1,
            "model": MODEL | {"num_layers": num_layers},
            "outer": {"group_size": group_size},
            "data": {"batch_size": batch_size, "sequence_length": 8},
            "mesh": {"replica": -1} | mesh,
        }
    )
    return inspect.inspect_run(config, jax.devices()[:num_devices], only)


def across(report: inspect.Report, program: str) -> dict[str, set[tuple[str, ...]]]:
    """Kind -> axes, of what crosses replicas."""
    kinds: dict[str, set[tuple[str, ...]]] = {}
    for collective in report.traffic[program].collectives():
        if "replica" in collective.axes:
            kinds.setdefault(collective.kind, set()).add(collective.axes)
    return kinds


def axes_of(report: inspect.Report, program: str) -> set[str]:
    return {axis for collective in report.traffic[program].collectives() for axis in collective.axes}


def sent(report: inspect.Report, program: str) -> tuple[int, int]:
    """The least and the most bytes that a device sends to other replicas."""
    return report.traffic[program].extent(lambda c: c.bytes * ("replica" in c.axes))


def test_noloco_sends_one_message_of_the_parameters_size_to_one_partner():
    report = report_of("noloco", 8, only=inspect.PROGRAMS)
    assert axes_of(report, "inner_step") == set()
    assert across(report, "outer_step") == {"collective-permute": {("replica",)}}
    assert axes_of(report, "outer_step") == {"replica"}
    assert report.parameter_bytes == 4 * numel(1) and report.num_pairings == 7
    assert sent(report, "outer_step") == (4 * numel(1), 4 * numel(1))
    outer = report.traffic["outer_step"]
    assert {outer.num_branches(collective) for collective in outer.collectives()} == {7}
    assert inspect.broken_promises(report) == []
    inner_line, outer_line, evaluation_line = inspect.verdict(report)
    assert inner_line == "inner step: nothing crosses replica"
    assert "a replica sends 13.2 KiB to its partner (its parameters are 13.2 KiB)" in outer_line
    assert evaluation_line.endswith("every replica waits for all others")


def test_fsdp_inside_replicas_crosses_no_replica_and_sends_shards():
    report = report_of("noloco", 4, fsdp=2)
    assert axes_of(report, "inner_step") == {"fsdp"}
    assert across(report, "outer_step") == {"collective-permute": {("replica",)}}
    assert axes_of(report, "outer_step") == {"replica"}
    assert sent(report, "outer_step")[1] == report.parameter_bytes < 0.6 * 4 * numel(1)


def test_fsdp_reduces_and_gathers_weights_and_not_activations():
    def weights(batch_size: int) -> tuple[int, int]:
        traffic = report_of("local", 2, num_devices=4, only=INNER, batch_size=batch_size, fsdp=2).traffic["inner_step"]
        counted = {"all-reduce", "all-gather", "reduce-scatter"}
        return traffic.extent(lambda c: c.bytes * (c.kind in counted and not c.operands[0].startswith("s32")))

    assert weights(4) == weights(8)


def test_fsdp_and_tensor_together_stay_inside_replicas():
    report = report_of("noloco", 2, fsdp=2, tensor=2)
    assert axes_of(report, "inner_step") == {"fsdp", "tensor"}
    assert across(report, "outer_step") == {"collective-permute": {("replica",)}}
    assert inspect.broken_promises(report) == []


def test_ddp_of_a_single_sharded_replica_is_fsdp():
    assert axes_of(report_of("ddp", 1, num_devices=4, fsdp=4), "inner_step") == {"fsdp"}


def test_replicas_that_share_a_device_meet_there_and_send_at_most_whole_blocks():
    report = report_of("noloco", 8, num_devices=4)
    assert axes_of(report, "inner_step") == set()
    assert across(report, "outer_step") == {"collective-permute": {("replica",)}}
    assert sent(report, "outer_step") == (0, 2 * 4 * numel(1))
    assert inspect.broken_promises(report) == []


def test_a_group_of_three_sends_two_messages():
    report = report_of("noloco", 3, num_devices=3, group_size=3, only=OUTER)
    assert sent(report, "outer_step") == (2 * 4 * numel(1), 2 * 4 * numel(1))


def test_stages_send_to_the_next_stage_of_other_replicas_and_nothing_else():
    report = report_of("noloco", 2, num_devices=4, num_layers=2, stage=2)
    assert across(report, "inner_step") == {"collective-permute": {("replica", "stage")}}
    assert across(report, "outer_step") == {"collective-permute": {("replica",)}}
    assert inspect.broken_promises(report) == []


def test_diloco_reduces_over_all_replicas_in_outer_steps():
    report = report_of("diloco", 4, num_devices=4, only=OUTER)
    assert across(report, "outer_step") == {"all-reduce": {("replica",)}}
    assert sent(report, "outer_step") == (4 * numel(1), 4 * numel(1))


def test_ddp_reduces_over_all_replicas_in_every_step():
    report = report_of("ddp", 4, num_devices=4)
    assert across(report, "inner_step") == {"all-reduce": {("replica",)}}
    assert sent(report, "inner_step") == (4 * numel(1), 4 * numel(1))
    assert "outer_step" not in report.traffic and inspect.broken_promises(report) == []


@pytest.mark.parametrize("method", ["noloco", "diloco"])
def test_replicas_on_one_device_send_nothing(method):
    assert axes_of(report_of(method, 4, num_devices=1, only=OUTER), "outer_step") == set()


@pytest.mark.parametrize(
    ("method", "program", "collective"),
    [
        ("local", "inner_step", Collective("all-reduce", ("replica",), 4, ("f32[]",))),
        ("noloco", "inner_step", Collective("all-gather", ("replica", "fsdp"), 4, ("f32[1]",))),
        ("noloco", "inner_step", Collective("collective-permute", ("replica",), 4, ("f32[1]",))),
        ("diloco", "inner_step", Collective("all-reduce", ("replica",), 4, ("f32[]",))),
        ("noloco", "outer_step", Collective("all-reduce", ("replica",), 4, ("f32[]",))),
        ("noloco", "outer_step", Collective("collective-permute", ("replica",), 101, ("u8[101]",))),
    ],
)
def test_a_broken_promise_is_named(method, program, collective):
    traffic = {name: Traffic() for name in inspect.PROGRAMS}
    traffic[program].always[collective] += 1
    config = from_dict({"method": method, "num_replicas": 4, "outer": {"group_size": 2}})
    report = inspect.Report(config, {"replica": 4, "stage": 1, "fsdp": 2, "tensor": 1}, 100, 3, traffic)
    assert len(inspect.broken_promises(report)) == 1
    assert any(line.startswith("BROKEN PROMISE: ") for line in inspect.verdict(report))


# --- the command line

CONFIG = f"""
def get_config():
    model = {MODEL!r}
    return dict(num_replicas=3, model=model | dict(num_layers=1), data=dict(batch_size=2, sequence_length=8),
                mesh=dict(replica=3))
"""


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "tiny.py"
    path.write_text(CONFIG)
    return path


def command(*arguments: str) -> subprocess.CompletedProcess:
    program = [sys.executable, "-m", "noloco_jax.inspect", *arguments]
    return subprocess.run(program, cwd=ROOT, capture_output=True, text=True)


def test_the_command_prints_json_for_the_devices_asked_for(config_file):
    result = command(f"--config={config_file}", "--devices=3", "--json", "--check")
    assert result.returncode == 0, result.stderr
    values = json.loads(result.stdout)
    assert values["mesh"] == {"replica": 3, "stage": 1, "fsdp": 1, "tensor": 1}
    assert set(values["programs"]) == set(inspect.PROGRAMS)
    sent = values["programs"]["outer_step"]["bytes_across_replicas"]
    assert sent == {"least": 4 * numel(1), "most": 4 * numel(1)} and values["broken_promises"] == []
    kinds = {collective["kind"] for collective in values["programs"]["outer_step"]["collectives"]}
    assert kinds == {"collective-permute"}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["--devices=2"], "3 devices"), (["--devices=0"], "--devices=0"), (["--device=2"], "--devices")],
)
def test_bad_input_ends_with_status_2_and_one_line(config_file, arguments, named, capsys, monkeypatch):
    updates = []
    monkeypatch.setattr(jax.config, "update", lambda *update: updates.append(update))
    monkeypatch.setattr(jax, "devices", lambda: [object()] * dict(updates)["jax_num_cpu_devices"])
    with pytest.raises(SystemExit) as exit_:
        inspect.main_with_errors(lambda: inspect.main([f"--config={config_file}", *arguments]))
    message = capsys.readouterr().err
    assert exit_.value.code == 2 and named in message and message.count("\n") == 1


def test_the_check_fails_where_a_promise_is_broken(config_file, capsys, monkeypatch):
    traffic = {name: Traffic() for name in inspect.PROGRAMS}
    traffic["inner_step"].always[Collective("all-reduce", ("replica",), 4, ("f32[]",))] += 1

    def report(config, devices):
        return inspect.Report(config, {"replica": 3, "stage": 1, "fsdp": 1, "tensor": 1}, 100, 3, traffic)

    monkeypatch.setattr(inspect, "inspect_run", report)
    monkeypatch.setattr(inspect, "use_cpu_cores", lambda config: None)
    assert inspect.main([f"--config={config_file}", "--check"]) == 1
    assert "BROKEN PROMISE: inner step: all-reduce of f32[] crosses replica" in capsys.readouterr().out
    assert inspect.main([f"--config={config_file}"]) == 0
