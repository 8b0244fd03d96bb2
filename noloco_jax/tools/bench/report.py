"""Table of the measured figures, and notes on them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console

from noloco_jax.config import TrainConfig
from noloco_jax.formatting import (
    format_bytes,
    format_count,
    format_memory,
    format_percent,
    format_seconds,
    format_si,
    format_tokens_per_second,
    markdown_table,
)

Result = dict[str, Any]  # of a variant: `measure`'s figures, or `error` and `status`
FAILED, REFUSED = 1, 2  # exit statuses of a variant that has no figures
_DATA_MARGIN = 3  # the data pipeline alone should be this many times as fast as the trainer


class Row(NamedTuple):
    """A variant and its result."""

    label: str
    config: TrainConfig
    result: Result


def _quartiles(times: Mapping[str, float]) -> str:
    return f"{format_seconds(times['lower_quartile'])} - {format_seconds(times['upper_quartile'])}"


# Heading, the path to a figure in a result, and its format.
_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("step", "step_seconds median", format_seconds),
    ("quartiles", "step_seconds", _quartiles),
    ("tokens/s", "tokens_per_second", format_count),
    ("FLOP/s", "model_flops_per_second", format_si),
    ("MFU", "mfu", format_percent),
    ("data tokens/s", "data_tokens_per_second", format_count),
    ("outer step", "outer_step_seconds median", format_seconds),
    ("share of run", "outer_share", format_percent),
    ("sent", "bytes_sent", format_bytes),
    ("sent in inner", "bytes_sent_inner_step", format_bytes),
    ("memory", "peak_memory_bytes", format_memory),
    ("compile inner", "compile_seconds inner_step", format_seconds),
    ("compile outer", "compile_seconds outer_step", format_seconds),
    ("pairings", "pairings", str),
)


def show(rows: Sequence[Row], file: str, console: Console) -> None:
    """Print a table of the measured variants and notes on it, then the variants that failed.

    Args:
      rows: the variants with their results.
      file: the config file, for the title.
      console: where to print.
    """
    measured = [row for row in rows if "error" not in row.result]
    if measured:
        first = measured[0].result
        console.print(f"{file}: jax {first['jax']}, {first['device']}", style="bold")
        console.print(_table(measured))
        for line in _notes(measured):
            console.print(line)
    for row in rows:
        if "error" in row.result:
            console.print(f"failed: {row.label}: {row.result['error']}", style="bold red")


def _table(rows: Sequence[Row]) -> str:
    """Return the table, without columns that have no figure, and with dashes for figures that do not apply."""
    columns = [(heading, [_cell(row.result, path, write) for row in rows]) for heading, path, write in _COLUMNS]
    columns = [("variant", [row.label for row in rows]), *(column for column in columns if any(column[1]))]
    cells = zip(*(column for _, column in columns), strict=True)
    return markdown_table([heading for heading, _ in columns], [[cell or "-" for cell in row] for row in cells])


def _cell(result: Result, path: str, write: Callable[[Any], str]) -> str:
    value: Any = result
    for name in path.split():
        value = value.get(name) if value is not None else None
    return "" if value is None else write(value)


def _notes(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        data = row.result.get("data_tokens_per_second")
        if data is not None and data < _DATA_MARGIN * (trainer := row.result["tokens_per_second"]):
            yield (
                f"warning: {row.label}: the data pipeline alone makes {format_tokens_per_second(data)}, less than "
                f"{_DATA_MARGIN} times the trainer's {format_count(trainer)}: raise data.num_workers="
                f"{row.config.data.num_workers}"
            )
    for name, note in (
        ("data_missing", "data not measured: {}"),
        ("peak_from", "MFU: relative to {}"),
        ("peak_memory_from", "memory: the most on one device, by {}"),
        ("profile", "profile: `xprof --logdir={}` (pip install xprof), or its .json.gz in ui.perfetto.dev"),
    ):
        for value in dict.fromkeys(row.result.get(name) for row in rows):
            if value:
                yield note.format(value)
