"""A report as a table on the console, and as plain values for JSON."""

import dataclasses
from typing import Any

import jax
from rich import box
from rich.console import Console
from rich.table import Table

from noloco_jax.communication.promises import broken_promises, verdict
from noloco_jax.communication.report import Report, bytes_across_replicas, operands_text
from noloco_jax.spmd.hlo import Collective, Traffic

_FILE_WIDTH = 120  # of the table without a terminal


def to_json(report: Report) -> dict[str, Any]:
    """Return the report as plain values. Bytes are of the operands on one device; `times` of one run of the program."""

    def program(traffic: Traffic) -> dict[str, Any]:
        least, most = bytes_across_replicas(traffic)
        return {
            "bytes_across_replicas": {"least": least, "most": most},
            "exact": traffic.exact,
            "collectives": [
                dataclasses.asdict(collective)
                | {"times": dict(zip(("least", "most"), traffic.times(collective), strict=True))}
                | {"branches": traffic.num_branches(collective)}
                for collective in traffic.collectives()
            ],
        }

    return {
        "jax": jax.__version__,
        "backend": jax.default_backend(),
        "method": report.config.method,
        "num_replicas": report.config.num_replicas,
        "mesh": report.mesh_shape,
        "parameter_bytes": report.parameter_bytes,
        "num_pairings": report.num_pairings,
        "programs": {name: program(traffic) for name, traffic in report.traffic.items()},
        "verdict": verdict(report),
        "broken_promises": broken_promises(report),
    }


def show(report: Report, console: Console) -> None:
    """Print the table of all collectives, and the verdict."""
    axes = " x ".join(f"{axis} {size}" for axis, size in report.mesh_shape.items())
    table = Table(
        "program",
        "collective",
        "crosses",
        title=f"{report.config.method}, {report.config.num_replicas} replicas, mesh {axes}",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE,
    )
    table.add_column("operands", overflow="ellipsis", no_wrap=True)
    for heading in ("bytes", "times", "in one of"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, traffic in report.traffic.items():
        rows = [_cells(traffic, collective) for collective in traffic.collectives()] or [("none", *[""] * 5)]
        for index, cells in enumerate(rows):
            style = "bold" if "replica" in cells[1] else ""
            table.add_row("" if index else name, *cells, style=style, end_section=index == len(rows) - 1)
    if not console.is_terminal:
        console.width = max(console.width, _FILE_WIDTH)
    console.print(table)
    console.print("bytes: of the operands on one device; times: in one run of the program\n")
    for line in verdict(report):
        console.print(line)


def _cells(traffic: Traffic, collective: Collective) -> tuple[str, ...]:
    least, most = traffic.times(collective)
    branches = traffic.num_branches(collective)
    return (
        collective.kind,
        ", ".join(collective.axes) or "nothing",
        operands_text(collective),
        f"{collective.bytes:,}",
        ("" if traffic.exact else "≥ ") + (f"{most}" if least == most else f"{least}-{most}"),
        f"{branches} branches" if branches else "",
    )
