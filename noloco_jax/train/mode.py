"""Modes of a run: all replicas in one program (here), or an island with one replica (`islands.mode`)."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from noloco_jax.checkpoint import elastic
from noloco_jax.checkpoint.saved import Saved
from noloco_jax.config import TrainConfig
from noloco_jax.exchange.swap import choose_form
from noloco_jax.methods import method_of
from noloco_jax.metrics.evaluate import Validation, evaluate
from noloco_jax.spmd.background import build_background, compile_background, host_mesh, is_in_background
from noloco_jax.spmd.programs import Programs, PyTree
from noloco_jax.train.messages import Messages, messages_of
from noloco_jax.train.sync import BackgroundSync, CollectiveSync, Sync


class Resumed(NamedTuple):
    """Start of a run: the step of its checkpoint and the protocol state in it; 0 and None for a new run."""

    step: int
    sync_state: Mapping[str, Any] | None


class Mode(Protocol):
    """Differences between a run of all replicas and an island of one. Methods are called once, in this order.

    Values and methods with a body are defaults, for a run of all replicas.

    Attributes:
      rows: rows for the banner.
      labels: labels in its metrics, beside the configuration.
      tracked_as: name and group of its run in W&B; empty: W&B finds a name.
      unused: names of programs that it does not run.
    """

    rows: Sequence[tuple[str, str]] = ()
    labels: Mapping[str, Any] = {}
    tracked_as: Mapping[str, str] = {}
    unused: Collection[str] = ()

    def check(self, config: TrainConfig) -> None:
        """Raise `UserError` if the configuration does not fit."""

    def own(self, config: TrainConfig) -> TrainConfig:
        """Return the configuration of the programs of this process, from that of the whole run."""
        return config

    def prepare(self, config: TrainConfig, programs: Programs) -> Messages:
        """Build what outer steps need beside the programs; return the messages of replicas. `config` is its own."""
        ...

    def replica_numbers(self, config: TrainConfig) -> tuple[int, int]:
        """Return the number of the first replica here among those that share the data, and how many share them."""
        ...

    def data_positions(self, config: TrainConfig, saved: Saved) -> list[dict[str, Any]]:
        """Return the position in the data of each replica here; raise `UserError` if it cannot resume here."""
        ...

    def connect(
        self,
        config: TrainConfig,
        workdir: Path,
        resumed: Resumed,
        is_stopping: Callable[[], bool],
        report: Callable[[str], None],
        tokenizer: str | None,
    ) -> bool:
        """Join the peers, before anything is compiled; return False if the run was told to stop meanwhile.

        Args:
          config: configuration of the whole run.
          workdir: the run's folder.
          resumed: the start of the run.
          is_stopping: returns True once the run has been told to stop.
          report: receives lines for people.
          tokenizer: the fingerprint of the run's tokenizer, if it has one.
        """
        return True

    def sync(self, config: TrainConfig, programs: Programs) -> Sync:
        """Return the exchanges, compiled; `config` is its own."""
        ...

    def begin(self, is_stopping: Callable[[], bool], step: int, seconds: float) -> bool:
        """Wait until the run may take its first step; return False if it was told to stop meanwhile.

        Args:
          is_stopping: returns True once the run has been told to stop.
          step: inner steps taken so far.
          seconds: duration of the run so far.
        """
        return True

    def evaluate(self, programs: Programs, validation: Validation, params: PyTree) -> dict[str, Any]:
        """Return the figures of an evaluation."""
        ...

    def observe(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Receive the figures of a metrics line of `kind`, as plain values."""

    def close(self) -> None:
        """Close its connections, also after a failed run."""


class WholeRun(Mode):
    """All replicas in one program, over one process or several."""

    def prepare(self, config: TrainConfig, programs: Programs) -> Messages:
        self._background, self._exchange_mesh = None, programs.mesh
        if is_in_background(config, programs.mesh):
            self._exchange_mesh = host_mesh(programs.mesh)
            self._background = build_background(config, programs, self._exchange_mesh)
            self.unused = ("outer_step",)
        messages = messages_of(config, programs.mesh.shape)
        self._outer_bytes = int(messages.outer_step)
        return messages

    def connect(
        self,
        config: TrainConfig,
        workdir: Path,
        resumed: Resumed,
        is_stopping: Callable[[], bool],
        report: Callable[[str], None],
        tokenizer: str | None,
    ) -> bool:
        if method_of(config).has_outer_steps and (line := choose_form(self._exchange_mesh, self._outer_bytes)):
            report(line)
        return True

    def replica_numbers(self, config: TrainConfig) -> tuple[int, int]:
        return 0, config.num_replicas

    def data_positions(self, config: TrainConfig, saved: Saved) -> list[dict[str, Any]]:
        elastic.check_elastic(config, saved.shape)
        return elastic.data_positions(saved, config.num_replicas)

    def sync(self, config: TrainConfig, programs: Programs) -> Sync:
        if self._background is None:
            return CollectiveSync(config, programs)
        return BackgroundSync(config, programs, compile_background(self._background, programs))

    def evaluate(self, programs: Programs, validation: Validation, params: PyTree) -> dict[str, Any]:
        return evaluate(programs, params, validation)
