"""Compilation of a run's programs, and the collectives that they hold."""

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
import numpy as np

from noloco_jax.config import TrainConfig
from noloco_jax.spmd.background import build_background, host_mesh, is_in_background, lower_background
from noloco_jax.spmd.compile import PROGRAMS, compile_programs
from noloco_jax.spmd.hlo import Collective, Traffic, read_hlo
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.programs import build_programs
from noloco_jax.spmd.shared_batch import spans_processes
from noloco_jax.train.messages import num_pairings

EVALUATION = ("evaluate", "merge", "spread")  # the programs that an evaluation runs


@dataclasses.dataclass(frozen=True)
class Report:
    """Communication of a run's programs.

    Attributes:
      config: the run.
      mesh_shape: mesh axis -> devices.
      parameter_bytes: a replica's parameters on one device, in float32 as they are sent.
      num_pairings: partitions of the replicas that outer steps draw from; 0 for methods without.
      traffic: program -> its collectives: those of `PROGRAMS` that there are; where exchanges run over the hosts
        "solo", "exchange" and "keep" in the place of "outer_step".
    """

    config: TrainConfig
    mesh_shape: dict[str, int]
    parameter_bytes: int
    num_pairings: int
    traffic: dict[str, Traffic]

    @property
    def exchanging(self) -> Traffic | None:
        """Traffic of the program by which replicas meet, on the devices or the hosts."""
        return self.traffic.get("exchange", self.traffic.get("outer_step"))

    @property
    def slots(self) -> int:
        """Replicas of one device."""
        return self.config.num_replicas // self.mesh_shape["replica"]


def inspect_run(
    config: TrainConfig, devices: list, only: Collection[str] = PROGRAMS, *, num_processes: int = 1
) -> Report:
    """Compile a run's programs, each once, and read their collectives.

    Args:
      config: the run.
      devices: to compile for; nothing is put on them.
      only: which of `PROGRAMS` to compile.
      num_processes: of the run, which have as many of the devices each.

    Raises:
      UserError: if the run does not fit the devices.
    """
    mesh = make_mesh(config, devices)
    shares_batches = spans_processes(mesh, len(devices) // num_processes)
    programs = build_programs(config, mesh, shares_batches=shares_batches)
    beside: dict[str, jax.stages.Compiled] = {}
    if is_in_background(config, mesh):
        lowered = lower_background(build_background(config, programs, host_mesh(mesh)), programs)
        beside = {name: program.compile(dict(_options()) or None) for name, program in lowered.items()}
        only = [name for name in only if name != "outer_step"]
    programs = compile_programs(config, programs, only=only, options=_options())
    mesh_shape = dict(programs.mesh.shape)
    params = jax.tree.leaves(programs.state.params)
    numel = sum(int(np.prod(x.sharding.shard_shape(x.shape))) for x in params)
    return Report(
        config=config,
        mesh_shape=mesh_shape,
        parameter_bytes=4 * numel * mesh_shape["replica"] // config.num_replicas,
        num_pairings=num_pairings(config),
        traffic={
            name: read_hlo(program.as_text() or "", mesh_shape)
            for name, program in {**programs.compiled, **beside}.items()
        },
    )


def _options() -> dict[str, Any]:
    # Collectives are settled before machine code is made, which on the CPU takes longer than all the rest.
    return {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}


def crosses_replicas(collective: Collective) -> bool:
    """Return True if data goes from one replica's devices to another's."""
    return "replica" in collective.axes


def bytes_across_replicas(traffic: Traffic) -> tuple[int, int]:
    """Return the least and the most bytes that a device puts into collectives that cross replicas."""
    return traffic.extent(lambda collective: collective.bytes * crosses_replicas(collective))


def operands_text(collective: Collective) -> str:
    """Return the first of a collective's operands and the number of further ones, as text."""
    first, *others = collective.operands or ("nothing",)
    return f"{first} +{len(others)}" if others else first
