"""Bytes that a run's replicas send each other, and how often."""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, AxisType

from noloco_jax.config import TrainConfig
from noloco_jax.optim.methods import METHODS
from noloco_jax.spmd.compile import arguments_of
from noloco_jax.spmd.programs import build_programs
from noloco_jax.spmd.traffic import bytes_sent, collectives_of


class BytesSent(NamedTuple):
    """Bytes that a replica sends to other replicas, the mean over replicas, pairings and routes.

    A replica that is alone in an outer step sends nothing, and data between the stages of one replica is not counted.

    Attributes:
      outer_step: bytes of an outer step.
      inner_step: bytes of gradients, or of micro-batches sent to another replica's stage.
      final_merge: bytes of the merge at the end of the run.
    """

    outer_step: int | float
    inner_step: int | float = 0
    final_merge: int | float = 0


def bytes_sent_of(config: TrainConfig, mesh_shape: Mapping[str, int]) -> BytesSent:
    """Read the bytes that the replicas of a run send from the jaxprs of its programs.

    Replicas that share a device send nothing; here every stage of every replica has devices of its own, so that the
    bytes do not depend on the layout.

    Args:
      config: the run.
      mesh_shape: devices along every axis; those inside a replica matter, as the vocabulary is padded for them.
    """
    sizes = {**mesh_shape, "replica": config.num_replicas, "stage": config.mesh.stage}
    mesh: Any = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    programs = build_programs(config, mesh, shares_batches=False)
    arguments = arguments_of(programs)

    def sent(name: str) -> int | float:
        found = collectives_of(getattr(programs, name), arguments[name], sizes)
        total: Fraction = bytes_sent(found) * config.mesh.stage
        return int(total) if total.denominator == 1 else float(total)

    return BytesSent(
        outer_step=sent("outer_step") if programs.outer_step else 0,
        inner_step=sent("inner_step") if METHODS[config.method].averages_gradients or config.mesh.stage > 1 else 0,
        final_merge=sent("merge") if programs.outer_step and config.outer.final_merge else 0,
    )


def num_outer_steps(config: TrainConfig) -> int:
    """Return the outer steps of the whole run; 0 for methods without."""
    return config.schedule.total(config.num_steps) if config.schedule else 0


def num_pairings(config: TrainConfig) -> int:
    """Return the number of partitions into groups that outer steps draw from; 0 for methods that draw none."""
    pairing = METHODS[config.method].pairing
    return len(pairing(config.num_replicas, config.seed, config.outer).pool) if pairing else 0
