"""Show the communication of a run: the collectives of its programs, the mesh axes that they cross, and their bytes.

    python -m noloco_jax.communication --config=configs/quickstart.py --devices=8
    python -m noloco_jax.communication --config=configs/c4_125m.py --config.mesh.fsdp=2 --devices=8

The programs are traced for the devices of a training run, or for `--devices` forced CPU devices, without data and
without compiling. Inside a replica XLA adds the collectives of `fsdp` and `tensor`, which are not listed. Exit status:
0; 2 for bad input; 1 if a program crosses replicas where its method does not allow it.
"""

import argparse
from collections.abc import Iterator, Sequence
from fractions import Fraction

import jax

from noloco_jax.cluster.host import use_cpu_cores
from noloco_jax.config import parse_args
from noloco_jax.errors import UserError
from noloco_jax.formatting import format_bytes, markdown_table
from noloco_jax.metrics.console import make_console
from noloco_jax.spmd.background import training_devices
from noloco_jax.tools.communication_report import Report, inspect_run, unexpected_collectives


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and print the report; return the exit status."""
    config, flags = parse_args(argv, __doc__ or "", _define_flags, prog="python -m noloco_jax.communication")
    if flags.devices is None:
        use_cpu_cores(config.mesh, config.num_replicas, config.delay)
        devices = training_devices(config.delay, config.mesh, jax.devices())
    elif flags.devices < 1:
        raise UserError(f"--devices={flags.devices} is no number of devices: give 1 or more")
    else:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", flags.devices)
        devices = jax.devices()
    report = inspect_run(config, devices)
    console = make_console()
    console.print(table(report))
    console.print("of one device in a run of the program, the mean over pairings and routes; sent: to other replicas")
    unexpected = unexpected_collectives(report)
    for line in unexpected:
        console.print(f"UNEXPECTED: {line}")
    return 1 if unexpected else 0


def _define_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", type=int, metavar="N", help="trace for N forced CPU devices")


def _rows(report: Report, program: str) -> Iterator[tuple[str, tuple[str, ...], float, float, float]]:
    """Yield (operation, axes, times, bytes, bytes sent to other replicas) of each kind of collective of a program."""
    sums: dict[tuple[str, tuple[str, ...]], list[Fraction]] = {}
    for one in report.collectives[program]:
        total = sums.setdefault((one.operation, one.axes), [Fraction(0)] * 3)
        for i, value in enumerate((one.times, one.times * one.bytes, one.times * one.sent)):
            total[i] += value
    for (operation, axes), (times, size, sent) in sums.items():
        yield operation, axes, float(times), float(size), float(sent)


def table(report: Report) -> str:
    """Return a title and a table in Markdown, with a row for each kind of collective of each program."""
    axes = " x ".join(f"{axis} {size}" for axis, size in report.mesh_shape.items())
    rows = []
    for program in report.collectives:
        for operation, crossed, times, size, sent in _rows(report, program):
            figures = (f"{times:g}", format_bytes(size), format_bytes(sent))
            rows.append((program, operation, ", ".join(crossed), *figures))
        if not report.collectives[program]:
            rows.append((program, "none", *[""] * 4))
    header = ("program", "collective", "mesh axes", "times", "bytes", "sent")
    title = f"{report.config.method}, {report.config.num_replicas} replicas, mesh {axes}"
    return f"{title}\n\n{markdown_table(header, rows, left=3)}\n"
