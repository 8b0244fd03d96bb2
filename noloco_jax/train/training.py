"""Training run, from the first check to the last picture."""

import contextlib
import time
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from noloco_jax import draws
from noloco_jax.checkpoint import elastic
from noloco_jax.checkpoint.record import HISTORY_FILE, write_start
from noloco_jax.checkpoint.store import Checkpointer
from noloco_jax.checkpoint.totals import Totals
from noloco_jax.cluster.host import use_cpu_cores, use_gpu_memory
from noloco_jax.cluster.place import Place
from noloco_jax.cluster.processes import Processes, run_processes
from noloco_jax.cluster.start import joined
from noloco_jax.cluster.stop import Stop
from noloco_jax.cluster.workdir_lock import holder_of, workdir_locked
from noloco_jax.config import CONFIG_FILE, Change, TrainConfig, to_dict
from noloco_jax.data import (
    ByteTokenizer,
    ReplicaStreams,
    RunData,
    Tokenizer,
    check_vocabulary,
    load_tokenizer,
    makes_same_ids,
)
from noloco_jax.errors import UserError
from noloco_jax.files import check_file, check_writable, full_disk_told
from noloco_jax.methods import method_of
from noloco_jax.metrics.console import Progress, banner, make_console
from noloco_jax.metrics.divergence import is_finite
from noloco_jax.metrics.evaluate import read_validation
from noloco_jax.metrics.memory import check_memory
from noloco_jax.metrics.peaks import peak_of
from noloco_jax.metrics.writer import METRICS_FILE, TENSORBOARD_FOLDER, MetricWriter, check_wandb, read_metrics
from noloco_jax.model.huggingface import check_has_format, load_params
from noloco_jax.model.kind import Params, check_generates, check_kind
from noloco_jax.patience import told_if_slow
from noloco_jax.spmd.background import training_devices
from noloco_jax.spmd.batches import GlobalBatches
from noloco_jax.spmd.compile import FIRST_WEIGHTS, PROGRAMS, compile_programs, leave_out_cache, may_be_cached
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.programs import Programs, TrainState, build_programs
from noloco_jax.spmd.shared_batch import replicas_read_here
from noloco_jax.storage.addresses import is_remote, list_folder, local_folder
from noloco_jax.train.banner import banner_rows, compiled_memory, show_results
from noloco_jax.train.loop import Run, is_evaluated, train_steps
from noloco_jax.train.mode import Mode, Resumed, WholeRun
from noloco_jax.train.sample import sample_of_run, sample_prompt


