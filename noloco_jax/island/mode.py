"""Mode of a run that is one island among several: the differences from a run of all replicas."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from noloco_jax.checkpoint.saved import Saved
from noloco_jax.cluster.processes import run_processes
from noloco_jax.config import TrainConfig
from noloco_jax.errors import tell
from noloco_jax.island.membership import Membership
from noloco_jax.islands import start
from noloco_jax.islands.agent import Agent
from noloco_jax.islands.final_merge import FinalMerge
from noloco_jax.islands.log import IslandLog
from noloco_jax.islands.steps import weight_specs
from noloco_jax.islands.sync import IslandSync
from noloco_jax.methods import schedule_of
from noloco_jax.metrics.evaluate import Validation, evaluate_alone
from noloco_jax.spmd.programs import Programs, PyTree, TrainState
from noloco_jax.spmd.solo import SoloPrograms, build_solo
from noloco_jax.train.messages import Messages
from noloco_jax.train.mode import Resumed
from noloco_jax.train.sync import Sync

_COMPILE_SECONDS = 3600.0  # by which the island's processes may differ in reading a checkpoint and compiling


class IslandMode:
    """Run mode of one replica in its own program, which exchanges with other islands over the network.

    Of an island of several processes, the first one alone meets the others, see `islands.steps`.

    Args:
      member: the run's place among the islands.
    """

    unused: Collection[str] = (  # of them `SoloPrograms` has its own, or an island has no other replica to compare with
        *("outer_step", "moved", "correct_step", "merge", "spread"),
    )

    def __init__(self, member: Membership):
        self._member = member
        self.rows: Sequence[tuple[str, str]] = [("island", str(member))]
        self.labels: Mapping[str, Any] = {"island": member.name}
        self.tracked_as: Mapping[str, str] = {"name": member.name, "group": member.roster.run}
        self._agent: Agent | None = None
        self._log: IslandLog | None = None

    def check(self, config: TrainConfig) -> None:
        self._member.check(config)
        if line := self._member.warning(config):
            tell(line)

    def own(self, config: TrainConfig) -> TrainConfig:
        return self._member.own(config)

    def prepare(self, config: TrainConfig, programs: Programs) -> Messages:
        self._solo: SoloPrograms = build_solo(config, programs)
        self._programs, self._messages = programs, self._member.messages(config, self._solo)
        return self._messages

    def replica_numbers(self, config: TrainConfig) -> tuple[int, int]:
        return self._member.replica, len(self._member.roster.islands)

    def data_positions(self, config: TrainConfig, saved: Saved) -> list[dict[str, Any]]:
        return [self._member.data_position(saved)]

    def connect(
        self,
        config: TrainConfig,
        workdir: Path,
        resumed: Resumed,
        is_stopping: Callable[[], bool],
        report: Callable[[str], None],
        tokenizer: str | None,
    ) -> bool:
        self._workdir, self._is_stopping, self._report = workdir, is_stopping, report
        self._processes = run_processes()
        if not self._processes.is_first:
            return start.follow(is_stopping, self._processes)
        journal = self._member.journal(resumed, config)
        self._member.check_present(-1 if journal is None else journal.round)
        self._agent = self._member.open_agent(
            config, self._solo, self._programs, journal, workdir, is_stopping, report, tokenizer, self._processes
        )
        return self._agent is not None

    def sync(self, config: TrainConfig, programs: Programs) -> Sync:
        steps = self._member.steps(config, self._agent, self._solo, programs, self._processes)
        if self._agent is not None:
            self._log = IslandLog(self._workdir, self._member.name, self._agent.recent.add)

        def linger(state: TrainState) -> None:
            steps.linger(state, config.num_steps, self._member.linger, self._is_stopping, self._report, relays=True)

        merge = None
        if config.outer.final_merge:
            waits = self._member.linger, self._is_stopping, self._report
            merge = FinalMerge(steps, self._member.name, weight_specs(config.model), *waits)
        schedule = schedule_of(config)
        assert schedule is not None
        return IslandSync(schedule, steps, self._log, self._messages, linger, merge)

    def begin(self, is_stopping: Callable[[], bool], step: int, seconds: float) -> bool:
        self._processes.wait_at("compiled", _COMPILE_SECONDS)
        if self._agent is None or self._log is None:
            return start.follow(is_stopping, self._processes)
        begins = start.begin(self._agent, self._workdir, is_stopping, self._processes)
        if begins:
            self._log.start(step, seconds)
        return begins

    def evaluate(self, programs: Programs, validation: Validation, params: PyTree) -> dict[str, Any]:
        """Return the island's own perplexity: it has no other replica to merge with."""
        return {**self.labels, **evaluate_alone(programs, params, validation)}

    def observe(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        if self._agent is not None:
            self._agent.recent.add_figures(step, values)

    def close(self) -> None:
        if self._agent is not None:
            self._agent.close()
