"""Phases of a training run, in their order: check, open, compile, resume, loop, finish.

`train.run` and `islands.run` call them, the one for all replicas in one program, the other for an island of one.
"""

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console

from noloco_jax.checkpoint import elastic
from noloco_jax.checkpoint.record import Totals, copy_inputs
from noloco_jax.checkpoint.saved import Saved
from noloco_jax.checkpoint.store import Checkpointer
from noloco_jax.cluster.host import find_devices
from noloco_jax.cluster.processes import Processes, run_processes
from noloco_jax.cluster.stop import Stop
from noloco_jax.cluster.workdir_lock import workdir_locked
from noloco_jax.config import TrainConfig, save_config, to_dict
from noloco_jax.data import ReplicaStreams, RunData, Tokenizer
from noloco_jax.errors import TransientError, UserError, log_if_slow
from noloco_jax.files import check_writable, no_room_message
from noloco_jax.formatting import format_memory
from noloco_jax.metrics.console import Progress, banner, make_console
from noloco_jax.metrics.curves import plot_curves
from noloco_jax.metrics.evaluate import Validation
from noloco_jax.metrics.finite import is_finite
from noloco_jax.metrics.memory import check_memory, checkpoint_bytes, compiled_peak, memory_estimate, program_memory
from noloco_jax.metrics.peaks import peak_of
from noloco_jax.metrics.writer import MetricWriter, check_wandb
from noloco_jax.model.architecture import Params
from noloco_jax.optim import prng
from noloco_jax.spmd.background import training_devices
from noloco_jax.spmd.batches import GlobalBatches
from noloco_jax.spmd.compile import FIRST_WEIGHTS, compile_programs, keep_programs
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.programs import Programs, TrainState, build_programs
from noloco_jax.train.bytes_sent import BytesSent
from noloco_jax.train.context import Outcome, RunContext
from noloco_jax.train.inputs import check_inputs, given_weights, open_inputs
from noloco_jax.train.loop import train_steps
from noloco_jax.train.sample import sample_of_run
from noloco_jax.train.sync import Sync


@dataclass(frozen=True)
class RunFlags:
    """Flags of a start of a run, of `train` and `island train` alike.

    Attributes:
      from_step: the checkpoint to go back to, see `Checkpointer.start`; None: the newest.
      dry_run: check everything, including the files of the checkpoint to resume from, and stop before anything is
        compiled or written.
      force_unlock: take the lock of a trainer on another machine.
      wandb_project: W&B project to log to as well.
    """

    from_step: int | None = None
    dry_run: bool = False
    force_unlock: bool = False
    wandb_project: str | None = None


@dataclass(frozen=True)
class Labels:
    """Names of a run among others.

    Attributes:
      in_metrics: labels beside the configuration.
      in_wandb: name and group of its run; empty: W&B finds a name.
    """

    in_metrics: Mapping[str, Any]
    in_wandb: Mapping[str, str]


class Setup(NamedTuple):
    """A run whose configuration, data and memory are checked; nothing is opened, compiled or written yet.

    Attributes:
      run_config: configuration of the whole run.
      config: that of this process's programs.
      workdir: its folder.
      flags: of this start.
      processes: processes that train together.
      console: silent on all of them but the first.
      data, tokenizer: of the run; the latter None if it needs none.
      programs: to be compiled at their first call.
      memory: see `memory_estimate`.
    """

    run_config: TrainConfig
    config: TrainConfig
    workdir: Path
    flags: RunFlags
    processes: Processes
    console: Console
    data: RunData
    tokenizer: Tokenizer | None
    programs: Programs
    memory: tuple[int, int]


class Opened(NamedTuple):
    """Open resources of a run.

    Attributes:
      stop: request to stop the run.
      checkpoints: storage of its state.
      saved: the checkpoint to resume from; None: a new run.
      step: inner steps in it.
      totals: totals of the run's earlier starts.
    """

    stop: Stop
    checkpoints: Checkpointer
    saved: Saved | None
    step: int
    totals: Totals


def check_run(
    run_config: TrainConfig, config: TrainConfig, workdir: Path, flags: RunFlags, processes: Processes | None = None
) -> Setup:
    """Raise `UserError` for what would fail later: folders, devices, configuration, the data's form.

    Args:
      run_config, config, workdir, flags: see `Setup`.
      processes: processes that train together; None: all processes of JAX.
    """
    devices = find_devices()  # first: whatever else asks JAX ends the process where a variable is wrong
    processes, console = processes or run_processes(), make_console()
    console.quiet = jax.process_index() > 0
    for folder in (workdir, workdir / "checkpoints"):
        check_writable(folder)
    if flags.wandb_project:
        check_wandb()
    data, tokenizer = check_inputs(run_config, console)
    devices = training_devices(config.delay, config.mesh, devices)
    programs = build_programs(config, make_mesh(config.mesh, config.num_replicas, devices, config.delay))
    stages, offload = config.mesh.stage, config.outer.offload
    memory = memory_estimate(programs, config.model, config.num_microbatches, stages, offload)
    check_memory(sum(memory))
    return Setup(run_config, config, workdir, flags, processes, console, data, tokenizer, programs, memory)


