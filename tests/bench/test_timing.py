"""Timing of steps, the random batches that they take, and the table of measurements."""

import dataclasses
import io
import re
import time

import jax
import numpy as np
from rich.console import Console

from noloco_jax.tools.bench import measure
from noloco_jax.tools.bench.command import BenchRow, show
from support.benchmarks import small


def test_outer_steps_are_timed_only_for_rounds_that_have_run_before():
    taken: list[int] = []

    class Run:
        def inner(self):
            return None

        def outer(self, round):
            taken.append(round)
            return len(taken)

    timed = [int(number) - 1 for number in measure.outer_times(Run())]  # pyright: ignore[reportArgumentType]
    assert len({taken[place] for place in timed}) == len(timed) == 5
    assert all(taken[place] in taken[:place] for place in timed)


def test_a_step_is_timed_from_end_to_end_with_one_dispatched_ahead(monkeypatch):
    dispatched, events = iter(range(100)), []

    class Run:
        def inner(self):
            events.append(("dispatch", number := next(dispatched)))
            return number

    monkeypatch.setattr(jax, "block_until_ready", lambda number: events.append(("wait", number)) or time.sleep(0.02))
    seconds = measure.inner_times(Run(), steps=4)  # pyright: ignore[reportArgumentType]
    assert len(seconds) == 4
    assert min(seconds) >= 0.02
    assert events[:5] == [("dispatch", 0), ("dispatch", 1), ("wait", 0), ("dispatch", 2), ("wait", 1)]


def test_quartiles_are_the_values_beside_the_median():
    assert measure.quartiles([5.0, 1.0, 2.0, 4.0, 3.0]) == {"median": 3.0, "lower_quartile": 2.0, "upper_quartile": 4.0}


def test_random_batches_stay_within_the_vocabulary_and_differ_between_replicas():
    first, other = next(measure.RandomStreams(small(), [0, 1])).values()
    assert all(x.shape == (2, 8) and x.dtype == np.int32 and 0 <= x.min() <= x.max() < 259 for x in first.values())
    assert (first["input_ids"] != other["input_ids"]).any()


def test_random_batches_have_several_documents_per_sequence_with_document_mask():
    config = small()
    data = dataclasses.replace(config.data, document_mask=True, sequence_length=512)
    segments_BT = next(measure.RandomStreams(dataclasses.replace(config, data=data), [0]))[0]["segment_ids"]
    assert segments_BT.dtype == np.int32 and segments_BT.shape == (data.batch_size, 512)
    assert set(np.unique(np.diff(segments_BT))) == {0, 1} and segments_BT.min() >= 1
    assert 1 <= segments_BT.max() <= 20


def shown(*rows: BenchRow) -> str:
    file = io.StringIO()
    show(rows, "a.py", Console(file=file, highlight=False, soft_wrap=True))
    return file.getvalue()


def row(result: dict, **changes) -> BenchRow:
    return BenchRow("num_replicas=4", small(), result | changes)


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
    failed = BenchRow("num_replicas=64", small(), {"error": "out of memory", "status": 1})
    text = shown(row(result), failed)
    assert "failed: num_replicas=64: out of memory" in text
    assert re.search(r"^\| num_replicas=4 ", text, re.MULTILINE)


def test_notes_name_the_sources_of_figures_and_the_command_that_shows_a_trace(result):
    text = shown(row(result, peak_from="a data sheet", profile="there"))
    assert "MFU: relative to a data sheet" in text and "by the compiled programs" in text
    assert "xprof --logdir=there" in text
