"""Run that is one island among several: its start, and the differences from a run of all replicas."""

import argparse
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from noloco_jax.checkpoint.saved import Saved
from noloco_jax.cluster.host import use_cpu_cores, use_gpu_memory
from noloco_jax.cluster.place import Place
from noloco_jax.cluster.processes import run_processes
from noloco_jax.cluster.start import joined
from noloco_jax.config import TrainConfig, to_dict
from noloco_jax.errors import UserError, tell
from noloco_jax.files import full_disk_told
from noloco_jax.islands.catch_up import CaughtUp
from noloco_jax.islands.final_merge import FinalMerge
from noloco_jax.islands.interfaces import PATIENCE
from noloco_jax.islands.keys import open_membership
from noloco_jax.islands.link_advice import settings_that_fit
from noloco_jax.islands.membership import Membership, incarnation_of, write_incarnation
from noloco_jax.islands.network import Link, LinkPlan, is_done
from noloco_jax.islands.partners import partner_by
from noloco_jax.islands.payload import StateForms, codec_of, specs_of
from noloco_jax.islands.programs import SoloPrograms, build_solo, compile_solo
from noloco_jax.islands.roster import parse_address, parse_dialled
from noloco_jax.islands.steps import IslandSteps
from noloco_jax.islands.sync import IslandSync
from noloco_jax.methods import method_of, schedule_of
from noloco_jax.metrics.evaluate import Validation, evaluate_alone
from noloco_jax.outer.rule import at_num_outer_steps
from noloco_jax.spmd.first_process import from_first_process
from noloco_jax.spmd.inner import at_step
from noloco_jax.spmd.programs import Programs, PyTree, TrainState
from noloco_jax.train.messages import Messages
from noloco_jax.train.mode import Resumed
from noloco_jax.train.sync import Sync
from noloco_jax.train.training import train

_COMPILE_SECONDS = 3600.0  # by which the island's processes may differ in reading a checkpoint and compiling
_SHOWN = ("loss", "perplexity", "tokens_per_second")


def train_island(config: TrainConfig, place: Place | None, flags: argparse.Namespace) -> int:
    """Train as the island that the flags name; check everything before compiling.

    Args:
      config: the run.
      place: of this process among the island's; None: the only one.
      flags: those of `island train`.
    """
    roster, credentials = open_membership(flags.roster, flags.name, flags.keys, flags.workdir)
    if not 0 <= flags.linger < math.inf:
        raise UserError(f"--linger={flags.linger}: give seconds, 0 to leave at once")
    member = Membership(
        roster,
        flags.name,
        credentials,
        flags.pace,
        flags.linger,
        None if flags.listen is None else parse_address(flags.listen),
        None if flags.address is None else parse_dialled(flags.address),
    )
    member.check(config)
    use_gpu_memory()
    with joined(place, to_dict(config), flags.start_timeout) as num_processes, full_disk_told(flags.workdir):
        use_cpu_cores(member.own(config), num_processes)
        return train(
            config,
            flags.workdir,
            from_step=flags.from_step,
            dry_run=flags.dry_run,
            force_unlock=flags.force_unlock,
            wandb_project=flags.wandb,
            mode=IslandMode(member),
        )


