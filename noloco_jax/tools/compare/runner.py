"""Train the runs of a comparison, some at a time in processes of their own, and write their results."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from noloco_jax.cluster.stop import RESTART
from noloco_jax.config import to_dict
from noloco_jax.cores import keep_on, usable_cores
from noloco_jax.errors import INTERRUPTED, UserError
from noloco_jax.files import one_command_in, write_whole
from noloco_jax.formatting import format_clock, format_perplexity
from noloco_jax.metrics.writer import METRICS_FILE
from noloco_jax.tools.compare.plan import Plan, PlannedRun
from noloco_jax.tools.compare.report import draw, markdown, remarks, table
from noloco_jax.tools.compare.results import Result, make_rows, results_of

LOG_FILE = "log.txt"  # what a trainer prints, in its workdir
PLANNED_FILE = "planned.json"  # the configuration that a run was planned with, whatever becomes of the config file
LOCK_FILE = "comparison.lock"
_FAILED = 1
_POLL_SECONDS = 0.2


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

    def __init__(self, *, workdir: Path, plan: Plan, jobs: int, command: str, console: Console):
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
        with one_command_in(self._workdir, LOCK_FILE, f"{self._workdir} is in use by another comparison"):
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
        self._console.print("\n".join(["", table(self._plan, rows), "", *remarks(self._plan, rows)]))
        self._console.print(f"written: {self._workdir / 'comparison.md'} and comparison.png")
        return _FAILED if self._has_failed else 0

    def _results(self) -> dict[PlannedRun, Result]:
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
            draw(rows, self._workdir / "comparison.png")
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