def train_at(
    place: Place | None,
    config: TrainConfig,
    workdir: Path,
    *,
    start_timeout: float,
    **choices: Any,
) -> int:
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
    config: TrainConfig,
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
      config: the run.
      workdir: its folder, the same one for all processes.
      from_step: the checkpoint to go back to, see `Checkpointer.start_step`; None: the newest.
      dry_run: check everything, including the files of the checkpoint to resume from, and stop before anything is
        compiled or written.
      force_unlock: take the lock of a trainer on another machine.
      wandb_project: W&B project to log to as well.
      processes: processes that train together; None: all processes of JAX.
      mode: mode of this process; None: `WholeRun`.

    Raises:
      UserError: if the configuration does not fit the devices, the data or what the workdir holds.
    """
    processes = processes or run_processes()
    console = _console_of_first_process()
    for folder in (workdir, workdir / "checkpoints", workdir / TENSORBOARD_FOLDER):
        check_writable(folder)
    for name in (CONFIG_FILE, HISTORY_FILE, METRICS_FILE):
        check_file(workdir / name)
    if wandb_project:
        check_wandb()
    mode = mode or WholeRun()
    mode.check(config)
    with told_if_slow("looking at the data's files, their forms and the tokenizer", console.print):
        data, tokenizer = _check_inputs(config)
    whole, config = config, mode.own(config)
    programs = build_programs(config, make_mesh(config, training_devices(config, jax.devices())))
    messages = mode.prepare(config, programs)
    banner([*mode.rows, *banner_rows(config, programs, messages)], console)
    check_memory(config, programs)
    if not may_be_cached(programs.mesh) and leave_out_cache():
        console.print(
            "JAX's compilation cache is left out, as XLA loads programs of several CPU devices wrongly from it"
        )
    if dry_run and (holder := holder_of(workdir)) is not None:
        console.print(
            f"{workdir} is locked by {holder}: wait for its end, or give --force_unlock once you know that it has ended"
        )
    with (
        contextlib.nullcontext() if dry_run else workdir_locked(workdir, processes, force=force_unlock),
        Stop(processes) as stop,
        Checkpointer(workdir, whole, processes, from_step=from_step, read_only=dry_run) as checkpoints,
        contextlib.ExitStack() as others,
    ):
        start = _find_start(config, mode, checkpoints, stop)
        if start is not None:
            _check_end(config, checkpoints.saved_config(start), start)
        evaluate_first = start is not None and _lacks_evaluation(config, workdir, start, processes)
        if start is not None and start >= config.num_steps and not evaluate_first and not dry_run:
            _show_complete(console, workdir, start, checkpoints.changes(start))
            return 0
        with told_if_slow("reading the validation documents and opening those to train on", console.print):
            validation = read_validation(data, tokenizer, config.eval_batches)
            streams = _open_streams(config, data, tokenizer, programs, mode)
        changed: list[Change] = []
        if start is not None:
            streams.set_state(dict(enumerate(mode.data_positions(config, checkpoints, start))))
            changed = checkpoints.changes(start)
            with told_if_slow(f"comparing the checkpoint of step {start} with its digests", console.print):
                line = checkpoints.verify(start)
            console.print(line)
        given = _given_weights(config, tokenizer) if config.init_from and start is None else None
        if dry_run:
            return 0

        others.callback(mode.close)
        resumed = Resumed(0, None) if start is None else Resumed(start, checkpoints.beside(start))
        fingerprint = None if tokenizer is None else tokenizer.fingerprint
        if not mode.connect(whole, workdir, resumed, stop.is_due, console.print, fingerprint):
            return _begins_again(console, stop)
        streams.start()  # the first batches are made during compilation
        is_new = start is None and given is None
        stop.current = "the compilation"
        programs = _compile(config, programs, console, unused=mode.unused, is_new=is_new)
        if stop.is_due():
            return _begins_again(console, stop)
        sync = mode.sync(config, programs)
        batches = GlobalBatches(streams, programs)
        if start is None:
            state, given = _make_state(config, programs, given), None  # frees the given parameters on the host
        else:
            with told_if_slow(f"reading the checkpoint of step {start}", console.print):
                state = _restore_state(config, programs, checkpoints, start, from_step, console)
        totals = Totals() if start is None else checkpoints.totals(start)
        if not mode.begin(stop.is_due, start or 0, totals.seconds):
            return _begins_again(console, stop)
        if jax.process_index() == 0:
            write_start(whole, workdir, start or 0, changed, streams.source)
        progress = Progress(config.num_steps, start_step=start or 0, log_every=config.log_every, console=console)
        with _open_metrics(config, workdir, start, wandb_project, mode) as metrics, progress:
            processes.barrier("start")  # so that all clocks start together
            run = Run(
                config=config,
                programs=programs,
                batches=batches,
                evaluate=partial(mode.evaluate, programs, validation),
                checkpoints=checkpoints,
                totals=totals,
                messages=messages,
                peak_flops_per_second=_peak(config, programs),
                metrics=metrics,
                progress=progress,
                stop=stop,
                sync=sync,
            )
            outcome = train_steps(run, state, start or 0, evaluate_first=evaluate_first)
        sync.close(outcome.state, outcome.finished)

    streams.close()  # after a failure the streams close when the process ends
    if not outcome.finished and sync.end_reason is not None:
        console.print(f"{sync.end_reason}: everything is saved at step {outcome.step}, nothing is left to do here")
        return 0
    if not outcome.finished:
        console.print(f"{stop.reason}: everything is saved at step {outcome.step}, the same command resumes from there")
        return stop.exit_status
    with told_if_slow("writing the sample: its programs compile first", console.print):
        sample = sample_of_run(config, tokenizer, programs, outcome.state.params)
    if jax.process_index() == 0:
        show_results(console, workdir, outcome.evaluation, sample)
    return 0


def _console_of_first_process() -> Console:
    """Make the console, which is silent on all processes but the first."""
    console = make_console()
    console.quiet = jax.process_index() > 0
    return console


def _check_inputs(config: TrainConfig) -> tuple[RunData, Tokenizer | None]:
    """Check model, data and tokenizer before anything expensive; return the run's data and tokenizer.

    The tokenizer is None if the data are token ids and no text sample is wanted.
    """
    check_kind(config.model, config.mesh.stage, config.data.document_mask)
    if config.sample_tokens:
        check_generates(config.model)
    if config.init_from:
        check_has_format(config.model)
        if is_remote(config.init_from):
            list_folder(config.init_from)
    data = RunData(config.data, seed=config.seed, vocab_size=config.model.vocab_size)
    data.check(config.num_replicas)
    if not data.needs_tokenizer and not config.sample_tokens:
        return data, None
    if config.data.tokenizer == ByteTokenizer.name and not data.needs_tokenizer:
        raise UserError(
            f"sample_tokens={config.sample_tokens} needs a tokenizer, and the data are token ids of a tokenizer that "
            "data.tokenizer='byte' does not name: name it, or set sample_tokens=0"
        )
    tokenizer = load_tokenizer(config.data.tokenizer)
    check_vocabulary(tokenizer, config.model.vocab_size)
    if config.sample_tokens:
        sample_prompt(config, tokenizer)
    return data, tokenizer


def _find_start(config: TrainConfig, mode: Mode, checkpoints: Checkpointer, stop: Stop) -> int | None:
    """Return the step of the checkpoint to resume from, after checking that it fits the run; None for a new run."""
    start = checkpoints.start_step()
    stop.is_due()  # from here on a SIGTERM stops the run after its next step
    if start is not None:
        mode.check_start(config, checkpoints, start)
    return start


def _check_end(config: TrainConfig, before: TrainConfig, start: int) -> None:
    """Raise `UserError` where a run that was to be longer would end at or before its checkpoint without its last step.

    Args:
      config: the run.
      before: the run as the checkpoint has it.
      start: the checkpoint's step.
    """
    if before.num_steps <= start or config.num_steps > start:
        return
    stopped = f"the run stopped at step {start} of {before.num_steps}"
    if config.num_steps < start:
        raise UserError(
            f"{stopped}, which is beyond num_steps={config.num_steps}: give num_steps={start} to end it there, or go "
            "back by --from_step"
        )
    if config.outer.final_merge and method_of(config).has_outer_steps:
        raise UserError(
            f"{stopped}, and num_steps={start} leaves no step after which outer.final_merge merges the replicas: give "
            f"num_steps={start + 1} or more, or leave it out and export their mean"
        )


def _lacks_evaluation(config: TrainConfig, workdir: Path, start: int, processes: Processes) -> bool:
    """Return True if the run stopped after step `start` without evaluating it; the first process decides for all."""
    lacks = is_evaluated(config, start)
    if lacks and jax.process_index() == 0 and (workdir / METRICS_FILE).exists():
        lacks = not any(line["kind"] == "eval" and line["step"] == start for line in read_metrics(workdir))
    return processes.gather(lacks)[0]


def _show_complete(console: Console, workdir: Path, steps: int, changed: Sequence[Change]) -> None:
    """Print that the workdir's run is complete, its results, settings given too late for it, and how to continue."""
    if jax.process_index() > 0:
        return
    evaluations = [line for line in read_metrics(workdir) if line["kind"] == "eval"]
    if evaluations:  # num_steps may have been lowered to a step before the first evaluation
        show_results(console, workdir, evaluations[-1], sample=None)
    late = "; ".join(str(change) for change in changed if change.field != "num_steps")
    if late:
        console.print(f"without effect on a run that has ended: {late}")
    console.print(
        f"the run is complete ({steps} steps): give a larger --config.num_steps to continue it, or another --workdir "
        "to start a new run"
    )


