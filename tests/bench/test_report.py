"""The table of measurements, and the notes below it."""

import io
import re

from rich.console import Console

from noloco_jax.bench import report
from noloco_jax.bench.variants import Variant
from support.benchmarks import small


def shown(rows, width: int | None = None) -> str:
    """Return the text printed on a terminal of that width, or to a file."""
    file = io.StringIO()
    console = Console(
        file=file, width=width, force_terminal=width is not None, color_system=None, highlight=False, soft_wrap=True
    )
    report.show(rows, "a run", compile_only=False, console=console)
    return re.sub(r"\x1b\[[\d;]*m", "", file.getvalue())


def rows_of(result: dict, **changes) -> list[report.VariantResult]:
    variant = Variant({"num_replicas": "4"}, (), small(), "")
    return [(variant, result | changes)]


def test_the_table_has_one_line_per_variant_without_a_terminal(result):
    text = shown(rows_of(result, mfu=0.25, bytes_sent=3e6))
    [line] = [line for line in text.splitlines() if re.match(r"\s*4\s", line)]
    assert "25 %" in line and "3 MB" in line
    assert "embedding out" in text and "causal attention counted once" in text and "2048 x 2048" in text


def test_muons_share_of_the_operations_is_noted_when_it_is_not_zero(result):
    assert "on top" not in shown(rows_of(result))
    assert "Newton-Schulz iterations take 12.5 % of the model's" in shown(rows_of(result, newton_schulz_share=0.125))


def test_a_narrow_terminal_gets_two_tables_with_nothing_cut(result):
    steady = {"median": 0.0123, "lower_quartile": 0.0118, "upper_quartile": 0.0131}  # on any machine
    text = shown(rows_of(result, step_seconds=steady), width=90)
    assert len(re.findall(r"^ *num_replicas ", text, re.MULTILINE)) == 2  # in headings; warnings name variants too
    assert "…" not in text


def test_a_slow_data_pipeline_warns(result):
    speed = result["tokens_per_second"]
    assert "warning" in shown(rows_of(result, data_tokens_per_second=2.9 * speed))
    assert "warning" not in shown(rows_of(result, data_tokens_per_second=3.1 * speed))


def test_a_failed_variant_is_shown_beside_the_measured_ones(result):
    failed = (Variant({"num_replicas": "64"}, (), small(), ""), {"error": "out of memory", "status": 1})
    text = shown([*rows_of(result), failed])
    assert "failed: num_replicas=64: out of memory" in text
    assert re.search(r"^\s*4\s", text, re.MULTILINE)


def test_measured_peak_memory_stands_beside_xlas_estimate(result):
    measured = {"peak_memory_bytes": 3 << 30, "peak_memory_bytes_before_outer_steps": 3 << 30}
    text = shown(rows_of(result, compiled_peak_memory_bytes=2 << 30, peak_memory_from="the allocators", **measured))
    [line] = [line for line in text.splitlines() if re.match(r"\s*4\s", line)]
    assert re.search(r"3 GiB\s+2 GiB", line)
    assert "account" in text and "account" not in shown(rows_of(result)).splitlines()[1]


def test_a_profile_is_a_table_of_parts_with_their_largest_operations(result):
    parts = [{"name": "mlp forward", "share": 0.6, "seconds": 0.02, "largest": [["dot.7", 0.5]]}]
    profile = {"profile": "here/plugins/profile/now/trace.json.gz", "profile_parts": parts, "profile_idle": 0.03}
    text = shown(rows_of(result, **profile))
    assert re.search(r"mlp forward +60 % +20 ms +dot.7 50 %", text)
    assert "ran none 3 % of the time" in text and "--logdir=here`" in text
    assert "copies" not in text and "CUDA graphs" not in text
    unnamed = {"name": "unnamed", "share": 0.4, "seconds": 0.01, "largest": []}
    text = shown(rows_of(result, device="NVIDIA H200", **profile | {"profile_parts": [*parts, unnamed]}))
    assert "unnamed: copies" in text and "traced without CUDA graphs" in text


def test_an_empty_profile_names_a_possible_reason(result):
    text = shown(rows_of(result, profile="here/plugins/profile/now/trace.json.gz", profile_parts=[], profile_idle=1.0))
    assert "saw no operation" in text and "CUPTI" in text and "ran none" not in text


def test_the_interval_of_outer_steps_is_noted_with_and_without_fragments(result):
    assert "of the outer steps, one every 4 inner steps" in shown(rows_of(result))
    outer = {"sync_every": 5, "fragments": 8, "delay": 2}
    variant = Variant({"num_replicas": "4"}, (), small(outer=outer), "")
    text = shown([(variant, result)])
    assert "8 every 5 inner steps, without what outer.delay adds to them" in text
