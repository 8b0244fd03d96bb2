"""Table of the measured figures, and notes on them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from noloco_jax.bench.options import UNNAMED, Result
from noloco_jax.bench.variants import Variant
from noloco_jax.config import TrainConfig
from noloco_jax.formatting import (
    format_bytes,
    format_count,
    format_memory,
    format_percent,
    format_seconds,
    format_si,
    format_tokens_per_second,
)
from noloco_jax.methods import METHODS

Column = tuple[str, Callable[[Result], str]]
_MEASURED_PEAK = "peak_memory_bytes_before_outer_steps"  # given by devices that count their memory
_MUCH_UNNAMED = 0.1
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
    """Print the table, in two parts where the terminal is too narrow, and the notes below it.

    Args:
      rows: the variants with their results; a result of an `error` alone is one that failed.
      title: what was measured.
      compile_only: as the results were made.
      console: where to print; aligned plain lines where that is no terminal.
    """
    measured = [(variant, result) for variant, result in rows if "error" not in result]
    if measured:
        is_measured = any(_MEASURED_PEAK in result for _, result in measured)
        memory = [_MEMORY_COLUMN, *([_ACCOUNT_COLUMN] if is_measured else [])]
        parts = (
            [[_PAIRINGS_COLUMN, *memory, *_COMPILED_COLUMNS]]
            if compile_only
            else [_SPEED_COLUMNS, [*_OUTER_COLUMNS, *memory, *_COMPILED_COLUMNS]]
        )
        whole = _table(measured, title, [column for part in parts for column in part], console)
        needed = Measurement.get(console, console.options.update(width=10_000), whole).maximum
        if not console.is_terminal:
            console.width = max(console.width, needed)
        if needed <= console.width:
            console.print(whole)
        else:
            for part in parts:
                console.print(_table(measured, title, part, console))
        for line in _notes(measured, compile_only):
            console.print(line)
        for variant, result in measured:
            if result.get("profile"):
                _show_profile(variant, result, console)
    for variant, result in rows:
        if "error" in result:
            console.print(f"failed: {variant.label}: {result['error']}", style="bold red")


def _table(rows: Sequence[VariantResult], title: str, columns: Sequence[Column], console: Console) -> Table:
    table = _empty_table(title, console)
    fields = list(rows[0][0].varied)
    leaves = [field.rpartition(".")[2] for field in fields]
    for field, leaf in zip(fields, leaves, strict=True):
        table.add_column(leaf if leaves.count(leaf) == 1 else field, no_wrap=True)
    for heading, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for variant, result in rows:
        table.add_row(*variant.varied.values(), *(cell(result) for _, cell in columns))
    return table


def _empty_table(title: str, console: Console) -> Table:
    style = box.SIMPLE if console.is_terminal else None
    return Table(title=title, title_justify="left", title_style="bold", box=style)


def _notes(rows: Sequence[VariantResult], compile_only: bool) -> list[str]:
    first = rows[0][1]
    lines = [] if compile_only else [_step_note(rows), _flops_note(rows), *_data_notes(rows)]
    if any(result["bytes_sent"] for _, result in rows) and not compile_only:
        methods = dict.fromkeys(variant.config.method for variant, _ in rows)
        often = [method for method in methods if METHODS[method].averages_gradients]
        exception = f", with {' and '.join(often)} in every step" if often else ""
        lines.append(
            f"sent: bytes that a replica sends to others in an outer step{exception}, in the mean over replicas; in "
            "inner: in an inner step, for routed micro-batches too"
        )
    account = "arguments + temporaries + outputs - aliased, and the state that lies beside"
    by = "; XLA's account" if _MEASURED_PEAK in first else ""
    lines.append(f"memory: the most on one device, by {first['peak_memory_from']}{by}: {account}")
    notes = {f"{variant.label}: {variant.note}" for variant, _ in rows if variant.note}
    return [*lines, *sorted(notes)]


def _step_note(rows: Sequence[VariantResult]) -> str:
    configs = [variant.config for variant, result in rows if result["outer_step_seconds"]]
    text = "step: median of the inner steps, one dispatched ahead, random tokens; tokens/s: of these steps"
    if configs:
        text += (
            f"; share of run: of the outer steps, {' or '.join(dict.fromkeys(map(_how_often, configs)))} inner steps"
        )
        if any(config.outer.delay for config in configs):
            text += ", without what outer.delay adds to them"
    return text


def _how_often(config: TrainConfig) -> str:
    number = config.outer.fragments if config.outer.fragments > 1 else "one"
    return f"{number} every {config.outer.sync_every}"


def _flops_note(rows: Sequence[VariantResult]) -> str:
    rates = [result["matrix_flops_per_second"] for _, result in rows]
    side, dtypes = rows[0][1]["matrix_side"], sorted({variant.config.model.dtype for variant, _ in rows})
    least, most = (format_si(rate, "FLOP/s") for rate in (min(rates), max(rates)))
    return (
        "FLOP/s: of the model, 3 x the forward pass's: 2 a weight of every matrix product (the head is in, the "
        "embedding out) and causal attention counted once, 2 x T x heads x head size a token and layer, less in a "
        "window\n"
        f"{_newton_schulz_note(rows)}"
        f"MFU: FLOP/s over the {least if least == most else f'{least} to {most}'} that products of "
        f"{side} x {side} {' or '.join(dtypes)} matrices reached in the same run, on all devices of the mesh at once"
    )


def _newton_schulz_note(rows: Sequence[VariantResult]) -> str:
    shares = [share for _, result in rows if (share := result["newton_schulz_share"])]
    if not shares:
        return ""
    least, most = map(format_percent, (min(shares), max(shares)))
    share = least if least == most else f"{least} to {most}"
    return f"muon: its Newton-Schulz iterations take {share} of the model's operations on top, not counted in FLOP/s\n"


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


def _show_profile(variant: Variant, result: Result, console: Console) -> None:
    """Print the time of the traced steps by part, and the path of the trace."""
    path = result["profile"]
    if result["profile_parts"]:
        _show_parts(variant, result, console)
    else:
        console.print("the profiler saw no operation on the devices: on NVIDIA's it may need a permission (CUPTI)")
    console.print(f"profile: open {path} at https://ui.perfetto.dev,")
    console.print(f"  or `tensorboard --logdir={path.rpartition('/plugins/')[0]}` with the package xprof installed")


def _show_parts(variant: Variant, result: Result, console: Console) -> None:
    table = _empty_table(f"where the time goes, {variant.label}", console)
    table.add_column("part", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("a step", justify="right", no_wrap=True)
    table.add_column("its largest operations, as XLA names them")
    for part in result["profile_parts"]:
        largest = ", ".join(f"{name} {format_percent(share)}" for name, share in part["largest"])
        table.add_row(part["name"], format_percent(part["share"]), format_seconds(part["seconds"]), largest)
    console.print(table)
    if any(part["name"] == UNNAMED and part["share"] > _MUCH_UNNAMED for part in result["profile_parts"]):
        console.print("unnamed: copies between host and device")
    idle = format_percent(result["profile_idle"])
    line = f"share: of the operations' time on the devices, which ran none {idle} of the time"
    graphs = "; traced without CUDA graphs, which hide the names of operations" if result["device"] != "cpu" else ""
    console.print(line + graphs)