def _begins_again(console: Console, stop: Stop) -> int:
    """Print that the run was told to stop before its first step; return the exit status."""
    console.print(f"{stop.reason} before training: the same command starts again")
    return stop.exit_status


def _open_streams(
    config: TrainConfig, data: RunData, tokenizer: Tokenizer | None, programs: Programs, mode: Mode
) -> ReplicaStreams:
    """Open the training data of the replicas that this process reads."""
    first, count = mode.replica_numbers(config)
    read_here = replicas_read_here(programs.mesh, config.num_replicas)
    return data.streams(tokenizer, {replica: first + replica for replica in read_here}, count)


def _compile(
    config: TrainConfig, programs: Programs, console: Console, *, unused: Collection[str], is_new: bool
) -> Programs:
    started = time.perf_counter()
    needed = [name for name in PROGRAMS if name not in unused]
    with told_if_slow("compiling: large models take minutes", console.print):
        programs = compile_programs(config, programs, only=[*needed, FIRST_WEIGHTS] if is_new else needed)
    console.print(f"compiled in {time.perf_counter() - started:.1f} s; {compiled_memory(programs)}")
    return programs


def _peak(config: TrainConfig, programs: Programs) -> float | None:
    """Return the peak FLOP/s of all devices together; None if it is unknown."""
    peak = peak_of(programs.mesh.devices.flat[0].device_kind, config.model.dtype)
    return peak and peak.flops_per_second * programs.mesh.size


