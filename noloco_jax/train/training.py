"""Training run, from the first check to the last picture."""

import contextlib
import time
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console

from noloco_jax import draws
from noloco_jax.checkpoint.record import write_start
from noloco_jax.checkpoint.saved import Saved
from noloco_jax.checkpoint.store import Checkpointer
from noloco_jax.checkpoint.totals import Totals
from noloco_jax.cluster.host import find_devices, use_cpu_cores, use_gpu_memory
from noloco_jax.cluster.place import Place
from noloco_jax.cluster.processes import Processes, run_processes
from noloco_jax.cluster.start import joined
from noloco_jax.cluster.stop import Stop
from noloco_jax.cluster.workdir_lock import workdir_locked
from noloco_jax.config import TrainConfig, to_dict
from noloco_jax.data import ReplicaStreams, RunData, Tokenizer
from noloco_jax.errors import TransientError, told_if_slow
from noloco_jax.files import check_writable, full_disk_told, without_room
from noloco_jax.formatting import format_memory
from noloco_jax.metrics.console import Progress, banner, make_console
from noloco_jax.metrics.curves import plot_curves
from noloco_jax.metrics.evaluate import Validation
from noloco_jax.metrics.memory import check_memory, checkpoint_bytes, compiled_peak, program_memory
from noloco_jax.metrics.peaks import peak_of
from noloco_jax.metrics.writer import MetricWriter, check_wandb
from noloco_jax.model.kind import Params
from noloco_jax.spmd.background import training_devices
from noloco_jax.spmd.batches import GlobalBatches
from noloco_jax.spmd.compile import FIRST_WEIGHTS, PROGRAMS, compile_programs, keep_programs
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.programs import Programs, TrainState, build_programs
from noloco_jax.train.banner import banner_rows
from noloco_jax.train.inputs import check_inputs, given_weights, open_data
from noloco_jax.train.loop import train_steps
from noloco_jax.train.messages import Messages
from noloco_jax.train.mode import Mode, Resumed, WholeRun
from noloco_jax.train.parts import Outcome, Run
from noloco_jax.train.resume import check_end, completion, restored_state
from noloco_jax.train.sample import sample_of_run
from noloco_jax.train.sync import Sync


def train_at(place: Place | None, config: TrainConfig, workdir: Path, *, start_timeout: float, **choices: Any) -> int:
    """Train as the process at `place`; return the exit status.

    Args:
      place: place among the processes of the run; None: the only process.
      config: the run.
      workdir: its folder.
      start_timeout: seconds that the processes wait for one another at the start.
      **choices: passed to `train`.
    """
    use_gpu_memory()
    with joined(place, to_dict(config), start_timeout) as num_processes:
        use_cpu_cores(config, num_processes)
        with full_disk_told(workdir):
            return train(config, workdir, **choices)