@contextlib.contextmanager
def open_run(setup: Setup) -> Iterator[Opened]:
    """Hold the lock of the workdir, the handlers of signals and the checkpoints for as long as the body runs."""
    workdir, flags, processes = setup.workdir, setup.flags, setup.processes
    with (
        contextlib.nullcontext() if flags.dry_run else workdir_locked(workdir, processes, force=flags.force_unlock),
        Stop(processes) as stop,
        Checkpointer(
            workdir, setup.run_config, processes, from_step=flags.from_step, read_only=flags.dry_run
        ) as checkpoints,
    ):
        saved = checkpoints.start()
        stop.is_due()  # from here on a SIGTERM to one of several processes stops all
        start = (0, Totals()) if saved is None else (saved.step, saved.totals)
        yield Opened(stop, checkpoints, saved, *start)


def is_complete(setup: Setup, saved: Saved | None) -> bool:
    """Return True where nothing is left to train, and print how to continue; see `check_end`."""
    if saved is None:
        return False
    check_end(setup.config.num_steps, saved)
    if saved.step < setup.config.num_steps or setup.flags.dry_run:
        return False
    late = "; ".join(str(change) for change in saved.changes if change.field != "num_steps")
    setup.console.print(
        f"the run is complete ({saved.step} steps): give a larger --config.num_steps to continue it, or another "
        "--workdir to start a new run" + (f"; without effect: {late}" if late else "")
    )
    return True


def check_end(num_steps: int, saved: Saved) -> None:
    """Raise `UserError` where a run that was to be longer would end at or before its checkpoint.

    Nothing would be left to take, and so no last evaluation and no final merge.
    """
    start, wanted = saved.step, saved.config.num_steps
    if num_steps <= start < wanted:
        raise UserError(
            f"the run stopped at step {start} of {wanted}, and num_steps={num_steps} leaves no step to take: give "
            f"num_steps={start + 1} or more, or go back by --from_step"
        )


def check_room(setup: Setup) -> None:
    """Raise `TransientError` where a checkpoint does not fit on the disk; a dry run may be for another machine."""
    message = setup.processes.broadcast(lambda: no_room_message(setup.workdir, checkpoint_bytes(setup.programs)))
    if message and not setup.flags.dry_run:
        raise TransientError(message)
    if message and jax.process_index() == 0:
        warnings.warn(message, stacklevel=2)


def open_data(
    setup: Setup,
    saved: Saved | None,
    positions: Sequence[dict[str, Any]],
    numbers: tuple[int, int],
    rows: Sequence[tuple[str, object]],
) -> tuple[Validation, ReplicaStreams, Params | None]:
    """Print the banner; open the data at the checkpoint's position, and compare the checkpoint with its digests.

    Args:
      setup: the run.
      saved: the checkpoint to resume from.
      positions: the position in the data of each replica here, of that checkpoint.
      numbers: the number of the first replica here among those that share the data, and how many share them.
      rows: of the banner.

    Returns:
      The validation batches, the replicas' streams, and the weights of `init_from` where a new run begins with them.
    """
    config, console = setup.config, setup.console
    banner(rows, console)
    validation, streams = open_inputs(config, setup.data, setup.tokenizer, setup.programs, numbers, console)
    if saved is None:
        return validation, streams, given_weights(config, setup.tokenizer)
    streams.set_state(dict(enumerate(positions)))
    with log_if_slow(f"comparing the checkpoint of step {saved.step} with its digests", console.print):
        line = saved.verify()
    if setup.flags.dry_run:
        console.print(line)
    return validation, streams, None


def compile_run(setup: Setup, stop: Stop, needed: Sequence[str], *, draws_weights: bool) -> Programs | None:
    """Compile the programs that a run needs; return None if it was told to stop meanwhile."""
    keep_programs()
    stop.current = "the compilation"
    started = time.perf_counter()
    with log_if_slow("still compiling", setup.console.print):
        only = [*needed, FIRST_WEIGHTS] if draws_weights else needed
        programs = compile_programs(setup.programs, offload=setup.config.outer.offload, only=only)
    memory = format_memory(compiled_peak(program_memory(programs)))
    setup.console.print(f"compiled in {time.perf_counter() - started:.1f} s, for {memory} of memory a device")
    return None if stop.is_due() else programs


