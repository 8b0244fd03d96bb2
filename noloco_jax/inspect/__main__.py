"""Shows what a run communicates: every collective of its compiled programs, what it crosses, and its bytes.

    python -m noloco_jax.inspect --config=configs/quickstart.py --devices=8
    python -m noloco_jax.inspect --config=configs/c4_125m.py --config.mesh.fsdp=2 --devices=8 --json

Compiles what a training run would, for the same devices or for `--devices` forced CPU devices, without data and without
allocating any of its arrays. Exit status: 0; 2 for bad input; with --check, 1 if a program crosses replicas where its
method promises that it does not.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from noloco_jax.cluster.host import use_cpu_cores
from noloco_jax.config.fields import TrainConfig
from noloco_jax.config.flags import parse_args
from noloco_jax.errors import UserError, main_with_errors
from noloco_jax.methods import method_of
from noloco_jax.run.console import make_console
from noloco_jax.spmd.compile import PROGRAMS, compile_programs
from noloco_jax.spmd.hlo import Collective, Traffic, read_hlo
from noloco_jax.spmd.mesh import make_mesh

_FILE_WIDTH = 120  # of the table where there is no terminal to fit
EVALUATION = ("evaluate", "merge", "spread")  # the programs that an evaluation runs


@dataclasses.dataclass(frozen=True)
class Report:
    """What a run's programs communicate.

    Attributes:
      config: the run.
      mesh_shape: mesh axis -> devices.
      parameter_bytes: a replica's parameters on one device, in float32 as they are sent.
      num_pairings: partitions of the replicas that outer steps draw from; 0 for methods without.
      traffic: program -> its collectives: those of `PROGRAMS` that there are.
    """

    config: TrainConfig
    mesh_shape: dict[str, int]
    parameter_bytes: int
    num_pairings: int
    traffic: dict[str, Traffic]

    @property
    def slots(self) -> int:
        """Replicas of one device."""
        return self.config.num_replicas // self.mesh_shape["replica"]


def inspect_run(config: TrainConfig, devices: list, only: Collection[str] = PROGRAMS) -> Report:
    """Compiles a run's programs, each once, and reads their collectives.

    Args:
      config: the run.
      devices: to compile for; nothing is put on them.
      only: which of `PROGRAMS` to compile.

    Raises:
      UserError: if the run does not fit the devices.
    """
    programs = compile_programs(config, make_mesh(config, devices), only=only, options=_options())
    pairing = method_of(config).pairing
    mesh_shape = dict(programs.mesh.shape)
    params = jax.tree.leaves(programs.state.params)
    numel = sum(int(np.prod(x.sharding.shard_shape(x.shape))) for x in params)
    return Report(
        config=config,
        mesh_shape=mesh_shape,
        parameter_bytes=4 * numel * mesh_shape["replica"] // config.num_replicas,
        num_pairings=len(pairing(config).pool) if pairing else 0,
        traffic={name: read_hlo(program.as_text() or "", mesh_shape) for name, program in programs.compiled.items()},
    )


def _options() -> dict[str, int]:
    # Collectives are settled before machine code is made, which on the CPU takes longer than all the rest.
    return {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}


def crosses_replicas(collective: Collective) -> bool:
    """Whether data goes from one replica's devices to another's."""
    return "replica" in collective.axes


def broken_promises(report: Report) -> list[str]:
    """What crosses replicas although the method promises that it does not; see design of the programs' invariant.

    Every method but ddp: between outer steps nothing but micro-batches that go to another replica's next stage.
    NoLoCo: in an outer step nothing but messages to partners, each of the parameters' size.
    """
    broken = []
    if report.config.method != "ddp":
        for collective in report.traffic["inner_step"].collectives():
            routes = collective.kind == "collective-permute" and "stage" in collective.axes
            if crosses_replicas(collective) and not routes:
                broken.append(f"inner step: {_describe(collective)} crosses {' and '.join(collective.axes)}")
    if report.config.method == "noloco":
        traffic = report.traffic["outer_step"]
        for collective in traffic.collectives():
            if crosses_replicas(collective) and collective.kind != "collective-permute":
                broken.append(f"outer step: {_describe(collective)} crosses {' and '.join(collective.axes)}")
        sent, due = _bytes_across(traffic)[1], _num_partners(report) * report.slots * report.parameter_bytes
        if sent > due:
            broken.append(f"outer step: a device sends {_size(sent)} and its parameters are {_size(due)}")
    return broken


def verdict(report: Report) -> list[str]:
    """The findings in plain words, a line a program."""
    lines = [_inner_verdict(report)]
    if "outer_step" in report.traffic:
        lines.append(_outer_verdict(report))
    lines.append(f"evaluation: {_crossing([report.traffic[name] for name in EVALUATION]) or 'nothing crosses replica'}")
    if report.mesh_shape["replica"] == 1:
        lines.append(f"the replica axis has one device: all {report.slots} replicas meet in its memory")
    lines += [f"BROKEN PROMISE: {text}" for text in broken_promises(report)]
    return lines


def _inner_verdict(report: Report) -> str:
    traffic = report.traffic["inner_step"]
    text = f"inner step: {_crossing([traffic]) or 'nothing crosses replica'}"
    inside = _by_axes([traffic], lambda collective: collective.axes and not crosses_replicas(collective))
    return text + (f"; inside a replica {inside}" if inside else "")


def _outer_verdict(report: Report) -> str:
    traffic = report.traffic["outer_step"]
    kinds = {collective.kind for collective in traffic.collectives() if crosses_replicas(collective)}
    if kinds != {"collective-permute"} or report.config.method != "noloco":
        return f"outer step: {_crossing([traffic]) or 'nothing crosses replica'}"
    partners = _num_partners(report)
    least, most = _bytes_across(traffic)
    count = traffic.extent(lambda collective: int(crosses_replicas(collective)))[1]
    whom = f"each of its {partners} partners" if partners > 1 else "its partner"
    text = (
        "outer step: collective-permute alone crosses replica: "
        f"a replica sends {_size(most / report.slots / partners)} to {whom} "
        f"(its parameters are {_size(report.parameter_bytes)}) in {count} pieces; {report.num_pairings} pairings"
    )
    return text + (f", the fewest bytes of one {_size(least / report.slots / partners)}" if least < most else "")


def _num_partners(report: Report) -> int:
    return report.config.outer.group_size - 1


def _bytes_across(traffic: Traffic) -> tuple[int, int]:
    """The least and the most bytes that a device puts into collectives that cross replicas."""
    return traffic.extent(lambda collective: collective.bytes * crosses_replicas(collective))


def _crossing(traffics: Sequence[Traffic]) -> str:
    """What crosses replicas, or nothing."""
    text = _by_axes(traffics, crosses_replicas)
    blocking = any(
        crosses_replicas(collective) and collective.kind != "collective-permute"
        for traffic in traffics
        for collective in traffic.collectives()
    )
    return text + (": every replica waits for all others" if blocking else "")


def _by_axes(traffics: Sequence[Traffic], chosen: Callable[[Collective], Any]) -> str:
    """`over fsdp all-gather 2 MiB, all-reduce 3 MiB and over tensor ...`: bytes of one device in one run."""
    found = {(c.axes, c.kind) for traffic in traffics for c in traffic.collectives() if chosen(c)}
    texts: dict[tuple[str, ...], list[str]] = {}
    for axes, kind in sorted(found):
        most = sum(
            traffic.extent(lambda c, axes=axes, kind=kind: c.bytes * ((c.axes, c.kind) == (axes, kind)))[1]
            for traffic in traffics
        )
        texts.setdefault(axes, []).append(f"{kind} {_size(most)}")
    return " and ".join(f"over {' and '.join(axes)} {', '.join(kinds)}" for axes, kinds in texts.items())


def _describe(collective: Collective) -> str:
    return f"{collective.kind} of {_operands(collective)}"


def _operands(collective: Collective) -> str:
    first, *others = collective.operands or ("nothing",)
    return f"{first} +{len(others)}" if others else first


def _size(number: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f} bytes"


def to_json(report: Report) -> dict[str, Any]:
    """The report as plain values. Bytes are of the operands on one device; `times` of one run of the program."""

    def program(traffic: Traffic) -> dict[str, Any]:
        least, most = _bytes_across(traffic)
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
    """Prints the table of all collectives, and the verdict."""
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
        rows = [_row(traffic, collective) for collective in traffic.collectives()] or [("none", *[""] * 5)]
        for index, row in enumerate(rows):
            style = "bold" if "replica" in row[1] else ""
            table.add_row("" if index else name, *row, style=style, end_section=index == len(rows) - 1)
    if not console.is_terminal:
        console.width = max(console.width, _FILE_WIDTH)
    console.print(table)
    console.print("bytes: of the operands on one device; times: in one run of the program\n")
    for line in verdict(report):
        console.print(line)


def _row(traffic: Traffic, collective: Collective) -> tuple[str, ...]:
    least, most = traffic.times(collective)
    branches = traffic.num_branches(collective)
    return (
        collective.kind,
        ", ".join(collective.axes) or "nothing",
        _operands(collective),
        f"{collective.bytes:,}",
        ("" if traffic.exact else "≥ ") + (f"{most}" if least == most else f"{least}-{most}"),
        f"{branches} branches" if branches else "",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and prints the report; returns the exit status."""
    config, flags = parse_args(argv, __doc__ or "", _define_flags, prog="python -m noloco_jax.inspect")
    if flags.devices is None:
        use_cpu_cores(config)
    elif flags.devices < 1:
        raise UserError(f"--devices={flags.devices} is no number of devices: give 1 or more")
    else:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", flags.devices)
    report = inspect_run(config, jax.devices())
    if flags.json:
        json.dump(to_json(report), sys.stdout, indent=1)
        print()
    else:
        show(report, make_console())
    return 1 if flags.check and broken_promises(report) else 0


def _define_flags(parser) -> None:
    parser.add_argument("--devices", type=int, metavar="N", help="compile for N forced CPU devices")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a promise of the method is broken")


if __name__ == "__main__":
    main_with_errors(main)
