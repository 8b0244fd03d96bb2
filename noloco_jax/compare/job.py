"""One run of a comparison as it trains, in a process of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from noloco_jax.cluster.workdir_lock import try_lock
from noloco_jax.compare.others import LOG_FILE
from noloco_jax.compare.plan import Run
from noloco_jax.config import to_dict
from noloco_jax.cores import keep_on
from noloco_jax.errors import UserError
from noloco_jax.files import write_whole
from noloco_jax.formatting import format_clock, format_perplexity, format_tokens_per_second, or_infinity
from noloco_jax.metrics.writer import METRICS_FILE, NewLines

PLANNED_FILE = "planned.json"  # the configuration that a run was planned with, whatever becomes of the config file


class TakenError(Exception):
    """Another process trains the run."""


class Job:
    """The trainer of a run, started at once.

    Args:
      run: the run to train.
      folder: its workdir.
      label: the beginning of every line printed about it.
      arguments: of the Python interpreter.
      cores: that it may use; all where there are none.
      environment: variables that are its own.

    Raises:
      TakenError: if another process trains in the folder.
    """

    def __init__(
        self,
        run: Run,
        folder: Path,
        label: str,
        arguments: Sequence[str],
        cores: frozenset[int] = frozenset(),
        environment: Mapping[str, str] | None = None,
    ):
        self.run, self.label, self._folder = run, label, folder
        folder.mkdir(parents=True, exist_ok=True)
        self._started, self._is_new = time.monotonic(), not (folder / METRICS_FILE).exists()
        self.progress = Progress(run, label, folder)
        with (folder / LOG_FILE).open("a") as log:
            if try_lock(log.fileno()) is False:  # the trainer inherits it, and may outlive us
                raise TakenError
            write_whole(folder / PLANNED_FILE, json.dumps(to_dict(run.config)))
            # In a session of its own, so that Ctrl-C comes to it once, through this process.
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )
        if cores:  # before it has threads, which inherit them; XLA makes as many as it may use
            keep_on(self._process.pid, cores)

    @property
    def status(self) -> int | None:
        """The exit status; None while it trains."""
        return self._process.poll()

    def send(self, number: int) -> None:
        """Send a signal; of SIGTERM and SIGINT it stops with everything saved."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def end(self, patience: float = 600.0) -> None:
        """Stop it, with everything saved if that takes no more than `patience` seconds, and wait for its end."""
        self.send(signal.SIGTERM)
        try:
            self._process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def seconds_beside(self, training: float) -> float | None:
        """Return the seconds since the start beside those of `training`; None for a resumed run, whose were before."""
        return max(time.monotonic() - self._started - training, 0.0) if self._is_new else None

    def failure(self) -> str:
        """Return the last words of a run that ended early.

        Raises:
          UserError: if it never began for a mistake, for then the others will not either. Other reasons, as too little
            memory for this variant, are its own.
        """
        log = self._folder / LOG_FILE
        last = (log.read_text(errors="replace").strip().splitlines() or ["no word"])[-1].removeprefix("error: ")
        if self.status == UserError.exit_status and not (self._folder / METRICS_FILE).exists():
            raise UserError(f"{self.run.name} did not start (status {self.status}): {last} ({log})")
        return f"status {self.status}: {last} ({log})"


class Progress:
    """Progress of a run.

    Args:
      run: the run.
      label: the beginning of its lines.
      folder: its workdir.
    """

    def __init__(self, run: Run, label: str, folder: Path):
        self._run, self._label = run, label
        self._new_lines, self._started = NewLines(folder), time.monotonic()
        self._last: dict[str, dict[str, Any]] = {}  # the last line of every kind
        self._told: int | None = None  # the last evaluation that has a line

    def read(self) -> None:
        """Read the new lines of the run's metrics."""
        try:
            lines, is_new_file = self._new_lines.read()
        except UserError:  # a broken line, which the trainer will tell of
            return
        if is_new_file:
            self._last = {}
        self._last |= {line["kind"]: line for line in lines}

    @property
    def line(self) -> str:
        """The line for a terminal, where the next one replaces it."""
        parts, training = [self._label], self._last.get("train")
        if training is None:
            return f"{self._label}  starting"
        parts.append(f"step {training['step']}/{self._run.config.num_steps}")
        parts.append(f"loss {or_infinity(training['loss']):.4f}")
        if "eval" in self._last:
            parts.append(self._evaluated())
        return "  ".join([*parts, format_tokens_per_second(training["tokens_per_second"] or 0)])

    def news(self) -> str | None:
        """Return a line for a log once an evaluation; None in between."""
        evaluation = self._last.get("eval")
        if evaluation is None or evaluation["step"] == self._told:
            return None
        self._told = evaluation["step"]
        seconds = format_clock(time.monotonic() - self._started)
        return f"{self._label}: {self._evaluated()} of {self._run.config.num_steps}, {seconds}"

    def _evaluated(self) -> str:
        evaluation = self._last["eval"]
        return f"perplexity {format_perplexity(evaluation['perplexity'])} at step {evaluation['step']}"
