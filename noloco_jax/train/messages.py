"""Messages between a run's replicas: their bytes, how often they are sent, and the number of pairings.

The exchanges count their bytes from the shapes of what they send, for one replica a device and the run's own stages.
Replicas that share a device send nothing, so the count is what they would send on devices of their own.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from noloco_jax.config import TrainConfig
from noloco_jax.exchange.groups import all_mean_bytes
from noloco_jax.methods import method_of, schedule_of
from noloco_jax.outer.rule import computed
from noloco_jax.schedule import pairing_round
from noloco_jax.spmd import sharding
from noloco_jax.spmd.programs import build_programs
from noloco_jax.spmd.routing import routed_bytes
from noloco_jax.spmd.sharding import REPLICAS

_TYPICAL = 1024  # number of steps to average over
Bytes = int | float
PyTree = Any


@dataclass(frozen=True)
class Messages:
    """Bytes that a replica sends to other replicas, averaged over the replicas; an all-reduce counts as a ring.

    A replica that is alone in a round sends nothing, and data between the stages of one replica is not counted.

    Attributes:
      of_outer_step: outer step (0, 1, ...) -> bytes of weights.
      of_inner_step: step (1, 2, ...) -> bytes of gradients, or of micro-batches sent to another replica's stage.
      of_final_merge: () -> bytes.
    """

    of_outer_step: Callable[[int], Bytes]
    of_inner_step: Callable[[int], Bytes]
    of_final_merge: Callable[[], Bytes] = lambda: 0

    @property
    def mean_of_outer_steps(self) -> float:
        """Return the mean bytes of the first outer steps, since the bytes of rounds may differ."""
        return float(np.mean([self.of_outer_step(round) for round in range(_TYPICAL)]))

    @property
    def mean_of_inner_steps(self) -> float:
        """Return the mean bytes of the first inner steps, since the bytes of steps may differ."""
        return float(np.mean([self.of_inner_step(step) for step in range(1, 1 + _TYPICAL)]))


def messages_of(config: TrainConfig, mesh_shape: Mapping[str, int]) -> Messages:
    """Count the bytes that the replicas of a run send.

    Args:
      config: the run.
      mesh_shape: devices along every axis. Their number in a replica matters: the vocabulary is padded for them, and
        the shares of a sharded array are cut along a dimension.
    """
    num_replicas, stages, fragments = config.num_replicas, config.mesh.stage, config.outer.fragments
    sizes = dict(mesh_shape) | {"replica": num_replicas, "stage": stages}
    # An abstract mesh has no devices and serves for shapes alone.
    mesh: Any = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    state = build_programs(config, mesh, shares_batches=False).state
    params = _of_one_stage(state.params, mesh)
    method = method_of(config)

    def per_replica(of_one_stage: int, of_all_stages: int = 0) -> Bytes:
        whole, rest = divmod(stages * of_one_stage + of_all_stages, num_replicas)
        return whole + rest / num_replicas if rest else whole

    gradients = all_mean_bytes(jax.eval_shape(computed, params), num_replicas) if method.averages_gradients else 0
    routed = routed_bytes(config) if stages > 1 else None

    def of_inner_step(step: int) -> Bytes:
        return per_replica(gradients, routed(step) if routed else 0)

    if method.outer_optimizer is None:
        return Messages(lambda round: 0, of_inner_step)

    cut = sharding.fragments_of(config.model, fragments)
    outer = method.outer_optimizer(config, REPLICAS, cut)
    parts = math.prod(size for axis, size in sizes.items() if axis not in sharding.MANUAL_AXES)
    part = jax.eval_shape(lambda tree: cut.part(computed(tree), cut.cuts(tree), jnp.int32(0)), params)
    of_weights = outer.exchange.sent(part, cut.hidden(part), num_replicas, parts)
    merge = (
        per_replica(all_mean_bytes(jax.eval_shape(computed, params), num_replicas)) if config.outer.final_merge else 0
    )

    def of_outer_step(number: int) -> Bytes:
        return per_replica(of_weights(pairing_round(number, fragments)))

    return Messages(of_outer_step, of_inner_step, lambda: merge)


def _of_one_stage(tree: PyTree, mesh: Any) -> PyTree:
    """Return the shapes of one stage's part of one replica's arrays."""

    def one(x: Any) -> jax.ShapeDtypeStruct:
        along = NamedSharding(mesh, sharding.manual(x.sharding.spec))
        return jax.ShapeDtypeStruct(along.shard_shape(x.shape)[1:], x.dtype)

    return jax.tree.map(one, tree)


def may_send_in_inner_steps(config: TrainConfig) -> bool:
    """Return True if replicas may exchange anything in an inner step."""
    return method_of(config).averages_gradients or config.mesh.stage > 1


def num_outer_steps(config: TrainConfig) -> int:
    """Return the outer steps of the whole run; 0 for methods without."""
    schedule = schedule_of(config)
    return schedule.total(config.num_steps) if schedule else 0


def num_pairings(config: TrainConfig) -> int:
    """Return the number of partitions into groups that outer steps draw from; 0 for methods that draw none."""
    pairing = method_of(config).pairing
    return len(pairing(config).pool) if pairing else 0
