"""Context of a run's loop, and its outcome."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from noloco_jax.checkpoint.record import Totals
from noloco_jax.checkpoint.store import Checkpointer
from noloco_jax.cluster.stop import Stop
from noloco_jax.config import TrainConfig
from noloco_jax.metrics.console import Progress
from noloco_jax.metrics.writer import MetricWriter
from noloco_jax.spmd.batches import GlobalBatches
from noloco_jax.spmd.programs import Programs, TrainState
from noloco_jax.train.bytes_sent import BytesSent
from noloco_jax.train.sync import Sync


@dataclass(frozen=True)
class RunContext:
    """Context of the loop of a run, all made and checked before its first step.

    Attributes:
      config: configuration of the run.
      programs: compiled programs.
      batches: training data of this process's replicas.
      evaluate: fast weights -> the figures of an evaluation.
      checkpoints: storage of the state.
      totals: totals of the run's earlier starts.
      bytes_sent: bytes that replicas send each other.
      peak_flops_per_second: peak rate of all devices together; None if unknown.
      metrics: writer of the figures.
      progress: console output.
      stop: request to stop the run.
      sync: exchanges with other replicas between inner steps.
    """

    config: TrainConfig
    programs: Programs
    batches: GlobalBatches
    evaluate: Callable[[Any], dict[str, Any]]
    checkpoints: Checkpointer
    totals: Totals
    bytes_sent: BytesSent
    peak_flops_per_second: float | None
    metrics: MetricWriter
    progress: Progress
    stop: Stop
    sync: Sync


@dataclass(frozen=True)
class Outcome:
    """Result of a run.

    Attributes:
      state: state after the last step taken.
      step: number of that step.
      finished: True if all steps are taken and evaluated, False if the run was told to stop or parts before.
    """

    state: TrainState
    step: int
    finished: bool