def train(
    run_config: TrainConfig,
    workdir: Path,
    *,
    from_step: int | None = None,
    dry_run: bool = False,
    force_unlock: bool = False,
    wandb_project: str | None = None,
    processes: Processes | None = None,
    mode: Mode | None = None,
) -> int:
    """Train until `num_steps`, resuming from the workdir's newest checkpoint if it has one; return the exit status.

    Every process of a run calls this. The first one prints, draws and writes the metrics, with its own losses.

    Args:
      run_config: the run.
      workdir: its folder, the same one for all processes.
      from_step: the checkpoint to go back to, see `Checkpointer.start`; None: the newest.
      dry_run: check everything, including the files of the checkpoint to resume from, and stop before anything is
        compiled or written.
      force_unlock: take the lock of a trainer on another machine.
      wandb_project: W&B project to log to as well.
      processes: processes that train together; None: all processes of JAX.
      mode: mode of this process; None: `WholeRun`.

    Raises:
      UserError: if the configuration does not fit the devices, the data or what the workdir holds.
    """
    setup = _check(run_config, workdir, wandb_project, processes, mode or WholeRun())
    config, console = setup.config, setup.console
    with (
        contextlib.nullcontext() if dry_run else workdir_locked(workdir, setup.processes, force=force_unlock),
        Stop(setup.processes) as stop,
        Checkpointer(workdir, run_config, setup.processes, from_step=from_step, read_only=dry_run) as checkpoints,
        contextlib.closing(setup.mode),
    ):
        saved = checkpoints.start()
        stop.is_due()  # from here on a SIGTERM to one of several processes stops all
        if saved is not None:
            check_end(config, saved)
            if saved.step >= config.num_steps and not dry_run:
                console.print(completion(saved))
                return 0
        _check_room(setup, only_warn=dry_run)
        validation, streams = _open_data(setup, saved, print_digests=dry_run)
        given = given_weights(config, setup.tokenizer) if saved is None else None
        if dry_run:
            return 0
        started = _start(setup, saved, given, from_step, streams, checkpoints, stop)
        if started is None:
            console.print(f"{stop.reason} before training: the same command starts again")
            return stop.exit_status
        programs, sync, state = started
        del given, started  # their memory
        if jax.process_index() == 0:
            write_start(run_config, workdir, is_new=saved is None)
        start, totals = (0, Totals()) if saved is None else (saved.step, saved.totals)
        with (
            _open_metrics(workdir, saved and start, wandb_project, setup.mode, to_dict(config)) as metrics,
            Progress(config.num_steps, start_step=start, log_every=config.log_every, console=console) as progress,
        ):
            setup.processes.barrier("start")  # so that all clocks start together
            run = Run(
                config=config,
                programs=programs,
                batches=GlobalBatches(streams, programs),
                evaluate=partial(setup.mode.evaluate, programs, validation),
                checkpoints=checkpoints,
                totals=totals,
                messages=setup.messages,
                peak_flops_per_second=_peak(config, programs),
                metrics=metrics,
                progress=progress,
                stop=stop,
                sync=sync,
            )
            outcome = train_steps(run, state, start)
        sync.close(outcome.state, outcome.finished)

    streams.close()  # after a failure the streams close when the process ends
    if not outcome.finished:
        return _stopped(outcome, stop, sync, console)
    _write_sample_and_curves(setup, programs, outcome.state)
    return 0


class _Setup(NamedTuple):
    """A run whose configuration, data and memory are checked; nothing is opened, compiled or written yet."""

    run_config: TrainConfig
    config: TrainConfig  # of this process's programs
    workdir: Path
    processes: Processes
    mode: Mode
    console: Console  # silent on all processes but the first
    data: RunData
    tokenizer: Tokenizer | None
    programs: Programs
    messages: Messages


def _check(
    run_config: TrainConfig, workdir: Path, wandb_project: str | None, processes: Processes | None, mode: Mode
) -> _Setup:
    """Raise `UserError` for what would fail later: folders, devices, configuration, the data's form."""
    devices = find_devices()  # first: whatever else asks JAX ends the process where a variable is wrong
    processes, console = processes or run_processes(), make_console()
    console.quiet = jax.process_index() > 0
    for folder in (workdir, workdir / "checkpoints"):
        check_writable(folder)
    if wandb_project:
        check_wandb()
    mode.check(run_config)
    data, tokenizer = check_inputs(run_config, console)
    config = mode.own(run_config)
    programs = build_programs(config, make_mesh(config, training_devices(config, devices)))
    messages = mode.prepare(config, programs)
    check_memory(config, programs)
    return _Setup(run_config, config, workdir, processes, mode, console, data, tokenizer, programs, messages)


def _check_room(setup: _Setup, *, only_warn: bool) -> None:
    """Raise `TransientError` where a checkpoint does not fit on the disk; a dry run may be for another machine."""
    message = setup.processes.broadcast(lambda: without_room(setup.workdir, checkpoint_bytes(setup.programs)))
    if message and not only_warn:
        raise TransientError(message)
    if message and jax.process_index() == 0:
        warnings.warn(message, stacklevel=2)


