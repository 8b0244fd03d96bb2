"""Trains a Llama: `python -m noloco_jax.train --config=configs/quickstart.py --workdir=DIR`."""

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from noloco_jax.checkpoint import Checkpointer
from noloco_jax.config import TrainConfig, save_config, to_dict
from noloco_jax.config_flags import parse_args
from noloco_jax.console import Progress, banner, make_console
from noloco_jax.data import check_data, check_vocabulary, load_tokenizer, train_stream, validation_batches
from noloco_jax.errors import UserError, main_with_errors
from noloco_jax.evaluate import evaluate
from noloco_jax.metrics import MetricWriter, Throughput, read_metrics
from noloco_jax.outer.pairing import Round, groups_of_rounds
from noloco_jax.parallel.devices import use_cpu_cores
from noloco_jax.parallel.feed import Feed, local_replicas
from noloco_jax.parallel.mesh import make_mesh
from noloco_jax.parallel.optimizers import learning_rates, run_pairing
from noloco_jax.parallel.programs import StepMetrics, TrainState, build_programs
from noloco_jax.summary import banner_rows, bytes_sent, sample_text, show_results

RESTART = 75  # EX_TEMPFAIL: stopped by SIGTERM with everything saved; the same command goes on


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and trains; returns the exit status."""
    config, flags = parse_args(argv, __doc__ or "", _define_flags, prog="python -m noloco_jax.train")
    use_cpu_cores(config)
    return train(config, Path(flags.workdir), dry_run=flags.dry_run, wandb_project=flags.wandb)


def _define_flags(parser) -> None:
    parser.add_argument("--workdir", required=True, metavar="DIR", help="where checkpoints, metrics and curves go")
    parser.add_argument("--dry_run", action="store_true", help="check everything, print the banner and stop")
    parser.add_argument("--wandb", metavar="PROJECT", help="log to this Weights & Biases project as well")


def train(config: TrainConfig, workdir: Path, *, dry_run: bool = False, wandb_project: str | None = None) -> int:
    """Trains until `num_steps`, from the workdir's newest checkpoint if it has one; returns the exit status.

    Raises:
      UserError: if the configuration does not fit the devices, the data or what the workdir holds.
    """
    console = make_console()
    check_data(config.data)
    tokenizer = load_tokenizer(config.data.tokenizer)
    check_vocabulary(tokenizer, config.model.vocab_size)
    programs = build_programs(config, make_mesh(config, jax.devices()))
    banner(banner_rows(config, programs), console)
    if dry_run:
        return 0

    checkpoints = Checkpointer(workdir, config)
    start = checkpoints.latest_step()
    if start is not None and start >= config.num_steps:
        evaluations = [line for line in read_metrics(workdir) if line["kind"] == "eval"]
        show_results(console, workdir, evaluations[-1], sample=None)
        console.print(f"the run is complete ({start} steps): raise num_steps to go on, or start afresh with another "
                      f"--workdir (or delete {workdir})")  # fmt: skip
        return 0

    validation = list(validation_batches(config.data, tokenizer, num_batches=config.eval_batches))
    feed = Feed(
        {
            replica: train_stream(
                config.data, tokenizer, replica=replica, num_replicas=config.num_replicas, seed=config.seed
            )
            for replica in local_replicas(programs.batch)
        },
        programs.batch,
    )
    if start is None:
        state = programs.init(jax.random.key(config.seed))
    else:
        state, positions = checkpoints.restore(start, programs.state)
        feed.set_state(positions)
        console.print(f"going on from the checkpoint of step {start}")
    save_config(config, workdir)
    writer = MetricWriter(workdir, resume_step=start, wandb_project=wandb_project, run_config=to_dict(config))
    loop = Loop(config, programs, feed, validation, checkpoints, writer, start or 0)
    with Progress(config.num_steps, start_step=start or 0, log_every=config.log_every, console=console) as progress:
        state, finished = loop.run(state, progress)
    checkpoints.close()
    writer.close()
    if not finished:
        console.print("stopped by SIGTERM: everything is saved, the same command goes on")
        return RESTART
    merged = jax.tree.map(lambda x: x[0], programs.merge(state.params))
    sample = sample_text(config, tokenizer, merged) if config.sample_tokens else None
    show_results(console, workdir, loop.evaluation, sample)
    return 0


class Loop:
    """The training loop. Everything that it needs is made before; it only trains."""

    def __init__(self, config, programs, feed, validation, checkpoints, writer, start: int):
        self._config, self._programs, self._feed = config, programs, feed
        self._validation, self._checkpoints, self._writer = validation, checkpoints, writer
        self._start = start
        self._lr = learning_rates(config)
        self._groups = _groups(config)
        self._tokens = config.num_replicas * config.data.batch_size * config.data.sequence_length
        self._throughput = Throughput()
        self.evaluation: dict[str, Any] = {}

    def run(self, state: TrainState, progress: Progress) -> tuple[TrainState, bool]:
        """Trains to the last step; returns the state, and whether it got there before a SIGTERM."""
        config, programs, stop = self._config, self._programs, StopSignal()
        params, inner, outer = state
        unread: tuple[int, StepMetrics, dict[str, Any]] | None = None
        for step in range(self._start + 1, config.num_steps + 1):
            params, inner, metrics = programs.inner_step(params, inner, next(self._feed))
            if unread is not None:
                # One step late, so that the device has the next step to do while the host writes.
                self._log(*unread, progress)
            extra: dict[str, Any] = {}
            if programs.outer_step is not None and step % config.outer.sync_every == 0:
                jax.block_until_ready(params)
                started = time.perf_counter()
                params, outer = jax.block_until_ready(programs.outer_step(params, outer, jnp.int32(step)))
                extra = {"outer_step_seconds": time.perf_counter() - started, "bytes_sent": bytes_sent(config)}
            unread = (step, metrics, extra)

            last = step == config.num_steps
            stopping = stop.received
            evaluating = last or step % config.eval_every == 0
            saving = last or stopping or step % config.checkpoint_every == 0
            if evaluating or saving:
                self._log(*unread, progress)
                unread = None
            if evaluating:
                self.evaluation = evaluate(programs, params, self._validation)
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
            self._writer.write(
                step, "train", loss=loss, lr=lr, grad_norm=grad_norm, tokens_per_second=speed, **extra
            )
        progress.update(step, loss, lr, speed)
        if extra:
            round_ = step // self._config.outer.sync_every - 1
            progress.outer(step, round_, self._groups[round_], extra["outer_step_seconds"])


class StopSignal:
    """Remembers a SIGTERM, so that the loop can stop between two steps."""

    def __init__(self):
        self.received = False
        signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        self.received = True


def _groups(config: TrainConfig) -> list[Round]:
    """Who averages with whom in every round of the run."""
    num_rounds = config.num_steps // config.outer.sync_every
    if config.method == "noloco":
        return groups_of_rounds(run_pairing(config), num_rounds)
    return [(tuple(range(config.num_replicas)),)] * num_rounds


if __name__ == "__main__":
    main_with_errors(main)
