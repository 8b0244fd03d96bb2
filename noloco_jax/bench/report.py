"""Table of the measured figures, and notes on them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from noloco_jax.bench.options import Result
from noloco_jax.bench.variants import Variant
from noloco_jax.formatting import (
    format_bytes,
    format_count,
    format_memory,
    format_percent,
    format_seconds,
    format_si,
    format_tokens_per_second,
)

Column = tuple[str, Callable[[Result], str]]
_MEASURED_PEAK = "peak_memory_bytes_before_outer_steps"  # given by devices that count their memory
_DATA_MARGIN = 3  # the data pipeline alone should be this many times as fast as the trainer


def _or_dash(show: Callable[[Any], str], *names: str) -> Callable[[Result], str]:
    """The figure by that path of names in a result, or a dash where it does not apply."""

    def cell(result: Result) -> str:
        value: Any = result
        for name in names:
            value = value.get(name) if value is not None else None
        return "-" if value is None else show(value)

    return cell


def _quartiles(times: Mapping[str, float]) -> str:
    return f"{format_seconds(times['lower_quartile'])} - {format_seconds(times['upper_quartile'])}"


_SPEED_COLUMNS: list[Column] = [
    ("step", _or_dash(format_seconds, "step_seconds", "median")),
    ("quartiles", _or_dash(_quartiles, "step_seconds")),
    ("tokens/s", _or_dash(format_count, "tokens_per_second")),
    ("FLOP/s", _or_dash(format_si, "model_flops_per_second")),
    ("MFU", _or_dash(format_percent, "mfu")),
    ("data\ntokens/s", _or_dash(format_count, "data_tokens_per_second")),
]
_OUTER_COLUMNS: list[Column] = [
    ("outer\nstep", _or_dash(format_seconds, "outer_step_seconds", "median")),
    ("share\nof run", _or_dash(format_percent, "outer_share")),
    ("sent", _or_dash(format_bytes, "bytes_sent")),
    ("sent in\ninner", _or_dash(format_bytes, "bytes_sent_inner_step")),
]
_MEMORY_COLUMN: Column = ("memory", _or_dash(format_memory, "peak_memory_bytes"))
_ACCOUNT_COLUMN: Column = ("by XLA's\naccount", _or_dash(format_memory, "compiled_peak_memory_bytes"))
_COMPILED_COLUMNS: list[Column] = [
    ("compile\ninner", _or_dash(format_seconds, "compile_seconds", "inner_step")),
    ("compile\nouter", _or_dash(format_seconds, "compile_seconds", "outer_step")),
]
_PAIRINGS_COLUMN: Column = ("pairings", _or_dash(str, "pairings"))

VariantResult = tuple[Variant, Result]


def show(rows: Sequence[VariantResult], title: str, *, compile_only: bool, console: Console) -> None:
    """Print the table and the notes below it.

    Args:
      rows: the variants with their results; a result of an `error` alone is one that failed.
      title: what was measured.
      compile_only: as the results were made.
      console: where to print; aligned plain lines where that is no terminal.
    """
    measured = [(variant, result) for variant, result in rows if "error" not in result]
    if measured:
        table = _table(measured, title, compile_only, plain=not console.is_terminal)
        if not console.is_terminal:
            console.width = max(
                console.width, Measurement.get(console, console.options.update(width=10_000), table).maximum
            )
        console.print(table)
        for line in _notes(measured, compile_only):
            console.print(line)
    for variant, result in rows:
        if "error" in result:
            console.print(f"failed: {variant.label}: {result['error']}", style="bold red")


def _table(rows: Sequence[VariantResult], title: str, compile_only: bool, plain: bool) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None if plain else box.SIMPLE)
    fields = list(rows[0][0].varied)
    leaves = [field.rpartition(".")[2] for field in fields]
    for field, leaf in zip(fields, leaves, strict=True):
        table.add_column(leaf if leaves.count(leaf) == 1 else field)
    memory = [_MEMORY_COLUMN, *([_ACCOUNT_COLUMN] if any(_MEASURED_PEAK in result for _, result in rows) else [])]
    own = [_PAIRINGS_COLUMN] if compile_only else [*_SPEED_COLUMNS, *_OUTER_COLUMNS]
    columns = [*own, *memory, *_COMPILED_COLUMNS]
    for heading, _ in columns:
        table.add_column(heading, justify="right")
    for variant, result in rows:
        table.add_row(*variant.varied.values(), *(cell(result) for _, cell in columns))
    return table


def _notes(rows: Sequence[VariantResult], compile_only: bool) -> list[str]:
    lines = [] if compile_only else [_rate_note(rows), *_data_notes(rows)]
    lines.append(f"memory: the most on one device, by {rows[0][1]['peak_memory_from']}")
    lines += sorted({f"{variant.label}: {variant.note}" for variant, _ in rows if variant.note})
    for _, result in rows:
        if share := result.get("newton_schulz_share"):
            lines.append(f"muon: its iterations add {format_percent(share)} of operations, not counted in FLOP/s")
            break
    for profile in dict.fromkeys(result.get("profile") for _, result in rows):
        if profile is not None:
            lines.append(f"profile: `xprof --logdir={profile}` (pip install xprof), or its .json.gz in ui.perfetto.dev")
    return lines


def _rate_note(rows: Sequence[VariantResult]) -> str:
    rates = [result["matrix_flops_per_second"] for _, result in rows]
    side = rows[0][1]["matrix_side"]
    least, most = (format_si(rate, "FLOP/s") for rate in (min(rates), max(rates)))
    reached = least if least == most else f"{least} to {most}"
    return f"MFU: of {reached}, which products of {side} x {side} matrices reached"


def _data_notes(rows: Sequence[VariantResult]) -> list[str]:
    lines = []
    for variant, result in rows:
        data, trainer = result["data_tokens_per_second"], result["tokens_per_second"]
        if data is not None and data < _DATA_MARGIN * trainer:
            lines.append(
                f"warning: {variant.label}: the data pipeline alone makes {format_tokens_per_second(data)}, less than "
                f"{_DATA_MARGIN} times the trainer's {format_count(trainer)}: raise data.num_workers="
                f"{variant.config.data.num_workers}"
            )
    missing = sorted({result["data_missing"] for _, result in rows if result["data_missing"]})
    return [*lines, *(f"data not measured: {reason}" for reason in missing)]
