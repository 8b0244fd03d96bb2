"""Trains a Llama: `python -m noloco_jax.train --config=configs/quickstart.py --workdir=DIR`."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from noloco_jax.cluster.cpu import keep_freed_memory, use_cpu_cores
from noloco_jax.cluster.gpu import use_gpu_memory
from noloco_jax.cluster.join import define_flags, find_place, joined
from noloco_jax.cluster.stop import Stop
from noloco_jax.config.fields import TrainConfig, save_config, to_dict
from noloco_jax.config.flags import parse_args
from noloco_jax.data import (
    Tokenizer,
    check_data,
    check_vocabulary,
    load_tokenizer,
    needs_tokenizer,
    train_stream,
    validation_batches,
)
from noloco_jax.errors import UserError, main_with_errors
from noloco_jax.model.huggingface import load_params
from noloco_jax.outer.pairing import Round, groups_of_rounds
from noloco_jax.run import elastic
from noloco_jax.run.banner import banner_rows, bytes_sent, sample_prompt, sample_text, show_results
from noloco_jax.run.checkpoint import Checkpointer
from noloco_jax.run.console import Progress, banner, make_console
from noloco_jax.run.evaluate import evaluate
from noloco_jax.run.metrics import MetricWriter, Throughput, read_metrics
from noloco_jax.spmd.batches import Feed, local_replicas
from noloco_jax.spmd.compile import compile_ahead
from noloco_jax.spmd.inner import learning_rates, run_pairing
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.offload import offload, park
from noloco_jax.spmd.programs import Programs, StepMetrics, TrainState, build_programs
from noloco_jax.spmd.stages import uncut


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and trains; returns the exit status."""
    config, flags = parse_args(argv, __doc__ or "", _define_flags, prog="python -m noloco_jax.train")
    keep_freed_memory()
    use_gpu_memory()
    place = find_place(flags, os.environ)
    with joined(place, to_dict(config), flags.start_timeout):
        use_cpu_cores(config, 1 if place is None else place.num_processes)
        return train(config, Path(flags.workdir), dry_run=flags.dry_run, wandb_project=flags.wandb)


def _define_flags(parser) -> None:
    parser.add_argument("--workdir", required=True, metavar="DIR", help="where checkpoints, metrics and curves go")
    parser.add_argument("--dry_run", action="store_true", help="check everything, print the banner and stop")
    parser.add_argument("--wandb", metavar="PROJECT", help="log to this Weights & Biases project as well")
    define_flags(parser)