def _given_weights(config: TrainConfig, tokenizer: Tokenizer | None) -> Params:
    """Return the weights of `init_from`, whose folder must not hold a tokenizer of other token ids than the run's."""
    with local_folder(config.init_from, (".json", ".safetensors")) as folder:
        beside = load_tokenizer(str(folder.absolute())) if tokenizer and (folder / "tokenizer.json").exists() else None
        if tokenizer and beside and not makes_same_ids(tokenizer, beside):
            raise UserError(
                f"data.tokenizer={config.data.tokenizer!r} makes other token ids than the tokenizer that lies in "
                f"init_from={config.init_from!r}: give --config.data.tokenizer={config.init_from}, or move "
                "tokenizer.json away from the weights to train them on other ids"
            )
        return load_params(folder, config.model)


def _make_state(config: TrainConfig, programs: Programs, given: Params | None) -> TrainState:
    """Make the state of a new run, from given parameters or from random ones."""
    return programs.init(draws.key(config.seed)) if given is None else programs.from_params(given)


def _restore_state(
    config: TrainConfig,
    programs: Programs,
    checkpoints: Checkpointer,
    start: int,
    from_step: int | None,
    console: Console,
) -> TrainState:
    """Restore the state of a checkpoint; print the differences from the run that saved it."""
    state, resized = elastic.restore(checkpoints, start, config, programs)
    if not is_finite(state):
        raise UserError(
            f"the checkpoint of step {start} has values that are not finite: give --from_step of one before it, or "
            "start anew in an empty --workdir"
        )
    since = "" if from_step in (None, start) else f", saved since the run went back to step {from_step}"
    console.print(f"resuming from the checkpoint of step {start}{since}" + (f"; {resized}" if resized else ""))
    for line in [*map(str, checkpoints.changes(start)), *checkpoints.version_changes(start)]:
        console.print(line)
    set_aside = checkpoints.set_aside_after(start)
    if set_aside:
        console.print(f"checkpoints of later steps: {set_aside} moved to checkpoints_set_aside")
    return state


def _open_metrics(
    config: TrainConfig, workdir: Path, start: int | None, wandb_project: str | None, mode: Mode
) -> MetricWriter:
    """Open the writer of the run's metrics."""
    return MetricWriter(
        workdir,
        resume_step=start,
        wandb_project=wandb_project,
        wandb_labels=mode.tracked_as,
        run_config=to_dict(config) | dict(mode.labels),
        writes=jax.process_index() == 0,
        observe=mode.observe,
    )