class IslandMode:
    """Run mode of one replica in its own program, which exchanges with other islands over the network.

    Of an island of several processes, the first one alone meets the others, see `steps.py`.

    Args:
      member: the run's place among the islands.
    """

    unused: Collection[str] = (  # of them `SoloPrograms` has its own, or an island has no other replica to compare with
        *("outer_step", "correct_step", "merge", "spread"),
    )

    def __init__(self, member: Membership):
        self._member = member
        self.rows: Sequence[tuple[str, str]] = [("island", str(member))]
        self.labels: Mapping[str, Any] = {"island": member.name}
        self.tracked_as: Mapping[str, str] = {"name": member.name, "group": member.roster.run}
        self._link: Link | None = None

    def check(self, config: TrainConfig) -> None:
        self._member.check(config)
        if line := self._member.warning(config):
            tell(line)

    def own(self, config: TrainConfig) -> TrainConfig:
        return self._member.own(config)

    def prepare(self, config: TrainConfig, programs: Programs) -> Messages:
        self._solo: SoloPrograms = build_solo(config, programs)
        self._programs = programs
        self._num_bytes = sum(spec.nbytes for spec in specs_of(self._solo.payload))
        return Messages(outer_step=self._num_bytes)

    def replica_numbers(self, config: TrainConfig) -> tuple[int, int]:
        return self._member.replica, self._member.roster.num_founders

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
            return self._until(never, is_stopping)
        member, solo, schedule = self._member, self._solo, schedule_of(config)
        pairing: Any = method_of(config).pairing
        assert schedule is not None and pairing is not None
        saved = resumed.sync_state
        member.check_present(-1 if saved is None else saved["round"])
        incarnation, began_before = incarnation_of(workdir)
        self._incarnation = incarnation
        details = {"config": to_dict(config), "tokenizer": tokenizer}
        plan = LinkPlan(
            name=member.name,
            roster=member.roster,
            credentials=member.credentials,
            identity=member.identity(config, self._programs, tokenizer),
            partner=partner_by(pairing(config), config.outer.fragments),
            codec=codec_of(solo.wire, solo.message, solo.payload, solo.dims),
            forms=StateForms(specs_of(self._programs.state), len(jax.tree.leaves(self._programs.state.params))),
            patience=PATIENCE * config.outer.fragments,
            fits=lambda round, step: 0 < step < config.num_steps and round + 1 == schedule.total(step),
            workdir=workdir,
            incarnation=incarnation,
            steps_per_round=schedule.gap,
            by_time=member.pace == "time",
            began_before=began_before,
            saved=saved,
            details=json.dumps(details, default=str),
            advice=partial(settings_that_fit, config.outer.wire, config.outer.sync_every),
            listen=member.listen,
            address=member.address,
            num_rounds=schedule.total(config.num_steps),
        )
        self._link = Link(plan, report)
        return self._until(partial(is_done, self._link.open()), is_stopping)

    def sync(self, config: TrainConfig, programs: Programs) -> Sync:
        member, schedule = self._member, schedule_of(config)
        assert schedule is not None
        self._steps = steps = IslandSteps(
            self._link,
            compile_solo(self._solo, programs),
            lambda state: _placed(programs, state),
            lambda step: schedule.sync_every * config.tokens_per_step,
            keeps_pace=member.pace == "time",
            processes=self._processes,
        )

        def linger(state: TrainState) -> None:
            steps.linger(state, config.num_steps, member.linger, self._is_stopping, self._report)

        merge = None
        if config.outer.final_merge:
            merge = FinalMerge(steps, member.name, member.linger, self._is_stopping, self._report)
        return IslandSync(member.name, schedule, steps, self._num_bytes, linger, merge, config.log_every)

    def begin(self, is_stopping: Callable[[], bool], step: int, seconds: float) -> bool:
        self._processes.wait_at("compiled", _COMPILE_SECONDS)
        begins = self._until(never if self._link is None else partial(is_done, self._link.begin()), is_stopping)
        if begins and self._link is not None:
            write_incarnation(self._workdir, self._incarnation)
        return begins

    def evaluate(self, programs: Programs, validation: Validation, params: PyTree) -> dict[str, Any]:
        """Return the island's own perplexity: it has no other replica to merge with."""
        return {**self.labels, **evaluate_alone(programs, params, validation)}

    def observe(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        if self._link is not None:
            self._link.record({name: float(values[name]) for name in _SHOWN if name in values})

    def close(self) -> None:
        if self._link is not None:
            self._link.close()

    def _until(self, is_known: Callable[[float], bool], is_stopping: Callable[[], bool]) -> bool:
        """Wait, in all processes of the island, for what the first one knows; return False if told to stop."""
        while not self._processes.broadcast(lambda: is_known(0.2)):
            if is_stopping():
                return False
        return True


def never(seconds: float) -> bool:
    """Stand, in the other processes of an island, for what the first one waits for."""
    return False


def _placed(programs: Programs, caught_up: CaughtUp) -> TrainState:
    """Return a state on the island's devices from a peer's weights, which the first process has."""
    round, step, leaves = caught_up
    weights = jax.tree.map(_of_one_replica, programs.state.params)
    likes, structure = jax.tree.flatten(weights)
    given = [None if (x := leaves.get(n)) is None else x[0] for n in range(len(likes))]
    state = programs.from_params(structure.unflatten(from_first_process(given, likes)))
    assert state.outer is not None
    inner, outer = at_step(state.inner, step + 1), at_num_outer_steps(state.outer, round + 1)
    return state._replace(inner=inner, outer=outer)


def _of_one_replica(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return shape, dtype and sharding of an array without its axis of replicas, of which there is one."""
    assert isinstance(x.sharding, NamedSharding)
    sharding = NamedSharding(x.sharding.mesh, P(*x.sharding.spec[1:]))
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=sharding)
