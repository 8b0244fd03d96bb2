"""What a run's replicas send to each other: how many bytes, how often, in which pairings; read from its programs.

The programs are traced, not compiled, for a mesh with one replica a device and the run's own stages: replicas that
share a device send nothing, and a method is to be judged by what they would send.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from noloco_jax.config import TrainConfig
from noloco_jax.methods import method_of, schedule_of
from noloco_jax.schedule import own_round
from noloco_jax.spmd.programs import build_programs
from noloco_jax.spmd.sent import bytes_between_replicas
from noloco_jax.spmd.sharding import MANUAL_AXES

_AT_ONCE = 4096  # rounds or steps that are counted together
_TYPICAL = 1024  # how many make a mean
Bytes = int | float


@dataclass(frozen=True)
class Messages:
    """Bytes that a replica sends to other replicas, in the mean over the replicas; an all-reduce counts as a ring.

    A replica that is alone in a round sends nothing, and what goes from stage to stage of one replica is not counted.

    Attributes:
      of_outer_step: round (0, 1, ...) -> bytes, of weights and, where they travel in it, of moments.
      of_inner_step: step (1, 2, ...) -> bytes: gradients, or micro-batches on their way to another replica's stage.
      of_final_merge: () -> bytes.
    """

    of_outer_step: Callable[[int], Bytes]
    of_inner_step: Callable[[int], Bytes]
    of_final_merge: Callable[[], Bytes] = lambda: 0

    @property
    def mean_of_outer_steps(self) -> float:
        """Of the first ones, as the bytes of rounds may differ."""
        return float(np.mean([self.of_outer_step(round) for round in range(_TYPICAL)]))

    @property
    def mean_of_inner_steps(self) -> float:
        """Of the first ones, as the bytes of steps may differ."""
        return float(np.mean([self.of_inner_step(step) for step in range(1, 1 + _TYPICAL)]))


def messages_of(config: TrainConfig, mesh_shape: Mapping[str, int]) -> Messages:
    """What the replicas of a run send.

    Args:
      config: the run.
      mesh_shape: of its mesh. How many devices hold a replica matters: of a sharded array, blocks of a code may hold
        fewer weights, and the vocabulary is padded.
    """
    sizes = dict(mesh_shape) | {"replica": config.num_replicas, "stage": config.mesh.stage}
    # In a mesh's place: nothing is put on its devices, of which there are none.
    mesh: Any = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    programs = build_programs(config, mesh, shares_batches=False)
    params, inner, outer = programs.state

    def per_replica(program: Any, arguments: tuple[Any, ...], decides: Any = None) -> Callable[[int], Bytes]:
        """The bytes by the argument that decides which messages are sent, counted when they are first asked for."""
        traced = program.trace(*arguments).jaxpr
        position = next((i for i, x in enumerate(jax.tree.leaves(arguments)) if x is decides), -1)
        manual = {axis: sizes[axis] for axis in MANUAL_AXES}

        @cache
        def counted(part: int) -> np.ndarray:
            values = np.arange(part * _AT_ONCE, (part + 1) * _AT_ONCE)
            return bytes_between_replicas(traced, position, values, manual)

        def of(value: int) -> Bytes:
            whole, rest = divmod(int(counted(value // _AT_ONCE)[value % _AT_ONCE]), config.num_replicas)
            return whole + rest / config.num_replicas if rest else whole

        return of

    of_inner_step = of_outer_step = of_moments = of_final_merge = _nothing
    if programs.outer_step is not None:
        assert outer is not None
        of_outer_step = per_replica(programs.outer_step, (params, outer), outer.round)
    if may_send_in_inner_steps(config):
        step = jax.ShapeDtypeStruct((), jnp.int32)
        of_inner_step = per_replica(programs.inner_step, (params, inner, programs.batch, step), step)
    if programs.share_moments is not None:
        number = jax.ShapeDtypeStruct((), jnp.int32)
        of_moments = per_replica(programs.share_moments, (inner, number), number)
    if programs.final_merge is not None:
        of_final_merge = per_replica(programs.final_merge, (params,))

    def of_both(round: int) -> Bytes:
        return of_outer_step(round) + (of_moments(round) if shares_moments(config, round) else 0)

    return Messages(of_both, of_inner_step, lambda: of_final_merge(0))


def _nothing(value: int) -> Bytes:
    del value
    return 0


def may_send_in_inner_steps(config: TrainConfig) -> bool:
    """Whether replicas may exchange anything in an inner step: all others are spared the time of tracing it."""
    return method_of(config).averages_gradients or config.mesh.stage > 1


def num_outer_steps(config: TrainConfig) -> int:
    """Outer steps of the whole run; 0 for methods without."""
    schedule = schedule_of(config)
    return schedule.total(config.num_steps) if schedule else 0


def shares_moments(config: TrainConfig, round: int) -> bool:
    """Whether the inner optimizer's moments are averaged too in outer step `round`."""
    every = config.outer.moments
    return method_of(config).has_outer_steps and every > 0 and own_round(round, config.outer.fragments) % every == 0


def num_pairings(config: TrainConfig) -> int:
    """Partitions of the replicas into groups that outer steps draw from; 0 for methods that draw none."""
    pairing = method_of(config).pairing
    return len(pairing(config).pool) if pairing else 0
