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
    assert "2048 x 2048" in text


def test_muons_share_of_the_operations_is_noted_when_it_is_not_zero(result):
    assert "muon" not in shown(rows_of(result))
    assert "muon: its iterations add 12.5 % of operations" in shown(rows_of(result, newton_schulz_share=0.125))


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


def test_a_trace_names_the_command_that_shows_it(result):
    assert "xprof --logdir=there" in shown(rows_of(result, profile="there"))
