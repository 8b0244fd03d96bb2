"""Train one model on the same tokens in several ways, and compare these in a table and a picture.

    python -m noloco_jax.compare --config=configs/c4_tiny.py --methods=ddp,diloco,noloco,local --seeds=3 --workdir=DIR

A variant is a name, a method and settings. --methods names those of the methods themselves; the configuration is
noloco's, ddp and local take it as it is, and diloco has the paper's settings beside it: outer.lr 0.7, outer.momentum
0.3 without Nesterov, and twice noloco's outer.sync_every. Other methods average as often as noloco and have their own
defaults beside it. --variant="often:outer.fragments=8,outer.wire=int4,outer.sync_every=2" adds another of noloco;
`method=ddp` among its settings makes it one of ddp. `--vary=outer.sync_every=25,50` trains every variant that the field
matters to with each value; several --vary train all combinations, and `--vary=num_replicas/data.batch_size=4/4,8/2`
varies fields together. A gap is above the ddp that has the variant's inner.optimizer and differs in the fewest fields.

`--tune=inner.lr=1e-3,2e-3,4e-3` trains the first seed of each variant, ddp's too, with every value, and its other seeds
with the one of them that ended with the lowest perplexity. More values may be added later.

Each run has a workdir of `python -m noloco_jax.train`, DIR/NAME-seedK, with its output in log.txt. `--jobs=2` trains
two at a time, each on its share of the cores and of the GPUs that CUDA_VISIBLE_DEVICES names (the first one where it
is not set): worth it where one run
does not fill them. The same command resumes; with more variants, seeds or values it adds them. After every run the
results are written to DIR/comparison.md and .png.

`@FILE` stands for the flags that a file holds, as a shell has them, on any number of lines, with `#` comments.

Replicas drift apart between outer steps, and diloco's are equal right after them. With eval_every an odd multiple of
outer.sync_every, noloco is always evaluated right after an outer step and diloco every other time half-way.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
from rich.console import Console

from noloco_jax.cluster.stop import RESTART
from noloco_jax.config import make_parser, split_overrides, to_dict
from noloco_jax.cores import keep_on, usable_cores
from noloco_jax.data import RunData
from noloco_jax.errors import INTERRUPTED, UserError
from noloco_jax.files import check_writable, folder_of_flag, full_disk_reported, one_command_in, write_whole
from noloco_jax.formatting import format_clock, format_perplexity
from noloco_jax.metrics.console import make_console
from noloco_jax.metrics.writer import METRICS_FILE
from noloco_jax.tools.compare.plan import ComparisonPlan, PlannedRun, check_folder, check_free, make_plan, make_variants
from noloco_jax.tools.compare.report import (
    RunResult,
    comparison_table,
    draw_comparison,
    make_rows,
    markdown,
    remarks,
    results_of,
)
from noloco_jax.tools.sweep import parse_sweep

LOG_FILE = "log.txt"  # what a trainer prints, in its workdir
PLANNED_FILE = "planned.json"  # the configuration that a run was planned with, whatever becomes of the config file
COMPARISON_LOCK = "comparison.lock"
_FAILED = 1
_POLL_SECONDS = 0.2


def main(argv: Sequence[str] | None = None) -> int:
    """Train the runs that are not finished; return the exit status, 1 where a run broke off."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    overrides, own = split_overrides(with_plans(arguments))
    flags = _parser().parse_args(own)
    if flags.jobs < 1:
        raise UserError(f"--jobs={flags.jobs} is below 1: it is how many runs are trained at a time")
    vary = [parse_sweep(text, "--vary") for text in flags.vary]
    tune = parse_sweep(flags.tune, "--tune") if flags.tune else None
    for choices in [*vary, *([tune] if tune else [])]:
        check_free(choices.fields, "--vary or --tune")
    variants = make_variants(flags.methods, flags.variant, vary)
    plan = make_plan(flags.config, overrides, variants, flags.seeds, vary, tune)
    check_writable(flags.workdir)
    check_folder(flags.workdir, plan.runs)
    configs = [run.config for run in plan.runs]
    for data, replicas, vocabulary in {(c.data, c.num_replicas, c.model.vocab_size) for c in configs}:
        RunData(data, seed=0, vocab_size=vocabulary).check(replicas)

    jax.config.update("jax_platforms", "cpu")  # accelerators are the runs'
    command = shlex.join(["python", "-m", "noloco_jax.compare", *arguments])
    comparison = Comparison(workdir=flags.workdir, plan=plan, jobs=flags.jobs, command=command, console=make_console())
    if flags.dry_run:
        comparison.list_runs()
        return 0
    with full_disk_reported(flags.workdir):
        return comparison.run()