def train(
    config: TrainConfig,
    workdir: Path,
    *,
    dry_run: bool = False,
    wandb_project: str | None = None,
    before_step: Callable[[int], None] | None = None,
) -> int:
    """Trains until `num_steps`, from the workdir's newest checkpoint if it has one; returns the exit status.

    Of several processes, each calls this; the first one prints and draws, all write metrics of their own replicas.

    Args:
      config: the run.
      workdir: its folder, the same one for all processes.
      dry_run: check everything, and stop before anything is compiled or written.
      wandb_project: also log there.
      before_step: called with the number of every step before it is dispatched.

    Raises:
      UserError: if the configuration does not fit the devices, the data or what the workdir holds.
    """
    console = make_console()
    console.quiet = jax.process_index() > 0
    check_data(config.data, num_replicas=config.num_replicas, vocab_size=config.model.vocab_size)
    tokenizer = _load_tokenizer(config)
    programs = build_programs(config, make_mesh(config, jax.devices()))
    banner(banner_rows(config, programs), console)
    with Stop() as stop, Checkpointer(workdir, config, read_only=dry_run) as checkpoints:
        start = checkpoints.latest_step()
        stop.at(start or 0)  # from here on a SIGTERM means the next step, whichever that is
        if start is not None:
            elastic.check_elastic(config, checkpoints.layout(start))
        if start is not None and start >= config.num_steps and not dry_run:
            if jax.process_index() == 0:
                _show_complete(console, workdir, start)
            return 0
        validation = validation_batches(
            config.data, tokenizer, num_batches=config.eval_batches, vocab_size=config.model.vocab_size
        )
        feed = _make_feed(config, tokenizer, programs)
        given = load_params(config.init_from, config.model) if config.init_from and start is None else None
        if dry_run:
            return 0

        started = time.perf_counter()
        programs = compile_ahead(programs)
        console.print(f"compiled in {time.perf_counter() - started:.1f} s")
        if given is not None:
            state, given = programs.adopt(given), None  # not kept by the host for the whole run
        elif start is None:
            state = programs.init(jax.random.key(config.seed))
        else:
            state, positions, changed = elastic.restore(checkpoints, start, config, programs)
            feed.set_state(dict(enumerate(positions)))
            console.print(f"going on from the checkpoint of step {start}" + (f"; {changed}" if changed else ""))
        if config.outer.offload:
            programs = offload(programs)
            state = park(programs, state)
        process = jax.process_index()
        if process == 0:
            save_config(config, workdir)
        writer = MetricWriter(
            workdir,
            resume_step=start,
            tensorboard=process == 0,
            wandb_project=wandb_project if process == 0 else None,
            run_config=to_dict(config),
            process=process,
        )
        multihost_utils.sync_global_devices("start")  # all clocks start together
        loop = Loop(config, programs, feed, validation, checkpoints, writer, stop, start or 0)
        with Progress(config.num_steps, start_step=start or 0, log_every=config.log_every, console=console) as progress:
            state, finished = loop.run(state, progress, before_step)
        writer.close()

    if not finished:
        console.print(f"{stop.reason}: everything is saved, the same command goes on")
        return stop.exit_status
    sample = _sample(config, tokenizer, programs, state) if config.sample_tokens else None
    if process == 0:
        show_results(console, workdir, loop.evaluation, sample)
    return 0


def _load_tokenizer(config: TrainConfig) -> Tokenizer | None:
    """The run's tokenizer; none where the data are tokens already and no text is to be written."""
    if not config.sample_tokens and not needs_tokenizer(config.data):
        return None
    tokenizer = load_tokenizer(config.data.tokenizer)
    check_vocabulary(tokenizer, config.model.vocab_size)
    if config.sample_tokens:
        sample_prompt(config, tokenizer)
    return tokenizer


def _sample(config: TrainConfig, tokenizer: Tokenizer | None, programs: Programs, state: TrainState) -> str | None:
    """What the merged model writes, on the first process; the others only bring their parts of it."""
    if tokenizer is None:
        return None
    everywhere = NamedSharding(programs.mesh, P())
    first = jax.jit(lambda params: jax.tree.map(lambda x: x[0], uncut(params)), out_shardings=everywhere)
    merged = jax.tree.map(lambda x: x.addressable_data(0), first(programs.merge(state.params)))
    return sample_text(config, tokenizer, merged) if jax.process_index() == 0 else None


def _make_feed(config: TrainConfig, tokenizer: Tokenizer | None, programs: Programs) -> Feed:
    streams = {
        replica: train_stream(
            config.data,
            tokenizer,
            replica=replica,
            num_replicas=config.num_replicas,
            seed=config.seed,
            vocab_size=config.model.vocab_size,
        )
        for replica in local_replicas(programs.batch)
    }
    return Feed(streams, programs.batch)


def _show_complete(console: Console, workdir: Path, steps: int) -> None:
    evaluations = [line for line in read_metrics(workdir) if line["kind"] == "eval"]
    if evaluations:  # num_steps may have been lowered to before the first
        show_results(console, workdir, evaluations[-1], sample=None)
    console.print(
        f"the run is complete ({steps} steps): raise num_steps to go on, or start afresh with another --workdir "
        f"(or delete {workdir})"
    )


