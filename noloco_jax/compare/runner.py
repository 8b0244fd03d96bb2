"""Train the runs of a comparison, some at a time in processes of their own, and write their results."""

import os
import shlex
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from noloco_jax.cluster.stop import INTERRUPTED, RESTART
from noloco_jax.compare import report
from noloco_jax.compare.chart import draw, draw_bytes, draw_laws
from noloco_jax.compare.job import PLANNED_FILE, Job, TakenError
from noloco_jax.compare.law import fit_laws
from noloco_jax.compare.others import Others, writing_alone
from noloco_jax.compare.plan import Plan, Run, check_run, check_same_data
from noloco_jax.compare.results import is_complete, last_perplexities, read_progress, seconds_left
from noloco_jax.compare.rows import make_rows
from noloco_jax.cores import usable_cores
from noloco_jax.files import write_whole
from noloco_jax.formatting import format_clock, format_perplexity, format_spread

_FAILED = 1
_POLL_SECONDS = 0.2
_SAY_SECONDS = 1.0
_LOOK_SECONDS = 2.0  # between two looks at runs that others train


class Comparison:
    """The runs of a comparison, trained in processes of their own.

    Args:
      config_file: of noloco, with its argument if it takes one.
      workdir: holds a folder a run, and the results.
      plan: which runs, and in which order.
      jobs: how many train at a time.
      command: that makes the comparison, for the page of results.
      console: where to print.
    """

    def __init__(self, *, config_file: str, workdir: Path, plan: Plan, jobs: int, command: str, console: Console):
        self._config_file, self._workdir, self._plan = config_file, workdir, plan
        self._slots: list[Job | None] = [None] * jobs
        self._gpus = visible_gpus(os.environ) if jobs > 1 else []
        self._command, self._console = command, console
        self._taken: list[Run] = []  # runs that have been started here, or were found finished
        self._others, self._elsewhere = Others(plan.runs, workdir), dict[Run, str]()  # who trains them
        self._failed: set[Run] = set()
        self._seconds_beside: list[float] = []  # of the runs that ended here, beside their training steps
        self._stopped: int | None = None  # the signal that ends the comparison

    def list_runs(self) -> None:
        """Print the command of each run, and whether it is finished."""
        due = self._plan.due(last_perplexities(self._plan.runs, self._workdir))
        for run in due:
            state = "finished" if is_complete(run, self._workdir) else "to do"
            self._console.print(f"{run.name} ({state})", style="bold")
            flags = [f"--config={self._config_file}", f"--workdir={self._workdir / run.name}", *run.overrides]
            self._console.print("    " + shlex.join(["python", "-m", "noloco_jax.train", *flags]))
        if self._plan.tune is not None and len(due) < self._plan.total:
            self._console.print(
                f"and {self._plan.total - len(due)} of the other seeds, at the best {self._plan.tune.field}"
            )

    def run(self) -> int:
        """Train all that is not finished; return the exit status.

        SIGTERM and Ctrl-C stop the runs in training with everything saved.
        """
        former = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            with Live(
                console=self._console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
            ) as live:
                self._train_all(self._say_on_terminal(live) if self._console.is_terminal else self._say_in_log)
            if self._stopped is not None:
                self._write()
                self._console.print("stopped: the same command resumes")
                return INTERRUPTED if self._stopped == signal.SIGINT else RESTART
        finally:
            for job in filter(None, self._slots):  # left over by an error alone
                job.send(signal.SIGTERM)
            for job in filter(None, self._slots):
                job.end()
            for number, handler in former.items():
                signal.signal(number, handler)
        self._write(show=True)
        return _FAILED if self._failed else 0

    def _train_all(self, say: Callable[[], None]) -> None:
        """Start due runs in free slots until none is due and none trains, here or elsewhere, or all have to stop."""
        with writing_alone(self._workdir):
            pass  # its file keeps the runs' logs out of data in a folder above, from the first run on
        told = looked = time.monotonic()
        self._fill()
        while any(self._slots) or (self._elsewhere and self._stopped is None):
            time.sleep(_POLL_SECONDS)
            ended = [job for job in self._slots if job is not None and job.status is not None]
            for job in ended:
                self._slots[self._slots.index(job)] = None
                self._finish(job)
            is_time = self._elsewhere and time.monotonic() - looked >= _LOOK_SECONDS
            if (ended or is_time) and self._stopped is None:
                looked = time.monotonic()
                self._fill()
            if time.monotonic() - told >= _SAY_SECONDS:
                told = time.monotonic()
                say()

    def _fill(self) -> None:
        """Start runs in all free slots that nobody else trains."""
        finished = last_perplexities(self._plan.runs, self._workdir)
        before, self._elsewhere = self._elsewhere, {}
        for run in self._plan.due(finished, self._failed):
            if run in self._taken:
                continue
            label = f"[{len(self._taken) + 1}/{self._plan.total}] {run.name}"
            if run in finished:
                self._taken.append(run)
                self._say_result(run, label)
                continue
            if (trainer := self._others.trainer_of(run)) is not None:
                self._elsewhere[run] = trainer
                if run not in before:
                    self._console.print(f"{run.name}: left to {trainer}")
                continue
            if None not in self._slots or self._stopped is not None:
                continue
            slot, jobs = self._slots.index(None), len(self._slots)
            cores = share_of_cores(usable_cores(), jobs, slot)
            environment = share_of_gpus(self._gpus, os.environ, jobs, slot)
            try:
                job = Job(run, self._workdir / run.name, label, self._arguments(run), cores, environment)
            except TakenError:  # somebody was quicker
                self._elsewhere[run] = "a trainer that begins"
                continue
            self._taken.append(run)
            self._slots[slot] = job
            self._console.print(f"{label}: begins")
            if self._stopped is not None:  # between the question above and the process
                job.send(self._stopped)

    def _finish(self, job: Job) -> None:
        """Print the end of a run."""
        if is_complete(job.run, self._workdir):
            check_run(job.run, self._workdir)
            check_same_data(self._plan.runs, self._workdir)
            self._write()
            seconds = job.seconds_beside(read_progress(self._workdir / job.run.name).last.get("seconds", 0.0))
            self._seconds_beside += [] if seconds is None else [seconds]
            self._say_result(job.run, job.label, self._left())
        elif (trainer := self._others.trainer_of(job.run)) is not None:  # on another machine, which was quicker
            self._taken.remove(job.run)
            self._elsewhere[job.run] = trainer
        elif self._stopped is None:
            self._failed.add(job.run)
            self._console.print(f"{job.label}: broke off with {job.failure()}", style="bold red")

    def _arguments(self, run: Run) -> list[str]:
        workdir = self._workdir / run.name
        return ["-m", "noloco_jax.train", f"--config={workdir / PLANNED_FILE}", f"--workdir={workdir}"]

    def _stop(self, number: int, frame: object) -> None:
        self._stopped = number
        for job in filter(None, self._slots):
            job.send(number)

    def _say_on_terminal(self, live: Live) -> Callable[[], None]:
        """Show a line for each run that trains, in the place of the lines before."""

        def say() -> None:
            jobs = [job for job in self._slots if job is not None]
            for job in jobs:
                job.progress.read()
            lines = "\n".join(job.progress.line for job in jobs)
            live.update(Text(lines, no_wrap=True, overflow="ellipsis"), refresh=True)

        return say

    def _say_in_log(self) -> None:
        """Print a line for every evaluation that is new."""
        for job in filter(None, self._slots):
            job.progress.read()
            news = job.progress.news()
            if news is not None:
                self._console.print(news)

    def _say_result(self, run: Run, label: str, left: str = "") -> None:
        last = read_progress(self._workdir / run.name).evaluations[-1]
        self._console.print(
            f"{label}: perplexity {format_perplexity(last['perplexity'])}, merged "
            f"{format_perplexity(last['perplexity_merged'])}, spread {format_spread(last['replica_spread'])}{left}"
        )

    def _left(self) -> str:
        """Return the end of a line: how many runs remain, and for how long."""
        finished = last_perplexities(self._plan.runs, self._workdir)
        expected = [run for run in self._plan.expected(finished, self._failed) if run not in self._failed]
        others = sum(run not in self._taken and self._others.trainer_of(run) is not None for run in expected)
        left = sum(run not in finished for run in expected)
        beside = statistics.median(self._seconds_beside or [0.0])
        seconds = seconds_left(expected, self._workdir, len(self._slots) + others, beside)
        return f"; {left} to finish, about {format_clock(seconds)}" if left and seconds is not None else ""

    def _write(self, show: bool = False) -> None:
        """Write table and pictures of the finished runs, and show the table."""
        with writing_alone(self._workdir):
            self._write_results(show)

    def _write_results(self, show: bool) -> None:
        plan, rows = self._plan, make_rows(self._plan, self._workdir)
        due = plan.due(last_perplexities(plan.runs, self._workdir), self._failed)
        missing = [run for run in due if not is_complete(run, self._workdir)]
        pictures = {}
        if rows:
            draw(rows, self._workdir / "comparison.png")
            pictures["validation perplexity and replica spread"] = "comparison.png"
        if draw_bytes(rows, self._workdir / "comparison_bytes.png"):
            pictures["gap against bytes sent"] = "comparison_bytes.png"
        laws = fit_laws(rows)
        if draw_laws(rows, laws, self._workdir / "comparison_meetings.png"):
            pictures["gap against meetings"] = "comparison_meetings.png"
        page = report.markdown(plan, rows, self._command, pictures, missing, laws)
        write_whole(self._workdir / "comparison.md", page)
        write_whole(self._workdir / "comparison.csv", report.table_csv(plan, rows))
        if show:
            self._console.print("\n" + "\n".join(report.table(plan, rows, brief=True)))
            for remark in [*report.remarks(plan, rows), *map(str, laws)]:
                self._console.print(f"\n{remark}")
            self._console.print(f"\ncorrelation of replica spread and learning rate ({report.PAPERS_CORRELATION}):")
            for line in report.correlations(rows):
                self._console.print(f"  {line}")
            written = ", ".join(["comparison.csv", *pictures.values()])
            self._console.print(f"\nwritten: {self._workdir / 'comparison.md'}, {written}")


