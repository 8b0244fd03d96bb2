"""Collectives of a run's programs, and those that its method does not allow."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from noloco_jax.config import TrainConfig
from noloco_jax.formatting import format_bytes
from noloco_jax.optim.methods import METHODS
from noloco_jax.spmd import sharding
from noloco_jax.spmd.background import exchange_parts, is_in_background
from noloco_jax.spmd.compile import PROGRAMS, arguments_of
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.programs import Programs, build_programs
from noloco_jax.spmd.traffic import Collective, bytes_sent, collectives_of

_EXCHANGES = ("outer_step", "exchange")  # of the devices, or over the hosts
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
            if program in _EXCHANGES:
                is_allowed = one.operation in method.outer_collectives
            elif program == "inner_step":
                is_allowed = method.averages_gradients or (one.operation == "ppermute" and "stage" in one.axes)
            else:
                is_allowed = program in _EVALUATION and one.operation == "psum"
            if "replica" in one.axes and not is_allowed:
                lines.append(f"{program}: {one.operation} of {format_bytes(one.bytes)} crosses {', '.join(one.axes)}")
    exchange = next((report.collectives[name] for name in _EXCHANGES if name in report.collectives), None)
    if exchange is not None and method.num_messages is not None:
        slots = report.config.num_replicas // report.mesh_shape["replica"]
        due = method.num_messages(report.config.num_replicas, report.config.outer) * slots * report.parameter_bytes
        if (sent := bytes_sent(exchange)) > due:
            excess = f"a device sends {format_bytes(float(sent))}, and its parameters are {format_bytes(due)}"
            lines.append(f"outer step: {excess}")
    return lines
