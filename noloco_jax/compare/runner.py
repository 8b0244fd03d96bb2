"""Trains the runs of a comparison, one after another in processes of their own, and writes what is finished."""

import fcntl
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType

from noloco_jax.cluster.stop import INTERRUPTED, RESTART
from noloco_jax.compare import report
from noloco_jax.compare.chart import draw
from noloco_jax.compare.plan import Run
from noloco_jax.compare.results import is_complete, make_rows, read_progress
from noloco_jax.errors import UserError
from noloco_jax.files import write_whole
from noloco_jax.formatting import (
    format_clock,
    format_perplexity,
    format_spread,
    format_tokens_per_second,
    or_infinity,
)
from noloco_jax.run.metrics import METRICS_FILE, NewLines

LOG_FILE = "log.txt"
_FAILED = 1
_CLEAR = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))


class Comparison:
    """The runs of a comparison, trained one after another in processes of their own.

    Args:
      config_file: of noloco, with its argument if it takes one.
      workdir: holds a folder a run, and the results.
      runs: in the order in which they are trained.
      vary: the field that varies, or None.
      command: that makes the comparison, for the page of results.
      console: where to print.
    """

    def __init__(
        self, *, config_file: str, workdir: Path, runs: Sequence[Run], vary: str | None, command: str, console: Console
    ):
        self._config_file, self._workdir, self._runs = config_file, workdir, runs
        self._vary, self._command, self._console = vary, command, console
        self._child: subprocess.Popen[bytes] | None = None
        self._stopped: int | None = None  # the signal that ends the comparison

    def list_runs(self) -> None:
        """Prints the command of each run, and whether it is finished."""
        for run in self._runs:
            state = "finished" if is_complete(run, self._workdir) else "to do"
            self._console.print(f"{run.name} ({state})", style="bold")
            self._console.print("    " + shlex.join(["python", *self._arguments(run)]))

    def run(self) -> int:
        """Trains all that is not finished; returns the exit status.

        SIGTERM and Ctrl-C stop the present run with everything saved.
        """
        former = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
        failed = False
        try:
            for number, run in enumerate(self._runs, start=1):
                label = f"[{number}/{len(self._runs)}] {run.name}"
                if not is_complete(run, self._workdir):
                    status = self._train(run, label)
                    if self._stopped is not None:
                        self._write()
                        self._console.print("stopped: the same command goes on")
                        return INTERRUPTED if self._stopped == signal.SIGINT else RESTART
                    if not is_complete(run, self._workdir):
                        failed = True
                        self._console.print(f"{label}: broke off with {self._failure(run, status)}", style="bold red")
                        continue
                    self._write()
                self._say_result(run, label)
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)
        self._write(show=True)
        return _FAILED if failed else 0

    def _arguments(self, run: Run) -> list[str]:
        workdir = self._workdir / run.name
        return ["-m", "noloco_jax.train", f"--config={self._config_file}", f"--workdir={workdir}", *run.overrides]

    def _stop(self, number: int, frame: object) -> None:
        self._stopped = number
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)

    def _train(self, run: Run, label: str) -> int:
        """Runs the trainer to its end, saying how far it is, and returns its exit status."""
        folder = self._workdir / run.name
        folder.mkdir(parents=True, exist_ok=True)
        progress = _Progress(run, label, folder, self._console)
        with (folder / LOG_FILE).open("a") as log:
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the trainer inherits it, and may outlive us
            except BlockingIOError:
                raise UserError(f"{folder} is being trained by another process: wait for it, or end it") from None
            # In a session of its own, so that Ctrl-C comes to it once, through this process.
            self._child = subprocess.Popen(
                [sys.executable, *self._arguments(run)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                if self._stopped is not None:
                    self._child.send_signal(self._stopped)
                while True:
                    try:
                        return self._child.wait(timeout=1)
                    except subprocess.TimeoutExpired:
                        progress.say()
            finally:
                if self._child.poll() is None:
                    self._child.kill()
                    self._child.wait()
                self._child = None
                if self._console.is_terminal:
                    self._console.control(_CLEAR)

    def _say_result(self, run: Run, label: str) -> None:
        last = read_progress(self._workdir / run.name).evaluations[-1]
        self._console.print(
            f"{label}: perplexity {format_perplexity(last['perplexity'])}, merged "
            f"{format_perplexity(last['perplexity_merged'])}, spread {format_spread(last['replica_spread'])}"
        )

    def _failure(self, run: Run, status: int) -> str:
        """What a run that ended early said.

        Raises:
          UserError: if it never began, for then the others will not either.
        """
        log = self._workdir / run.name / LOG_FILE
        last = (log.read_text(errors="replace").strip().splitlines() or ["no word"])[-1].removeprefix("error: ")
        if not (self._workdir / run.name / METRICS_FILE).exists():
            raise UserError(f"{run.name} did not start (status {status}): {last} ({log})")
        return f"status {status}: {last} ({log})"

    def _write(self, show: bool = False) -> None:
        """Writes table and picture of what is finished, and shows them."""
        rows = make_rows(self._runs, self._workdir)
        missing = [run for run in self._runs if not is_complete(run, self._workdir)]
        picture = self._workdir / "comparison.png"
        if rows:
            draw(rows, self._vary, picture)
        page = report.markdown(rows, self._vary, self._command, picture.name if rows else None, missing)
        write_whole(self._workdir / "comparison.md", page)
        write_whole(self._workdir / "comparison.csv", report.table_csv(rows, self._vary))
        if show:
            self._console.print("\n" + "\n".join(line for line in page.splitlines() if line.startswith("|")))
            self._console.print(f"\ncorrelation of replica spread and learning rate ({report.PAPERS_CORRELATION}):")
            for line in report.correlations(rows, self._vary):
                self._console.print(f"  {line}")
            self._console.print(f"\nwritten: {self._workdir / 'comparison.md'}, .csv and .png")


class _Progress:
    """Says how far a run is: on a terminal in a line that is overwritten, elsewhere in one an evaluation.

    Args:
      run: the run.
      label: what its lines begin with.
      folder: its workdir.
      console: where to print.
    """

    def __init__(self, run: Run, label: str, folder: Path, console: Console):
        self._run, self._label, self._console = run, label, console
        self._new_lines, self._started = NewLines(folder), time.monotonic()
        self._last: dict[str, dict[str, Any]] = {}  # the last line of every kind
        self._told: int | None = None  # the last evaluation that has a line

    def say(self) -> None:
        """Reads what is new and prints it."""
        try:
            lines, is_new_file = self._new_lines.read()
        except UserError:  # a broken line, which the trainer will tell of
            return
        if is_new_file:
            self._last = {}
        self._last |= {line["kind"]: line for line in lines}
        training, evaluation = self._last.get("train"), self._last.get("eval")
        evaluated = ""
        if evaluation:
            evaluated = f"perplexity {format_perplexity(evaluation['perplexity'])} at step {evaluation['step']}"
        if self._console.is_terminal and training:
            parts = [
                f"{self._label}  step {training['step']}/{self._run.config.num_steps}  "
                f"loss {or_infinity(training['loss']):.4f}",
                *([evaluated] if evaluated else []),
                format_tokens_per_second(training["tokens_per_second"] or 0),
            ]
            self._console.control(_CLEAR)
            self._console.print("  ".join(parts)[: self._console.width - 1], end="")
        elif evaluation and not self._console.is_terminal and evaluation["step"] != self._told:
            self._told = evaluation["step"]
            seconds = format_clock(time.monotonic() - self._started)
            self._console.print(f"{self._label}: {evaluated} of {self._run.config.num_steps}, {seconds}")