def with_plans(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with the flags of plan files in the place of `@FILE`.

    Raises:
      UserError: if a file cannot be read, or ends within quotes.
    """
    flags = []
    for argument in arguments:
        try:
            file = Path(argument[1:]) if argument.startswith("@") else None
            flags += [argument] if file is None else shlex.split(file.read_text(encoding="utf-8"), comments=True)
        except (OSError, ValueError) as error:
            raise UserError(f"{argument}: the plan cannot be read ({error}): give a file of flags") from None
    return flags


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__ or "", prog="python -m noloco_jax.compare")
    flag = parser.add_argument
    flag("--config", required=True, metavar="FILE[:ARGUMENT]", help="noloco's; --config.FIELD=VALUE too")
    flag("--methods", help="comma-separated (default: ddp,diloco,noloco,local, none with --variant)")
    help_of_variant = "may be repeated; method=METHOD may be among its fields"
    flag("--variant", action="append", default=[], metavar="NAME:FIELD=VALUE,FIELD=VALUE", help=help_of_variant)
    flag("--seeds", type=int, default=1, metavar="K", help="seeds a variant: config.seed and K-1 more")
    flag("--workdir", required=True, type=folder_of_flag, metavar="DIR", help="where runs and results go")
    help_of_vary = "a field to train with each of several values; may be repeated, for all combinations"
    flag("--vary", action="append", default=[], metavar="FIELD=A,B,C", help=help_of_vary)
    flag("--tune", metavar="FIELD=A,B,C", help="a field of which every variant gets its own best value")
    flag("--jobs", type=int, default=1, metavar="J", help="runs at a time (default 1, right for one GPU)")
    flag("--dry_run", action="store_true", help="check everything, list the runs and stop")
    return parser


class Job(NamedTuple):
    """A run that trains."""

    run: PlannedRun
    process: subprocess.Popen[bytes]
    started: float


class Comparison:
    """The runs of a comparison, trained in processes of their own.

    Args:
      workdir: a folder for the runs' workdirs and the results.
      plan: the runs, in their order.
      jobs: number of runs that train at a time.
      command: the command that makes the comparison, for the page of results.
      console: where to print.
    """

    def __init__(self, *, workdir: Path, plan: ComparisonPlan, jobs: int, command: str, console: Console):
        self._workdir, self._plan, self._command, self._console = workdir, plan, command, console
        self._needed = plan.needed({})
        self._num_jobs, self._jobs = jobs, dict[int, Job]()  # those that train, by their slot
        self._labels: dict[PlannedRun, str] = {}  # of the runs that have begun
        self._has_failed = False
        self._stopped: int | None = None  # the signal that ends the comparison

    def list_runs(self) -> None:
        """Print the name of each run, and whether it is finished."""
        finished = self._results()
        for run in self._needed:
            self._console.print(f"{run.name} ({'finished' if run in finished else 'to do'})")
        if more := self._plan.total - len(self._needed):
            self._console.print(f"and {more} of the other seeds, at the best value of --tune")

    def run(self) -> int:
        """Train all that is not finished; return the exit status.

        SIGTERM and Ctrl-C stop the runs in training with everything saved.
        """
        with one_command_in(self._workdir, COMPARISON_LOCK, f"{self._workdir} is in use by another comparison"):
            former = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
            try:
                self._train(self._needed)
                perplexities = {run: result.perplexity for run, result in self._results().items()}
                self._needed = self._plan.needed(perplexities)  # with the other seeds at the best tuned values
                self._train(self._needed)
            finally:
                for job in self._jobs.values():  # left over by an error alone
                    job.process.terminate()
                for job in self._jobs.values():
                    job.process.wait()
                for number, handler in former.items():
                    signal.signal(number, handler)
            self._write()
        if self._stopped is not None:
            self._console.print("stopped: the same command resumes")
            return INTERRUPTED if self._stopped == signal.SIGINT else RESTART
        rows = make_rows(self._plan, self._results())
        self._console.print("\n".join(["", comparison_table(self._plan, rows), "", *remarks(self._plan, rows)]))
        self._console.print(f"written: {self._workdir / 'comparison.md'} and comparison.png")
        return _FAILED if self._has_failed else 0

    def _results(self) -> dict[PlannedRun, RunResult]:
        return results_of(self._plan.runs, self._workdir)

    def _train(self, runs: Sequence[PlannedRun]) -> None:
        """Train the runs that have not begun, and wait for them; after a signal begin no more."""
        finished, waiting = self._results(), []
        for run in runs:
            if run in self._labels:
                continue
            self._labels[run] = f"[{len(self._labels) + 1}/{self._plan.total}] {run.name}"
            if run in finished:
                perplexity = format_perplexity(finished[run].perplexity)
                self._console.print(f"{self._labels[run]}: perplexity {perplexity}, finished before")
            else:
                waiting.append(run)
        while self._jobs or (waiting and self._stopped is None):
            for slot in range(self._num_jobs):
                if slot in self._jobs and self._jobs[slot].process.poll() is not None:
                    self._end(self._jobs.pop(slot))
                if slot not in self._jobs and waiting and self._stopped is None:
                    self._jobs[slot] = self._begin(waiting.pop(0), slot)
            time.sleep(_POLL_SECONDS)

    def _begin(self, run: PlannedRun, slot: int) -> Job:
        workdir = self._workdir / run.name
        write_whole(workdir / PLANNED_FILE, json.dumps(to_dict(run.config)))
        self._console.print(f"{self._labels[run]}: begins")
        with (workdir / LOG_FILE).open("a") as log:
            process = subprocess.Popen(
                [sys.executable, *self._arguments(run)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that Ctrl-C comes to it once, through this process
                env={**os.environ, **share_of_gpus(os.environ, self._num_jobs, slot)},
            )
        if cores := share_of_cores(usable_cores(), self._num_jobs, slot):
            keep_on(process.pid, cores)  # before it has threads, which inherit them
        if self._stopped is not None:  # a signal since the slot was found free
            process.send_signal(self._stopped)
        return Job(run, process, time.monotonic())

    def _arguments(self, run: PlannedRun) -> list[str]:
        workdir = self._workdir / run.name
        return ["-m", "noloco_jax.train", f"--config={workdir / PLANNED_FILE}", f"--workdir={workdir}"]

    def _end(self, job: Job) -> None:
        """Print the end of a run.

        Raises:
          UserError: if it never began for a mistake, for then the others will not either. Other reasons, as too little
            memory for this variant, are its own.
        """
        if (result := results_of([job.run], self._workdir).get(job.run)) is not None:
            self._write()
            took = format_clock(time.monotonic() - job.started)
            self._console.print(
                f"{self._labels[job.run]}: perplexity {format_perplexity(result.perplexity)} after {took}"
            )
        elif self._stopped is None:
            folder, status = self._workdir / job.run.name, job.process.returncode
            words = (folder / LOG_FILE).read_text(errors="replace").strip().splitlines() or ["no word"]
            reason = f"status {status}: {words[-1].removeprefix('error: ')} ({folder / LOG_FILE})"
            is_own = "out of memory" in reason or (folder / METRICS_FILE).exists()
            if status == UserError.exit_status and not is_own:
                raise UserError(f"{job.run.name} did not start, {reason}")
            self._has_failed = True
            self._console.print(f"{self._labels[job.run]}: broke off with {reason}", style="bold red")

    def _stop(self, number: int, frame: object) -> None:
        self._stopped = number
        for job in list(self._jobs.values()):
            job.process.send_signal(number)

    def _write(self) -> None:
        """Write the page and the picture."""
        finished = self._results()
        rows = make_rows(self._plan, finished)
        if rows:
            draw_comparison(rows, self._workdir / "comparison.png")
        missing = [run for run in self._needed if run not in finished]
        write_whole(self._workdir / "comparison.md", markdown(self._plan, rows, self._command, missing))


def share_of_cores(cores: Sequence[int], jobs: int, slot: int) -> frozenset[int]:
    """Return adjacent cores for job `slot` of `jobs`; empty, for all, where one job is alone or there are too many."""
    if jobs == 1 or jobs > len(cores):
        return frozenset()
    return frozenset(sorted(cores)[slot * len(cores) // jobs : (slot + 1) * len(cores) // jobs])


def share_of_gpus(environment: Mapping[str, str], jobs: int, slot: int) -> dict[str, str]:
    """Return the environment of job `slot` of `jobs`: its GPUs, or one that several share and a part of its memory.

    The GPUs are those that CUDA_VISIBLE_DEVICES names; if it is not set, the first one. The part is left out where the
    environment limits memory already.
    """
    gpus = environment.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    if jobs == 1:
        return {}
    if jobs <= len(gpus):
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[slot * len(gpus) // jobs : (slot + 1) * len(gpus) // jobs])}
    is_settled = any(name.endswith("CLIENT_MEM_FRACTION") for name in environment)
    part = {} if is_settled else {"XLA_CLIENT_MEM_FRACTION": f"{0.9 / -(-jobs // len(gpus)):.2f}"}
    return {"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)], **part}
