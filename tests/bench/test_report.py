"""The table of measurements, and the notes below it."""

import io
import re

from rich.console import Console

from noloco_jax.bench.report import Row, show
from support.benchmarks import small


def shown(*rows: Row) -> str:
    file = io.StringIO()
    show(rows, "a.py", Console(file=file, highlight=False, soft_wrap=True))
    return file.getvalue()


def row(result: dict, **changes) -> Row:
    return Row("num_replicas=4", small(), result | changes)


def cells(text: str) -> dict[str, str]:
    """Map the table's headings to the cells of its first row."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    return dict(zip(lines[0], lines[2], strict=True))


def test_the_table_has_a_column_for_each_figure_that_there_is(result, ddp_result):
    found = cells(shown(row(result, mfu=0.25, bytes_sent=3e6, peak_memory_bytes=3 << 30)))
    assert (found["MFU"], found["sent"], found["memory"]) == ("25 %", "3 MB", "3 GiB")
    assert "outer step" in found and "outer step" not in cells(shown(row(ddp_result)))
    assert cells(shown(row(ddp_result), row(result)))["outer step"] == "-"


def test_a_slow_data_pipeline_warns(result):
    speed = result["tokens_per_second"]
    assert "warning" in shown(row(result, data_tokens_per_second=2.9 * speed))
    assert "warning" not in shown(row(result, data_tokens_per_second=3.1 * speed))


def test_a_failed_variant_is_shown_beside_the_measured_ones(result):
    failed = Row("num_replicas=64", small(), {"error": "out of memory", "status": 1})
    text = shown(row(result), failed)
    assert "failed: num_replicas=64: out of memory" in text
    assert re.search(r"^\| num_replicas=4 ", text, re.MULTILINE)


def test_notes_name_the_sources_of_figures_and_the_command_that_shows_a_trace(result):
    text = shown(row(result, peak_from="a data sheet", profile="there"))
    assert "MFU: relative to a data sheet" in text and "by the compiled programs" in text
    assert "xprof --logdir=there" in text