class Loop:
    """The training loop. Everything that it needs is made before; it only trains."""

    def __init__(self, config, programs, feed, validation, checkpoints, writer, stop, start: int):
        self._config, self._programs, self._feed = config, programs, feed
        self._validation, self._checkpoints, self._writer = validation, checkpoints, writer
        self._stop, self._start = stop, start
        self._lr = learning_rates(config)
        self._groups = groups_of_run(config)
        self._tokens = config.num_replicas * config.data.batch_size * config.data.sequence_length
        self._throughput = Throughput()
        self.evaluation: dict[str, Any] = {}

    def run(
        self, state: TrainState, progress: Progress, before_step: Callable[[int], None] | None = None
    ) -> tuple[TrainState, bool]:
        """Trains to the last step; returns the state, and whether it got there before it was told to stop."""
        config, programs = self._config, self._programs
        params, inner, outer = state
        unread: tuple[int, StepMetrics, dict[str, Any]] | None = None
        for step in range(self._start + 1, config.num_steps + 1):
            if before_step is not None:
                before_step(step)
            params, inner, metrics = programs.inner_step(params, inner, next(self._feed), np.int32(step))
            if unread is not None:
                # One step late, so that the device has the next step to do while the host writes.
                self._log(*unread, progress)
            extra: dict[str, Any] = {}
            if programs.outer_step is not None and step % config.outer.sync_every == 0:
                jax.block_until_ready(params)
                started = time.perf_counter()
                params, outer = jax.block_until_ready(programs.outer_step(params, outer, np.int32(step)))
                extra = {"outer_step_seconds": time.perf_counter() - started, "bytes_sent": bytes_sent(config)}
            unread = (step, metrics, extra)

            last = step == config.num_steps
            stopping = self._stop.at(step)
            evaluating = last or step % config.eval_every == 0
            saving = last or stopping or step % config.checkpoint_every == 0
            if evaluating or saving:
                self._log(*unread, progress)
                unread = None
            if evaluating:
                self.evaluation = evaluate(programs, params, self._validation)
                if jax.process_index() == 0:
                    self._writer.write(step, "eval", **self.evaluation)
                progress.evaluation(step, self.evaluation)
            if saving:
                self._checkpoints.save(step, TrainState(params, inner, outer), self._feed.get_state())
            if evaluating or saving:
                self._throughput.reset()
            if stopping and not last:
                return TrainState(params, inner, outer), False
        return TrainState(params, inner, outer), True

    def _log(self, step: int, metrics: StepMetrics, extra: dict[str, Any], progress: Progress) -> None:
        loss = float(np.mean([np.asarray(shard.data) for shard in metrics.loss.addressable_shards]))
        self._throughput.step(self._tokens)
        speed = self._throughput.tokens_per_second
        lr = float(self._lr[step - 1])
        if not np.isfinite(loss):
            raise UserError(
                f"the loss is {loss} at step {step}: lower inner.lr={self._config.inner.lr:g} or raise "
                f"inner.warmup_steps={self._config.inner.warmup_steps}, then start from the last checkpoint or afresh"
            )
        if extra or step % self._config.log_every == 0:
            grad_norm = float(np.mean([np.asarray(shard.data) for shard in metrics.grad_norm.addressable_shards]))
            self._writer.write(step, "train", loss=loss, lr=lr, grad_norm=grad_norm, tokens_per_second=speed, **extra)
        progress.update(step, loss, lr, speed)
        if extra:
            round_ = step // self._config.outer.sync_every - 1
            progress.outer(step, round_, self._groups[round_], extra["outer_step_seconds"])


def groups_of_run(config: TrainConfig) -> list[Round]:
    """Who averages with whom in every round of the run."""
    num_rounds = config.num_steps // config.outer.sync_every
    if config.method == "noloco":
        return groups_of_rounds(run_pairing(config), num_rounds)
    return [(tuple(range(config.num_replicas)),)] * num_rounds


if __name__ == "__main__":
    main_with_errors(main)