def first_state(setup: Setup, opened: Opened, programs: Programs, given: Params | None) -> TrainState:
    """Return the checkpoint's state; of a new run, one of the given weights or, without them, of drawn ones."""
    if opened.saved is not None:
        return _restored(setup, opened.saved, opened.checkpoints, programs)
    return programs.init(prng.key(setup.config.seed)) if given is None else programs.from_params(given)


def _restored(setup: Setup, saved: Saved, checkpoints: Checkpointer, programs: Programs) -> TrainState:
    """Restore the state of a checkpoint; print the differences from the run that saved it."""
    config, from_step, report = setup.config, setup.flags.from_step, setup.console.print
    state, resized = elastic.restore(saved, config.model, programs, config.elastic)
    if not is_finite(state):
        raise UserError(
            f"the checkpoint of step {saved.step} has values that are not finite: give --from_step of one before it, "
            "or start anew in an empty --workdir"
        )
    since = "" if from_step in (None, saved.step) else f", saved since the run went back to step {from_step}"
    report(f"resuming from the checkpoint of step {saved.step}{since}" + (f"; {resized}" if resized else ""))
    for line in [*map(str, saved.changes), *saved.version_changes]:
        report(line)
    if set_aside := checkpoints.set_aside_after(saved.step):
        report(f"checkpoints of later steps: {set_aside} moved to checkpoints_set_aside")
    return state


def before_training(setup: Setup, stop: Stop) -> int:
    """Say that the run was told to stop before its first step; return the exit status."""
    setup.console.print(f"{stop.reason} before training: the same command starts again")
    return stop.exit_status


def train_to_end(
    setup: Setup,
    opened: Opened,
    programs: Programs,
    sync: Sync,
    state: TrainState,
    streams: ReplicaStreams,
    evaluate: Callable[[Any], dict[str, Any]],
    bytes_sent: BytesSent,
    labels: Labels | None = None,
    observe: Callable[[int, str, Mapping[str, Any]], None] = lambda step, kind, values: None,
) -> Outcome:
    """Take the inner steps from the state to the run's end, or until it is told to stop.

    Args:
      setup, opened: the run.
      programs: compiled.
      sync: its exchanges.
      state: after `opened.step` inner steps.
      streams: training data of this process's replicas.
      evaluate: fast weights -> the figures of an evaluation.
      bytes_sent: bytes that replicas send each other.
      labels: the run's names.
      observe: receives the step, kind and figures of every metrics line, as plain values.
    """
    config, console, labels = setup.config, setup.console, labels or Labels({}, {})
    is_first = jax.process_index() == 0
    if is_first:
        whole = setup.run_config
        copy_inputs(whole.data.tokenizer, whole.init_from if opened.saved is None else None, setup.workdir)
        save_config(whole, setup.workdir)
    with (
        MetricWriter(
            setup.workdir,
            resume_step=None if opened.saved is None else opened.step,
            wandb_project=setup.flags.wandb_project,
            wandb_labels=labels.in_wandb,
            run_config={**to_dict(config), **labels.in_metrics},
            writes=is_first,
            observe=observe,
        ) as metrics,
        Progress(config.num_steps, start_step=opened.step, log_every=config.log_every, console=console) as progress,
    ):
        setup.processes.barrier("start")  # so that all clocks start together
        run = RunContext(
            config=config,
            programs=programs,
            batches=GlobalBatches(streams, programs),
            evaluate=evaluate,
            checkpoints=opened.checkpoints,
            totals=opened.totals,
            bytes_sent=bytes_sent,
            peak_flops_per_second=_peak(config, programs),
            metrics=metrics,
            progress=progress,
            stop=opened.stop,
            sync=sync,
        )
        outcome = train_steps(run, state, opened.step)
    sync.close(outcome.state, outcome.finished)
    return outcome


def finish(setup: Setup, stop: Stop, sync: Sync, programs: Programs, outcome: Outcome) -> int:
    """Write a sample and the curves of a finished run, or why it stopped; return the exit status."""
    console = setup.console
    if not outcome.finished and sync.end_reason is not None:
        console.print(f"{sync.end_reason}: everything is saved at step {outcome.step}, nothing is left to do here")
        return 0
    if not outcome.finished:
        console.print(f"{stop.reason}: everything is saved at step {outcome.step}, the same command resumes from there")
        return stop.exit_status
    with log_if_slow("writing the sample: its programs compile first", console.print):
        sample = sample_of_run(setup.config, setup.tokenizer, programs, outcome.state.params)
    if jax.process_index() == 0:
        if sample is not None:
            console.print("the model writes:", style="bold")
            console.print(sample)
        console.print(f"curves: {plot_curves(setup.workdir)}")
    return 0


def _peak(config: TrainConfig, programs: Programs) -> float | None:
    """Return the peak FLOP/s of all devices together; None if it is unknown."""
    peak = peak_of(programs.mesh.devices.flat[0].device_kind, config.model.dtype)
    return peak and peak.flops_per_second * programs.mesh.size
