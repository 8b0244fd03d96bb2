"""The table of what was measured, and the notes below it."""

import io
import re

from rich.console import Console

from noloco_jax.bench import report
from noloco_jax.bench.variants import Variant
from support.benchmarks import small


def shown(rows, width: int | None = None) -> str:
    """What is printed on a terminal of that width, or to a file."""
    file = io.StringIO()
    console = Console(
        file=file, width=width, force_terminal=width is not None, color_system=None, highlight=False, soft_wrap=True
    )
    report.show(rows, "a run", compile_only=False, console=console)
    return re.sub(r"\x1b\[[\d;]*m", "", file.getvalue())


def rows_of(result: dict, **changes) -> list[report.VariantResult]:
    variant = Variant({"num_replicas": "4"}, (), small(), "")
    return [(variant, result | changes)]


def test_the_table_is_one_line_a_variant_where_there_is_no_terminal(result):
    text = shown(rows_of(result, mfu=0.25, bytes_sent=3e6))
    [line] = [line for line in text.splitlines() if re.match(r"\s*4\s", line)]
    assert "25 %" in line and "3 MB" in line
    assert "embedding out" in text and "causal attention counted once" in text and "2048 x 2048" in text


def test_what_muon_adds_to_the_models_operations_is_said_where_there_is_some(result):
    assert "on top" not in shown(rows_of(result))
    assert "Newton-Schulz iterations take 12.5 % of the model's" in shown(rows_of(result, newton_schulz_share=0.125))


def test_a_narrow_terminal_gets_two_tables_with_nothing_cut(result):
    steady = {"median": 0.0123, "lower_quartile": 0.0118, "upper_quartile": 0.0131}  # whatever this machine does
    text = shown(rows_of(result, step_seconds=steady), width=90)
    assert text.count("num_replicas") == 2
    assert "…" not in text


def test_a_slow_data_pipeline_is_warned_of(result):
    speed = result["tokens_per_second"]
    assert "warning" in shown(rows_of(result, data_tokens_per_second=2.9 * speed))
    assert "warning" not in shown(rows_of(result, data_tokens_per_second=3.1 * speed))


def test_a_failed_variant_is_shown_beside_the_measured_ones(result):
    failed = (Variant({"num_replicas": "64"}, (), small(), ""), {"error": "out of memory", "status": 1})
    text = shown([*rows_of(result), failed])
    assert "failed: num_replicas=64: out of memory" in text
    assert re.search(r"^\s*4\s", text, re.MULTILINE)