def share_of_cores(cores: Sequence[int], jobs: int, slot: int) -> frozenset[int]:
    """Return adjacent cores for job `slot` of `jobs`; empty, for all, where one job is alone or there are too many."""
    if jobs == 1 or jobs > len(cores):
        return frozenset()
    cores = sorted(cores)
    return frozenset(cores[slot * len(cores) // jobs : (slot + 1) * len(cores) // jobs])


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """Return the GPUs that runs may use: those that CUDA_VISIBLE_DEVICES names, or all that the driver lists."""
    if environment.get("JAX_PLATFORMS", "").startswith("cpu"):
        return []
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is None and shutil.which("nvidia-smi", path=environment.get("PATH")):
        called = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
            env=dict(environment),
            capture_output=True,
            text=True,
        )
        named = ",".join(called.stdout.split()) if called.returncode == 0 else ""
    return [gpu for gpu in (named or "").split(",") if gpu]


def share_of_gpus(gpus: Sequence[str], environment: Mapping[str, str], jobs: int, slot: int) -> dict[str, str]:
    """Return the environment of job `slot` of `jobs`: its GPUs, or one that several share and a part of its memory.

    The part is left out where the environment limits memory already.
    """
    if jobs == 1 or not gpus:
        return {}
    if jobs <= len(gpus):
        own = gpus[slot * len(gpus) // jobs : (slot + 1) * len(gpus) // jobs]
        return {"CUDA_VISIBLE_DEVICES": ",".join(own)}
    own, is_settled = gpus[slot % len(gpus)], any(name.endswith("CLIENT_MEM_FRACTION") for name in environment)
    part = {} if is_settled else {"XLA_CLIENT_MEM_FRACTION": f"{0.9 / -(-jobs // len(gpus)):.2f}"}
    return {"CUDA_VISIBLE_DEVICES": own, **part}
