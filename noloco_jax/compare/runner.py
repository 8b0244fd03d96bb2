"""Train the runs of a comparison, some at a time in processes of their own, and write their results."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from noloco_jax.cluster.stop import RESTART
from noloco_jax.compare.plan import Plan, Run
from noloco_jax.compare.report import draw, markdown, remarks, table
from noloco_jax.compare.results import last_perplexities, make_rows
from noloco_jax.config import to_dict
from noloco_jax.cores import keep_on, usable_cores
from noloco_jax.errors import INTERRUPTED, UserError
from noloco_jax.files import one_command_in, write_whole
from noloco_jax.formatting import format_clock, format_perplexity
from noloco_jax.metrics.writer import METRICS_FILE

LOG_FILE = "log.txt"  # what a trainer prints, in its workdir
PLANNED_FILE = "planned.json"  # the configuration that a run was planned with, whatever becomes of the config file
LOCK_FILE = "comparison.lock"
_FAILED = 1
_POLL_SECONDS = 0.2
_SAVE_SECONDS = 600.0


class Job(NamedTuple):
    """A run that trains."""

    run: Run
    label: str
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

    def __init__(self, *, workdir: Path, plan: Plan, jobs: int, command: str, console: Console):
        self._workdir, self._plan, self._command, self._console = workdir, plan, command, console
        self._slots: list[Job | None] = [None] * jobs
        self._begun: set[Run] = set()
        self._failed: set[Run] = set()
        self._stopped: int | None = None  # the signal that ends the comparison

    def list_runs(self) -> None:
        """Print the name of each run, and whether it is finished."""
        finished = last_perplexities(self._plan.runs, self._workdir)
        due = self._plan.due(finished)
        for run in due:
            self._console.print(f"{run.name} ({'finished' if run in finished else 'to do'})")
        if more := self._plan.total - len(due):
            self._console.print(f"and {more} of the other seeds, at the best value of --tune")

    def run(self) -> int:
        """Train all that is not finished; return the exit status.

        SIGTERM and Ctrl-C stop the runs in training with everything saved.
        """
        with one_command_in(self._workdir, LOCK_FILE, f"{self._workdir} is in use by another comparison"):
            former = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
            try:
                self._train_all()
            finally:
                self._end_jobs()  # left over by an error alone
                for number, handler in former.items():
                    signal.signal(number, handler)
            self._write()
        if self._stopped is not None:
            self._console.print("stopped: the same command resumes")
            return INTERRUPTED if self._stopped == signal.SIGINT else RESTART
        rows = make_rows(self._plan, self._workdir)
        self._console.print("\n".join(["", *table(self._plan, rows), "", *remarks(self._plan, rows)]))
        self._console.print(f"written: {self._workdir / 'comparison.md'} and comparison.png")
        return _FAILED if self._failed else 0

    def _train_all(self) -> None:
        """Keep the slots filled until no run is due and none trains, or all have to stop."""
        self._fill()
        while any(self._slots):
            time.sleep(_POLL_SECONDS)
            ended = [job for job in self._slots if job is not None and job.process.poll() is not None]
            for job in ended:
                self._slots[self._slots.index(job)] = None
                self._finish(job)
            if ended and self._stopped is None:
                self._fill()

    def _fill(self) -> None:
        """Start due runs in all free slots."""
        finished = last_perplexities(self._plan.runs, self._workdir)
        for run in self._plan.due(finished, self._failed):
            if run in self._begun or (run not in finished and None not in self._slots):
                continue
            self._begun.add(run)
            label = f"[{len(self._begun)}/{self._plan.total}] {run.name}"
            if run in finished:
                self._console.print(f"{label}: perplexity {format_perplexity(finished[run])}, finished before")
            else:
                self._start(run, label, self._slots.index(None))

    def _start(self, run: Run, label: str, slot: int) -> None:
        folder, jobs = self._workdir / run.name, len(self._slots)
        write_whole(folder / PLANNED_FILE, json.dumps(to_dict(run.config)))
        self._console.print(f"{label}: begins")
        with (folder / LOG_FILE).open("a") as log:
            process = subprocess.Popen(
                [sys.executable, *self._arguments(run)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that Ctrl-C comes to it once, through this process
                env={**os.environ, **share_of_gpus(os.environ, jobs, slot)},
            )
        if cores := share_of_cores(usable_cores(), jobs, slot):
            keep_on(process.pid, cores)  # before it has threads, which inherit them
        self._slots[slot] = Job(run, label, process, time.monotonic())
        if self._stopped is not None:  # a signal since the slot was found free
            process.send_signal(self._stopped)

    def _arguments(self, run: Run) -> list[str]:
        workdir = self._workdir / run.name
        return ["-m", "noloco_jax.train", f"--config={workdir / PLANNED_FILE}", f"--workdir={workdir}"]

    def _finish(self, job: Job) -> None:
        """Print the end of a run.

        Raises:
          UserError: if it never began for a mistake, for then the others will not either. Other reasons, as too little
            memory for this variant, are its own.
        """
        finished = last_perplexities([job.run], self._workdir)
        if job.run in finished:
            self._write()
            took = format_clock(time.monotonic() - job.started)
            self._console.print(f"{job.label}: perplexity {format_perplexity(finished[job.run])} after {took}")
        elif self._stopped is None:
            folder, status = self._workdir / job.run.name, job.process.returncode
            words = (folder / LOG_FILE).read_text(errors="replace").strip().splitlines() or ["no word"]
            reason = f"status {status}: {words[-1].removeprefix('error: ')} ({folder / LOG_FILE})"
            is_own = "out of memory" in reason or (folder / METRICS_FILE).exists()
            if status == UserError.exit_status and not is_own:
                raise UserError(f"{job.run.name} did not start, {reason}")
            self._failed.add(job.run)
            self._console.print(f"{job.label}: broke off with {reason}", style="bold red")

    def _stop(self, number: int, frame: object) -> None:
        self._stopped = number
        for job in filter(None, self._slots):
            job.process.send_signal(number)

    def _end_jobs(self) -> None:
        """Stop the jobs, with everything saved if that takes no longer than a save may."""
        jobs = [job for job in self._slots if job is not None]
        for job in jobs:
            job.process.terminate()
        for job in jobs:
            try:
                job.process.wait(timeout=_SAVE_SECONDS)
            except subprocess.TimeoutExpired:
                job.process.kill()
                job.process.wait()

    def _write(self) -> None:
        """Write the page and the picture."""
        rows = make_rows(self._plan, self._workdir)
        finished = last_perplexities(self._plan.runs, self._workdir)
        missing = [run for run in self._plan.due(finished, self._failed) if run not in finished]
        if rows:
            draw(rows, self._workdir / "comparison.png")
        write_whole(self._workdir / "comparison.md", markdown(self._plan, rows, self._command, missing))


def share_of_cores(cores: Sequence[int], jobs: int, slot: int) -> frozenset[int]:
    """Return adjacent cores for job `slot` of `jobs`; empty, for all, where one job is alone or there are too many."""
    if jobs == 1 or jobs > len(cores):
        return frozenset()
    return frozenset(sorted(cores)[slot * len(cores) // jobs : (slot + 1) * len(cores) // jobs])


def share_of_gpus(environment: Mapping[str, str], jobs: int, slot: int) -> dict[str, str]:
    """Return the environment of job `slot` of `jobs`: its GPUs, or one that several share and a part of its memory.

    The GPUs are those that CUDA_VISIBLE_DEVICES names, or all that the driver lists. The part is left out where the
    environment limits memory already.
    """
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is None and shutil.which("nvidia-smi", path=environment.get("PATH")):
        query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        called = subprocess.run(query, env=dict(environment), capture_output=True, text=True)
        named = ",".join(called.stdout.split()) if called.returncode == 0 else ""
    gpus = [gpu for gpu in (named or "").split(",") if gpu]
    if jobs == 1 or not gpus or environment.get("JAX_PLATFORMS", "").startswith("cpu"):
        return {}
    if jobs <= len(gpus):
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[slot * len(gpus) // jobs : (slot + 1) * len(gpus) // jobs])}
    is_settled = any(name.endswith("CLIENT_MEM_FRACTION") for name in environment)
    part = {} if is_settled else {"XLA_CLIENT_MEM_FRACTION": f"{0.9 / -(-jobs // len(gpus)):.2f}"}
    return {"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)], **part}
