"""The HLO reader on text whose groups, bytes and counts are worked out by hand."""

import pytest

from noloco_jax.spmd.hlo import Collective, read_hlo
from support.traffic import CUBE, only


def module(body: str, computations: str = "", partitions: int = 8) -> str:
    return (
        f"HloModule test, is_scheduled=true, num_partitions={partitions}\n{computations}\n\n"
        f"ENTRY %main.1_spmd (x: f32[4,8]) -> f32[4,8] {{\n  %x = f32[4,8]{{1,0}} parameter(0)\n{body}\n}}\n"
    )


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


def test_groups_without_global_ids_span_all_partitions():
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


def test_a_loop_of_unknown_length_makes_the_traffic_inexact():
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


def test_an_unknown_group_notation_is_an_error():
    line = "  ROOT %r = f32[4,8] all-reduce(%x), channel_id=1, replica_groups=<new>, use_global_device_ids=true"
    with pytest.raises(ValueError, match="unknown form of replica_groups"):
        read_hlo(module(line), CUBE)


def test_a_program_with_a_different_number_of_partitions_is_an_error():
    with pytest.raises(ValueError, match="not one of 8 partitions"):
        read_hlo(module("", partitions=4), CUBE)
