"""Show the communication of a run: the collectives of its programs, the mesh axes that they cross, and their bytes.

    python -m noloco_jax.communication --config=configs/quickstart.py --devices=8
    python -m noloco_jax.communication --config=configs/c4_125m.py --config.mesh.fsdp=2 --devices=8 --json

The programs are traced for the devices of a training run, or for `--devices` forced CPU devices, without data and
without compiling. Inside a replica XLA adds the collectives of `fsdp` and `tensor`, which are not listed. Exit status:
0; 2 for bad input; with --check, 1 if a program crosses replicas where its method does not allow it.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import jax
from rich import box
from rich.table import Table

from noloco_jax.cluster.host import use_cpu_cores
from noloco_jax.communication.report import Report, inspect_run, unexpected_collectives
from noloco_jax.config import parse_args
from noloco_jax.errors import UserError
from noloco_jax.formatting import format_bytes
from noloco_jax.metrics.console import make_console
from noloco_jax.spmd.background import training_devices


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and print the report; return the exit status."""
    config, flags = parse_args(argv, __doc__ or "", _define_flags, prog="python -m noloco_jax.communication")
    if flags.devices is None:
        use_cpu_cores(config)
        devices = training_devices(config, jax.devices())
    elif flags.devices < 1:
        raise UserError(f"--devices={flags.devices} is no number of devices: give 1 or more")
    else:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", flags.devices)
        devices = jax.devices()
    if flags.processes < 1 or len(devices) % flags.processes:
        raise UserError(f"--processes={flags.processes} cannot share {len(devices)} devices evenly: give a divisor")
    report = inspect_run(config, devices, num_processes=flags.processes)
    unexpected = unexpected_collectives(report)
    if flags.json:
        json.dump(_to_json(report) | {"unexpected_collectives": unexpected}, sys.stdout, indent=1)
        print()
    else:
        console = make_console()
        console.print(_table(report))
        console.print(
            "of one device in a run of the program, the mean over pairings and routes; sent: to other replicas"
        )
        for line in unexpected:
            console.print(f"UNEXPECTED: {line}")
    return 1 if flags.check and unexpected else 0


def _define_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", type=int, metavar="N", help="trace for N forced CPU devices")
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="as for a run of N processes that share the devices evenly",
    )
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a collective is unexpected")


def _rows(report: Report, program: str) -> Iterator[tuple[str, tuple[str, ...], float, float, float]]:
    """Yield (operation, axes, times, bytes, bytes sent to other replicas) of each kind of collective of a program."""
    sums: dict[tuple[str, tuple[str, ...]], list[Fraction]] = {}
    for one in report.collectives[program]:
        total = sums.setdefault((one.operation, one.axes), [Fraction(0)] * 3)
        for i, value in enumerate((one.times, one.times * one.bytes, one.times * one.sent)):
            total[i] += value
    for (operation, axes), (times, size, sent) in sums.items():
        yield operation, axes, float(times), float(size), float(sent)


def _to_json(report: Report) -> dict[str, Any]:
    names = ("operation", "axes", "times", "bytes", "bytes_sent")
    return {
        "method": report.config.method,
        "num_replicas": report.config.num_replicas,
        "mesh": report.mesh_shape,
        "parameter_bytes": report.parameter_bytes,
        "programs": {
            program: [dict(zip(names, row, strict=True)) for row in _rows(report, program)]
            for program in report.collectives
        },
    }


def _table(report: Report) -> Table:
    axes = " x ".join(f"{axis} {size}" for axis, size in report.mesh_shape.items())
    title = f"{report.config.method}, {report.config.num_replicas} replicas, mesh {axes}"
    table = Table("program", "collective", "mesh axes", title=title, title_justify="left", box=box.SIMPLE)
    for heading in ("times", "bytes", "sent"):
        table.add_column(heading, justify="right", no_wrap=True)
    for program in report.collectives:
        rows = list(_rows(report, program)) or [("none", (), 0.0, 0.0, 0.0)]
        for index, (operation, crossed, times, size, sent) in enumerate(rows):
            figures = (f"{times:g}", format_bytes(size), format_bytes(sent)) if crossed else ("", "", "")
            table.add_row("" if index else program, operation, ", ".join(crossed), *figures)
    return table
