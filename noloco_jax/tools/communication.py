"""Show the communication of a run: the collectives of its programs, the mesh axes that they cross, and their bytes.

    python -m noloco_jax.communication --config=configs/quickstart.py --devices=8
    python -m noloco_jax.communication --config=configs/c4_125m.py --config.mesh.fsdp=2 --devices=8

The programs are traced for the devices of a training run, or for `--devices` forced CPU devices, without data and
without compiling. Inside a replica XLA adds the collectives of `fsdp` and `tensor`, which are not listed. Exit status:
0; 2 for bad input; 1 if a program crosses replicas where its method does not allow it.
"""

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from noloco_jax.cluster.host import use_cpu_cores
from noloco_jax.config import TrainConfig, parse_args
from noloco_jax.errors import UserError
from noloco_jax.formatting import format_bytes, markdown_table
from noloco_jax.metrics.console import make_console
from noloco_jax.optim.methods import METHODS
from noloco_jax.spmd import sharding
from noloco_jax.spmd.background import exchange_parts, is_in_background, training_devices
from noloco_jax.spmd.compile import PROGRAMS, arguments_of
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.programs import Programs, build_programs
from noloco_jax.spmd.traffic import Collective, bytes_sent, collectives_of

_PADDING = 1.05  # of arrays that halves and blocks do not divide
_EXCHANGE_PROGRAMS = ("outer_step", "exchange")  # of the devices, or over the hosts
_EVALUATION = ("merge", "spread")


@dataclasses.dataclass(frozen=True)
class Report:
    """Communication of a run's programs.

    Attributes:
      config: the run.
      mesh_shape: mesh axis -> devices.
      parameter_bytes: a replica's parameters on the devices of one of its stages, in float32.
      collectives: program -> its collectives. Where exchanges run over the hosts, "local_step" and "exchange" stand in
        the place of "outer_step".
    """

    config: TrainConfig
    mesh_shape: dict[str, int]
    parameter_bytes: int
    collectives: dict[str, list[Collective]]


def inspect_run(config: TrainConfig, devices: list) -> Report:
    """Trace a run's programs and read their collectives; nothing is compiled or put on a device.

    Args:
      config: the run.
      devices: of the run.

    Raises:
      UserError: if the run does not fit the devices.
    """
    mesh = make_mesh(config.mesh, config.num_replicas, devices, config.delay)
    programs = build_programs(config, mesh)
    traced: dict[str, tuple[Any, tuple[Any, ...]]] = {
        name: (getattr(programs, name), arguments_of(programs)[name]) for name in PROGRAMS
    }
    if is_in_background(config.delay, mesh):
        del traced["outer_step"]
        traced |= exchange_parts(programs, mesh)  # the mesh of the hosts has the same shape
    shape = dict(mesh.shape)
    found = {name: collectives_of(*traced[name], shape) for name in traced if traced[name][0] is not None}
    return Report(config, shape, _parameter_bytes(programs), found)


def _parameter_bytes(programs: Programs) -> int:
    """Return the bytes of one replica's parameters on one stage, as they are sent: whole, in float32."""

    def size(x: Any) -> int:
        on_stage = NamedSharding(programs.mesh, sharding.manual(x.sharding.spec)).shard_shape(x.shape)
        return 4 * int(np.prod(on_stage[1:]))

    return sum(map(size, jax.tree.leaves(programs.state.params)))


def unexpected_collectives(report: Report) -> list[str]:
    """Return a line for each collective that crosses replicas where the method exchanges nothing, and for an excess.

    An inner step may cross replicas only where the method averages gradients, or to send a micro-batch to the next
    stage of another replica. The merge and the spread of an evaluation average all replicas.
    """
    method = METHODS[report.config.method]
    lines = []
    for program, found in report.collectives.items():
        for one in found:
            if program in _EXCHANGE_PROGRAMS:
                is_allowed = one.operation in method.outer_collectives
            elif program == "inner_step":
                is_allowed = method.averages_gradients or (one.operation == "ppermute" and "stage" in one.axes)
            else:
                is_allowed = program in _EVALUATION and one.operation == "psum"
            if "replica" in one.axes and not is_allowed:
                lines.append(f"{program}: {one.operation} of {format_bytes(one.bytes)} crosses {', '.join(one.axes)}")
    exchange = next((report.collectives[name] for name in _EXCHANGE_PROGRAMS if name in report.collectives), None)
    if exchange is not None and method.num_messages is not None:
        slots = report.config.num_replicas // report.mesh_shape["replica"]
        due = method.num_messages(report.config.num_replicas, report.config.outer) * slots * report.parameter_bytes
        if (sent := bytes_sent(exchange)) > _PADDING * due:
            excess = f"a device sends {format_bytes(float(sent))}, and its parameters are {format_bytes(due)}"
            lines.append(f"outer step: {excess}")
    return lines


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
    console.print(collectives_table(report))
    console.print("of one device in a run of the program, the mean over pairings and routes; sent: to other replicas")
    unexpected = unexpected_collectives(report)
    for line in unexpected:
        console.print(f"UNEXPECTED: {line}")
    return 1 if unexpected else 0


def _define_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", type=int, metavar="N", help="trace for N forced CPU devices")


def _collective_rows(report: Report, program: str) -> Iterator[tuple[str, tuple[str, ...], float, float, float]]:
    """Yield (operation, axes, times, bytes, bytes sent to other replicas) of each kind of collective of a program."""
    sums: dict[tuple[str, tuple[str, ...]], list[Fraction]] = {}
    for one in report.collectives[program]:
        total = sums.setdefault((one.operation, one.axes), [Fraction(0)] * 3)
        for i, value in enumerate((one.times, one.times * one.bytes, one.times * one.sent)):
            total[i] += value
    for (operation, axes), (times, size, sent) in sums.items():
        yield operation, axes, float(times), float(size), float(sent)


def collectives_table(report: Report) -> str:
    """Return a title and a table in Markdown, with a row for each kind of collective of each program."""
    axes = " x ".join(f"{axis} {size}" for axis, size in report.mesh_shape.items())
    rows = []
    for program in report.collectives:
        for operation, crossed, times, size, sent in _collective_rows(report, program):
            figures = (f"{times:g}", format_bytes(size), format_bytes(sent))
            rows.append((program, operation, ", ".join(crossed), *figures))
        if not report.collectives[program]:
            rows.append((program, "none", *[""] * 4))
    header = ("program", "collective", "mesh axes", "times", "bytes", "sent")
    title = f"{report.config.method}, {report.config.num_replicas} replicas, mesh {axes}"
    return f"{title}\n\n{markdown_table(header, rows, left=3)}\n"
