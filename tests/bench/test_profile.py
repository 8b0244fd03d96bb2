"""Times of a profile: hand-made traces of a GPU and of the CPU, and a real one."""

import pytest
from jax.profiler import ProfileData

from noloco_jax.bench.profile import parts_of

# Operations of an inner step: a parameter's copy, a product, a fusion of a named one; `loop` nests others.
PROGRAM = """HloModule jit__inner_step, is_scheduled=true

%fused (x: f32[2]) -> f32[2] {
  %x = f32[2]{0} parameter(0)
  ROOT %add.1 = f32[2]{0} add(%x, %x), metadata={op_name="jit(_inner_step)/transpose(jvp(mlp))/add"}
}

ENTRY %main (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0), metadata={op_name="params[\\'head\\']"}
  %copy.3 = f32[2]{0} copy(%p), metadata={op_name="params[\\'head\\']"}
  %dot.1 = f32[2]{0} dot(%p, %p), metadata={op_name="jit(_inner_step)/jvp(attention)/dot_general"}
  %loop = f32[2]{0} while(%dot.1)
  ROOT %fusion.2 = f32[2]{0} fusion(%loop), kind=kLoop, calls=%fused
}
"""


def line(name: str, *events: tuple[str, float, float]) -> str:
    """Return a trace line of (operation, start, end) in microseconds; copies belong to no program."""
    entries = []
    for operation, start, end in events:
        program = "" if operation == "a copy" else 'stats { metadata_id: 2 str_value: "jit__inner_step(7)" }'
        hlo = "" if operation == "a copy" else f'stats {{ metadata_id: 1 str_value: "{operation}" }}'
        time = f"offset_ps: {int(1e6 * start)} duration_ps: {int(1e6 * (end - start))}"
        entries.append(f"events {{ metadata_id: {1 if program else 2} {time} {hlo} {program} }}")
    return f'lines {{ name: "{name}" {" ".join(entries)} }}'


def saved(path, plane: str, *lines: str):
    metadata = " ".join(
        f'{kind}_metadata {{ key: {key} value {{ id: {key} name: "{name}" }} }}'
        for kind, key, name in (
            *(("event", 1, "a kernel"), ("event", 2, "MemcpyD2H copy")),
            *(("stat", 1, "hlo_op"), ("stat", 2, "hlo_module")),
        )
    )
    text = f'planes {{ name: "{plane}" {" ".join(lines)} {metadata} }} planes {{ name: "/host:metadata" }}'
    path.write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    return path


def seconds(parts) -> dict[str, float]:
    return {part.name: part.seconds for part in parts}


def test_operations_count_for_the_scope_of_their_name_or_of_their_fusion(tmp_path):
    trace = saved(tmp_path / "x.pb", "/host:CPU", line("a thread", ("dot.1", 0, 30), ("fusion.2", 30, 40)))
    parts, _ = parts_of(trace, {"inner_step": PROGRAM}, {"inner_step": 2}, num_devices=1)
    assert [part.name for part in parts] == ["attention forward", "mlp backward"]
    assert [part.share for part in parts] == pytest.approx([0.75, 0.25])
    assert [part.seconds for part in parts] == pytest.approx([15e-6, 5e-6])
    assert parts[0].largest == [("dot.1", pytest.approx(0.75))]


def test_a_parameters_name_is_no_scope(tmp_path):
    trace = saved(tmp_path / "x.pb", "/host:CPU", line("a thread", ("copy.3", 0, 30)))
    [part], _ = parts_of(trace, {"inner_step": PROGRAM}, {"inner_step": 1}, num_devices=1)
    assert part.name == "rest of the inner step"


def test_an_operation_counts_without_its_nested_operations(tmp_path):
    events = ("loop", 0, 100), ("dot.1", 10, 40), ("fusion.2", 40, 60), ("dot.1", 70, 80)
    trace = saved(tmp_path / "x.pb", "/host:CPU", line("a thread", *events))
    parts, _ = parts_of(trace, {"inner_step": PROGRAM}, {"inner_step": 1}, num_devices=1)
    expected = {"attention forward": 40e-6, "rest of the inner step": 40e-6, "mlp backward": 20e-6}
    assert seconds(parts) == pytest.approx(expected)


def test_overlapping_time_of_kernels_counts_for_the_later_one(tmp_path):
    trace = saved(
        tmp_path / "x.pb", "/device:GPU:0", line("Stream #13(compute)", ("dot.1", 0, 30), ("fusion.2", 28, 130))
    )
    parts, _ = parts_of(trace, {"inner_step": PROGRAM}, {"inner_step": 1}, num_devices=1)
    assert seconds(parts) == pytest.approx({"mlp backward": 102e-6, "attention forward": 28e-6})


def test_the_time_of_copies_is_per_inner_step(tmp_path):
    copies = [("a copy", 100 * step, 100 * step + 10) for step in range(3)]
    trace = saved(tmp_path / "x.pb", "/device:GPU:0", line("Stream #14(copies)", *copies))
    [part], _ = parts_of(trace, {"inner_step": PROGRAM}, {"inner_step": 3, "outer_step": 1}, num_devices=1)
    assert (part.name, part.seconds) == ("unnamed", pytest.approx(10e-6))


def test_gpu_time_is_that_of_streams_only_and_copies_keep_their_names(tmp_path):
    trace = saved(
        tmp_path / "x.pb",
        "/device:GPU:0",
        line("Stream #13(compute)", ("dot.1", 0, 30)),
        line("Stream #14(copies)", ("a copy", 20, 50)),
        line("XLA Ops", ("dot.1", 0, 30)),
    )
    parts, _ = parts_of(trace, {"inner_step": PROGRAM}, {"inner_step": 1}, num_devices=1)
    assert seconds(parts) == pytest.approx({"attention forward": 30e-6, "unnamed": 30e-6})
    assert {name for part in parts for name, _ in part.largest} == {"dot.1", "MemcpyD2H copy"}


def test_the_idle_share_is_the_time_without_an_operation_on_any_line(tmp_path):
    one = line("one", ("dot.1", 0, 30), ("dot.1", 60, 70))
    other = line("other", ("fusion.2", 20, 40), ("fusion.2", 90, 100))
    _, idle = parts_of(saved(tmp_path / "x.pb", "/host:CPU", one, other), {"inner_step": PROGRAM}, {}, num_devices=1)
    assert idle == pytest.approx(0.4)


def test_a_profile_without_operations_has_no_parts(tmp_path):
    assert parts_of(saved(tmp_path / "x.pb", "/host:CPU"), {"inner_step": PROGRAM}, {}, num_devices=1) == ([], 1.0)


def test_a_real_profile_finds_every_part_of_the_inner_step(ddp_result):
    parts = {part["name"]: part for part in ddp_result["profile_parts"]}
    passes = {f"{part} {way}" for part in ("embed", "attention", "mlp") for way in ("forward", "backward")}
    assert parts.keys() >= {*passes, "head and loss", "optimizer"}
    assert sum(part["share"] for part in parts.values()) == pytest.approx(1)
    assert 0 <= ddp_result["profile_idle"] < 1
