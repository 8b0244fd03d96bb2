"""Training run that is one island among several: all of it, in order."""

import argparse
import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from noloco_jax.cluster.host import use_cpu_cores, use_gpu_memory
from noloco_jax.cluster.process_rank import ProcessRank
from noloco_jax.cluster.processes import Processes
from noloco_jax.cluster.start import distributed_runtime
from noloco_jax.config import TrainConfig, to_dict
from noloco_jax.errors import TransientError, UserError, tell
from noloco_jax.files import full_disk_reported
from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.catch_up import CaughtUp
from noloco_jax.islands.final_merge import RunEnd
from noloco_jax.islands.keys import open_membership
from noloco_jax.islands.membership import Membership, incarnation_of, write_incarnation
from noloco_jax.islands.network import NetworkPlan, NetworkThread, is_done
from noloco_jax.islands.payload import StateCodec, codec_of, specs_of
from noloco_jax.islands.programs import LocalPrograms, at_rest, build_local, compile_local
from noloco_jax.islands.roster import parse_address
from noloco_jax.islands.steps import IslandSteps
from noloco_jax.islands.sync import IslandSync
from noloco_jax.metrics.evaluate import evaluate_alone
from noloco_jax.optim.methods import METHODS
from noloco_jax.optim.rule import at_num_outer_steps
from noloco_jax.optim.schedule import SyncSchedule
from noloco_jax.spmd.compile import num_at_once
from noloco_jax.spmd.first_process import from_first_process
from noloco_jax.spmd.inner import at_step
from noloco_jax.spmd.programs import Programs, TrainState
from noloco_jax.train import phases
from noloco_jax.train.banner import banner_rows
from noloco_jax.train.bytes_sent import BytesSent
from noloco_jax.train.phases import Labels, RunFlags

# An island has no other replica to merge or to compare with, and `LocalPrograms` has its outer steps.
NEEDED = ("share_batch", "inner_step", "evaluate")
_COMPILE_SECONDS = 3600.0  # by which the island's processes may differ in reading a checkpoint and compiling
_SHOWN = ("loss", "perplexity", "tokens_per_second")


def train_island(config: TrainConfig, rank: ProcessRank | None, flags: argparse.Namespace) -> int:
    """Train as the island that the flags of `island train` name; check everything before compiling.

    `rank` is that of this process among the island's; None: the only one.
    """
    roster, credentials = open_membership(flags.roster, flags.name, flags.keys, flags.workdir)
    if not 0 <= flags.linger < math.inf:
        raise UserError(f"--linger={flags.linger}: give seconds, 0 to leave at once")
    listen = None if flags.listen is None else parse_address(flags.listen)
    member = Membership(roster, flags.name, credentials, flags.pace, flags.linger, listen)
    member.check(config)
    use_gpu_memory()
    with (
        distributed_runtime(rank, to_dict(config), flags.start_timeout) as num_processes,
        full_disk_reported(flags.workdir),
    ):
        use_cpu_cores(member.own(config).mesh, 1, num_processes=num_processes)
        run_flags = RunFlags(flags.from_step, flags.dry_run, flags.force_unlock, flags.wandb)
        return train(config, member, flags.workdir, run_flags)


def train(run_config: TrainConfig, member: Membership, workdir: Path, flags: RunFlags) -> int:
    """Train one replica in its own program, which exchanges with other islands over the network.

    Of an island of several processes, the first one alone exchanges with the others, see `steps.py`. `run_config` is
    the run of all islands.
    """
    # Check.
    member.check(run_config)
    if line := member.warning(run_config):
        tell(line)
    config = member.own(run_config)
    setup = phases.check_run(run_config, config, workdir, flags)
    processes, report = setup.processes, setup.console.print
    local = build_local(config, setup.programs)
    messages = BytesSent(outer_step=sum(spec.nbytes for spec in specs_of(local.payload)))

    # Open.
    with phases.open_run(setup) as opened, contextlib.ExitStack() as stack:
        saved, stop = opened.saved, opened.stop
        if phases.is_complete(setup, saved):
            return 0
        phases.check_room(setup)
        positions = [] if saved is None else [member.data_position(saved)]
        rows = [("island", str(member)), *banner_rows(config, setup.programs, messages, setup.memory)]
        numbers = member.replica, member.roster.num_founders
        validation, streams, given = phases.open_data(setup, saved, positions, numbers, rows)
        if flags.dry_run:
            return 0

        # Join the others, before anything is compiled.
        plan = link = None
        if processes.is_first:
            fingerprint = None if setup.tokenizer is None else setup.tokenizer.fingerprint
            former = saved and saved.sync_state
            plan = link_plan(run_config, member, local, setup.programs, workdir, former, fingerprint)
            link = stack.enter_context(closing(NetworkThread(plan, report)))
        if not _until_done(processes, link and link.open(), stop.is_due):
            return phases.before_training(setup, stop)

        # Compile.
        streams.start()  # the first batches are made during compilation
        programs = phases.compile_run(setup, stop, NEEDED, draws_weights=saved is None and given is None)
        if programs is None:
            return phases.before_training(setup, stop)
        steps = island_steps(config, member, link, local, programs, processes)
        end = RunEnd(steps, member.name, member.linger, stop.is_due, report)
        sync = IslandSync(
            member.name,
            _schedule(config),
            steps,
            int(messages.outer_step),
            end,
            merges=config.outer.final_merge,
            log_every=config.log_every,
        )

        # Resume, and begin together with the others.
        state = phases.first_state(setup, opened, programs, given)
        del given  # its memory
        processes.wait_at("compiled", _COMPILE_SECONDS)
        if not _until_done(processes, link and link.begin(), stop.is_due):
            return phases.before_training(setup, stop)
        if plan is not None:
            write_incarnation(workdir, plan.incarnation)

        # Loop, and merge with the others.
        labels = labels_of(member)

        def evaluate(params: Any) -> dict[str, Any]:
            return {**labels.in_metrics, **evaluate_alone(programs, params, validation)}

        outcome = phases.train_to_end(
            setup, opened, programs, sync, state, streams, evaluate, messages, labels, observe_by(link)
        )

    # Finish.
    streams.close()  # after a failure the streams close when the process ends
    return phases.finish(setup, stop, sync, programs, outcome)