def _open_data(setup: _Setup, saved: Saved | None, *, print_digests: bool) -> tuple[Validation, ReplicaStreams]:
    """Print the banner; open the data at the checkpoint's position, and compare that with its digests."""
    config, mode, console = setup.config, setup.mode, setup.console
    positions = None if saved is None else mode.data_positions(config, saved)
    banner([*mode.rows, *banner_rows(config, setup.programs, setup.messages)], console)
    numbers = mode.replica_numbers(config)
    validation, streams = open_data(config, setup.data, setup.tokenizer, setup.programs, numbers, console)
    if saved is not None and positions is not None:
        streams.set_state(dict(enumerate(positions)))
        with told_if_slow(f"comparing the checkpoint of step {saved.step} with its digests", console.print):
            line = saved.verify()
        if print_digests:
            console.print(line)
    return validation, streams


def _start(
    setup: _Setup,
    saved: Saved | None,
    given: Params | None,
    from_step: int | None,
    streams: ReplicaStreams,
    checkpoints: Checkpointer,
    stop: Stop,
) -> tuple[Programs, Sync, TrainState] | None:
    """Meet the peers, compile, and make or restore the state; return None if the run was told to stop meanwhile.

    A new run has no `saved`, and begins with the weights `given` or, without, with drawn ones.
    """
    config, mode, console = setup.config, setup.mode, setup.console
    step, seconds = (0, 0.0) if saved is None else (saved.step, saved.totals.seconds)
    resumed = Resumed(step, saved and saved.sync_state)
    fingerprint = None if setup.tokenizer is None else setup.tokenizer.fingerprint
    if not mode.connect(setup.run_config, setup.workdir, resumed, stop.is_due, console.print, fingerprint):
        return None
    streams.start()  # the first batches are made during compilation
    stop.current = "the compilation"
    programs = _compile(config, setup.programs, mode, console, draws_weights=saved is None and given is None)
    if stop.is_due():
        return None
    sync = mode.sync(config, programs)
    if saved is not None:
        state = restored_state(config, programs, checkpoints, saved, from_step, console)
    elif given is not None:
        state = programs.from_params(given)
    else:
        state = programs.init(draws.key(config.seed))
    return (programs, sync, state) if mode.begin(stop.is_due, step, seconds) else None


def _compile(config: TrainConfig, programs: Programs, mode: Mode, console: Console, *, draws_weights: bool) -> Programs:
    keep_programs()
    started = time.perf_counter()
    needed = [name for name in PROGRAMS if name not in mode.unused]
    with told_if_slow("still compiling", console.print):
        programs = compile_programs(config, programs, only=[*needed, FIRST_WEIGHTS] if draws_weights else needed)
    memory = format_memory(compiled_peak(program_memory(programs)))
    console.print(f"compiled in {time.perf_counter() - started:.1f} s, for {memory} of memory a device")
    return programs


def _peak(config: TrainConfig, programs: Programs) -> float | None:
    """Return the peak FLOP/s of all devices together; None if it is unknown."""
    peak = peak_of(programs.mesh.devices.flat[0].device_kind, config.model.dtype)
    return peak and peak.flops_per_second * programs.mesh.size


def _open_metrics(
    workdir: Path, resume_step: int | None, wandb_project: str | None, mode: Mode, config: Mapping[str, Any]
) -> MetricWriter:
    """Open the writer of the run's metrics."""
    return MetricWriter(
        workdir,
        resume_step=resume_step,
        wandb_project=wandb_project,
        wandb_labels=mode.tracked_as,
        run_config={**config, **mode.labels},
        writes=jax.process_index() == 0,
        observe=mode.observe,
    )


def _write_sample_and_curves(setup: _Setup, programs: Programs, state: TrainState) -> None:
    console = setup.console
    with told_if_slow("writing the sample: its programs compile first", console.print):
        sample = sample_of_run(setup.config, setup.tokenizer, programs, state.params)
    if jax.process_index() == 0:
        if sample is not None:
            console.print("the model writes:", style="bold")
            console.print(sample)
        console.print(f"curves: {plot_curves(setup.workdir)}")


def _stopped(outcome: Outcome, stop: Stop, sync: Sync, console: Console) -> int:
    """Print why the run has stopped before its last step; return the exit status."""
    if sync.end_reason is not None:
        console.print(f"{sync.end_reason}: everything is saved at step {outcome.step}, nothing is left to do here")
        return 0
    console.print(f"{stop.reason}: everything is saved at step {outcome.step}, the same command resumes from there")
    return stop.exit_status
