"""Measure how fast a configuration trains, and its variants: time, FLOPs, memory, messages, data, compilation.

    python -m noloco_jax.bench --config=configs/quickstart.py --vary=num_replicas=2,4,8
    python -m noloco_jax.bench --config=configs/c4_125m.py --vary=method=noloco,diloco,ddp --json=bench.json
    python -m noloco_jax.bench --config=configs/quickstart.py --vary=num_replicas=2,16,64 --compile_only

Every variant runs in a process of its own, one after another, on random tokens. Data that are there are read as fast as
possible, without training. `--vary=num_replicas/mesh.replica=2/2,4/4` varies fields together; several --vary measure
all combinations. `--json` writes all figures and the whole configurations.

*step*: median of the inner steps, one dispatched ahead; *share of run*: of the outer steps, without what outer.delay
adds to the inner ones; *sent*: bytes that a replica sends to others in an outer step (with ddp in every step), in the
mean over replicas, and in an inner step; *memory*: the peak of the fullest device, or, where devices do not report it,
XLA's account of the programs: arguments + temporaries + outputs - aliased, and the state that lies beside.

Model FLOPs per token are 3 times those of the forward pass: 2 per weight of every matrix product (the head is in, the
embedding out) and causal attention counted once, 2 x T x heads x head size per layer at sequence length T, in a
sliding window of W tokens 4 x (W - W²/2T) x heads x head size; what is computed again in the backward pass does not
count, nor do Muon's iterations. MFU is the model's FLOP/s over the devices' published peak, as in training.

Exit status: 0; 1 if a variant failed; 2 for bad input, which includes variants that do not fit the devices.
"""

import argparse
import json
import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from noloco_jax.cluster.host import keep_freed_memory
from noloco_jax.config import TrainConfig, load_config, make_parser, split_overrides, to_dict
from noloco_jax.errors import UserError
from noloco_jax.files import write_whole
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
from noloco_jax.metrics.console import make_console
from noloco_jax.tools.sweep import check_given_once, combinations, parse_sweep

Result = dict[str, Any]  # of a variant: `measure`'s figures, or `error` and `status`
FAILED, REFUSED = 1, 2  # exit statuses of a variant that has no figures
_DATA_MARGIN = 3  # the data pipeline alone should be this many times as fast as the trainer


class BenchRow(NamedTuple):
    """A variant and its result."""

    label: str
    config: TrainConfig
    result: Result


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every variant; return the exit status."""
    overrides, own = split_overrides(list(sys.argv[1:] if argv is None else argv))
    flags = _parser().parse_args(own)
    _check_flags(flags)
    variants = bench_variants(flags.config, overrides, flags.vary)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # SIGTERM ends the variant's process too
    console = make_console()
    options = {name: getattr(flags, name) for name in ("steps", "data_seconds", "compile_only", "profile")}
    rows: list[BenchRow] = []
    for number, (label, config) in enumerate(variants, start=1):
        if len(variants) > 1:
            console.print(f"{number}/{len(variants)}  {label}", style="dim")
        rows.append(BenchRow(label, config, in_own_process(start_measurement, to_dict(config), options)))
        if flags.json is not None:
            _write_figures(flags.json, flags.config, rows)
    statuses = {row.result["status"] for row in rows if "error" in row.result}
    if len(rows) == 1 and statuses == {REFUSED}:
        raise UserError(rows[0].result["error"])
    show(rows, flags.config, console)
    if flags.json is not None:
        console.print(f"all figures: {flags.json}")
    return max(statuses, default=0)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__ or "", prog="python -m noloco_jax.bench")
    flag = parser.add_argument
    flag("--config", required=True, metavar="FILE[:ARGUMENT]", help="what to measure; --config.FIELD=VALUE too")
    help_of_vary = "a field to measure with each of several values; may be repeated, for all combinations"
    flag("--vary", action="append", default=[], metavar="FIELD=A,B,C", help=help_of_vary)
    flag("--steps", type=int, default=20, help="inner steps to time (default %(default)s)")
    flag("--json", type=Path, metavar="FILE", help="write all figures to a new file")
    flag("--profile", type=Path, metavar="DIR", help="write a trace for xprof and Perfetto")
    help_of_data = "how long to read the data alone, 0 for not at all (default %(default)s)"
    flag("--data_seconds", type=float, default=3.0, help=help_of_data)
    flag("--compile_only", action="store_true", help="only compile: time and memory of that")
    return parser


def _check_flags(flags: argparse.Namespace) -> None:
    if flags.steps < 1:
        raise UserError(f"--steps={flags.steps} is no number of steps: give 1 or more")
    if not 0 <= flags.data_seconds < float("inf"):
        raise UserError(f"--data_seconds={flags.data_seconds:g} is no time: give 0 or more")
    if flags.compile_only and flags.profile is not None:
        raise UserError("--profile traces steps and --compile_only takes none: leave one of them out")
    if flags.json is not None and flags.json.exists():
        raise UserError(f"--json={flags.json} is there already: name another file, or remove it")
    if flags.json is not None and not flags.json.absolute().parent.is_dir():
        raise UserError(f"--json={flags.json}: there is no folder {flags.json.parent}, make it first")


def bench_variants(file: str, overrides: Sequence[str], vary: Sequence[str]) -> list[tuple[str, TrainConfig]]:
    """Return (label, configuration) of every combination of the varied values; without any, the configuration itself.

    Args:
      file: the config file, with its argument if it takes one.
      overrides: `--config.FIELD=VALUE`, of all variants.
      vary: `FIELD=VALUE,VALUE,...` each.

    Raises:
      UserError: if a field or value is wrong, or a variant's fields contradict each other.
    """
    choices = [parse_sweep(text, "--vary") for text in vary]
    check_given_once(choices, "--vary")
    variants = []
    for combination in combinations(choices):
        pairs = [pair for one, value in combination for pair in zip(one.fields, value, strict=True)]
        config = load_config(file, [*overrides, *(f"--config.{field}={value}" for field, value in pairs)])
        label = " ".join(f"{one.title}={value[0]}" for one, value in combination)
        variants.append((label or f"method={config.method} num_replicas={config.num_replicas}", config))
    return variants


def in_own_process(work: Callable[..., None], *arguments: Any) -> Result:
    """Return what `work` sends through the pipe that it gets before its arguments; an `error` if it sends nothing.

    A variant may need other CPU devices, and its peak memory is its own.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(sender, *arguments))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        status = process.exitcode or 0
        ended = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return {"error": f"its process {ended}, see above", "status": FAILED}
    finally:
        process.kill()
        process.join()


def start_measurement(sender: Connection, *arguments: Any) -> None:
    """Measure a variant in this process; see `measure.work`."""
    keep_freed_memory()
    from noloco_jax.tools.bench import measure  # imports jax

    measure.work(sender, *arguments)


def _write_figures(path: Path, file: str, rows: Sequence[BenchRow]) -> None:
    """Write the figures measured so far."""
    runs = [{"variant": row.label, **row.result, "config": to_dict(row.config)} for row in rows]
    write_whole(path, json.dumps({"config_file": file, "runs": runs}, indent=1) + "\n")


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


def show(rows: Sequence[BenchRow], file: str, console: Console) -> None:
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
        console.print(_figures_table(measured))
        for line in _notes(measured):
            console.print(line)
    for row in rows:
        if "error" in row.result:
            console.print(f"failed: {row.label}: {row.result['error']}", style="bold red")


def _figures_table(rows: Sequence[BenchRow]) -> str:
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


def _notes(rows: Sequence[BenchRow]) -> Iterator[str]:
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