def link_plan(
    config: TrainConfig,
    member: Membership,
    local: LocalPrograms,
    programs: Programs,
    workdir: Path,
    saved: Mapping[str, Any] | None,
    tokenizer: str | None,
) -> NetworkPlan:
    """Return what an island's network needs to know; raise `UserError` if it is no member any more.

    `saved` is the protocol's state in its checkpoint, None in a new run; `tokenizer` the fingerprint of the run's.
    """
    pairing: Any = METHODS[config.method].pairing
    schedule = _schedule(config)
    member.check_present(-1 if saved is None else saved["round"])
    incarnation, began_before = incarnation_of(workdir)
    return NetworkPlan(
        name=member.name,
        roster=member.roster,
        credentials=member.credentials,
        identity=member.identity(config, programs, tokenizer),
        pairing=pairing(config.num_replicas, config.seed, config.outer),
        codec=codec_of(local.wire, local.message, local.payload, local.dims),
        state_codec=StateCodec(specs_of(programs.state), len(jax.tree.leaves(programs.state.params))),
        sync_every=config.outer.sync_every,
        num_fragments=config.outer.fragments,
        fits=partial(can_be_at, schedule, config.num_steps),
        workdir=workdir,
        incarnation=incarnation,
        num_rounds=schedule.total(config.num_steps),
        by_time=member.pace == "time",
        began_before=began_before,
        saved=saved,
        details=json.dumps({"config": to_dict(config), "tokenizer": tokenizer}, default=str),
        listen=member.listen,
    )


def island_steps(
    config: TrainConfig,
    member: Membership,
    link: NetworkThread | None,
    local: LocalPrograms,
    programs: Programs,
    processes: Processes,
) -> IslandSteps:
    """Compile the programs of an island's outer steps, and return these."""
    compiled = compile_local(local, programs.state.params, programs.state.outer, num_at_once(programs))
    schedule = _schedule(config)
    return IslandSteps(
        link,
        at_rest(compiled, programs),
        partial(_placed, programs),
        lambda step: schedule.sync_every * config.tokens_per_step,
        keeps_pace=member.pace == "time",
        processes=processes,
    )


def labels_of(member: Membership) -> Labels:
    """Return the names of an island's run."""
    return Labels({"island": member.name}, {"name": member.name, "group": member.roster.run})


def observe_by(link: NetworkThread | None) -> Callable[[int, str, Mapping[str, Any]], None]:
    """Return a function that shows figures of the metrics' lines to those who watch the island."""

    def observe(step: int, kind: str, values: Mapping[str, Any]) -> None:
        if link is not None:
            link.record({name: float(values[name]) for name in _SHOWN if name in values})

    return observe


def can_be_at(schedule: SyncSchedule, num_steps: int, round: int, step: int) -> bool:
    """Return whether the last round of a run can be this one after this inner step."""
    return 0 < step <= num_steps and round + 1 == schedule.total(step)


@contextlib.contextmanager
def closing(link: NetworkThread) -> Iterator[NetworkThread]:
    """Close an island's network after the body, and tell the others when the same command would fail again."""
    try:
        yield link
    except UserError as error:
        if not isinstance(error, TransientError):
            link.leave(pb.Status.GONE)
        raise
    finally:
        link.close()


def _schedule(config: TrainConfig) -> SyncSchedule:
    schedule = config.schedule
    assert schedule is not None  # as `Membership.check` has found
    return schedule


def _until_done(processes: Processes, future: "Future[None] | None", is_stopping: Callable[[], bool]) -> bool:
    """Wait, in all processes of the island, for what the first one waits for; return False if told to stop."""
    while not processes.broadcast(lambda: future is not None and is_done(future, 0.2)):
        if is_stopping():
            return False
    return True


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
