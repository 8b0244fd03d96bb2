"""Console of a run: a banner, then a progress bar on a terminal or plain lines elsewhere."""

import contextlib
import io
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, cast

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress

from noloco_jax.errors import SILENT_SECONDS, tell
from noloco_jax.formatting import (
    format_clock,
    format_perplexity,
    format_seconds,
    format_spread,
    format_tokens_per_second,
    or_infinity,
)


def make_console() -> Console:
    """Make a console on standard output; rich detects a terminal. Text is shown literally, without markup."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may generate characters that the encoding lacks
    return Console(file=cast(IO[str], _StandardOutput()), highlight=False, markup=False, soft_wrap=True)


class _StandardOutput:
    """Wrapper of `sys.stdout` that lets a run continue when writing fails, as after `| head` or on a full disk."""

    def __init__(self):
        # While rich shows a bar, sys.stdout is a proxy of rich that writes to this stream.
        self._stream: IO[str] = getattr(sys.stdout, "rich_proxied_file", sys.stdout)
        self._is_lost = self._stream is None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._attempt("write", text)
        return len(text)

    def flush(self) -> None:
        self._attempt("flush")

    def isatty(self) -> bool:
        return not self._is_lost and self._stream.isatty()

    def _attempt(self, action: str, *arguments: str) -> None:
        if self._is_lost:
            return
        try:
            getattr(self._stream, action)(*arguments)
        except OSError as error:
            self._is_lost = True
            with contextlib.suppress(OSError):  # the buffered text would otherwise fail again at interpreter exit
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            tell(f"warning: standard output cannot be written ({error.strerror}): the command continues without it")


def banner(rows: Sequence[tuple[str, object]], console: Console | None = None) -> None:
    """Print (label, value) rows as an aligned block; further lines of a value are indented below its first."""
    console = console or make_console()
    width = max((len(label) for label, _ in rows), default=0)
    for label, value in rows:
        first, *others = str(value).splitlines() or [""]
        console.print(f"{label:<{width}}", style="bold cyan", end="  ")
        console.print(first)
        for line in others:
            console.print(" " * (width + 2) + line)
    console.print()


def by_source(values: Mapping[str, Any]) -> str:
    """Format the perplexity on each source of a mixture, to follow other figures in a line; empty for other data."""
    sources = values.get("perplexity_by_source", {})
    return "".join(f", on {name} {format_perplexity(perplexity)}" for name, perplexity in sources.items())


class Progress:
    """Progress of a run: one live line with a bar on a terminal, else a line every `log_every` steps.

    Evaluations and notes are lines of their own, above the bar. Close it, or use it as a context manager, to restore
    the terminal.

    Args:
      num_steps: the inner steps of the whole run.
      start_step: inner steps taken before this start.
      log_every: steps between lines of `update` without a terminal; where that takes long, the first comes earlier.
      console: where to print.
      clock: seconds, for the ETA.
    """

    def __init__(
        self,
        num_steps: int,
        *,
        start_step: int = 0,
        log_every: int = 1,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._num_steps, self._log_every, self._clock = num_steps, log_every, clock
        self._console = console or make_console()
        self._first: tuple[int, float] | None = None
        self._silent_since: float | None = clock()  # until the first line of `update`
        self._last_step = start_step
        self._bar = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._bar = RichProgress(
                TextColumn("{task.fields[where]}", markup=False),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[figures]}", markup=False),
                console=self._console,
                refresh_per_second=4,
                expand=True,
            )
            self._task = self._bar.add_task(
                "", total=num_steps, completed=start_step, where=self._where(start_step), figures="compiling"
            )
            self._bar.start()

    def update(
        self,
        step: int,
        loss: float,
        lr: float,
        tokens_per_second: float,
        num_outer_steps: int = 0,
        outer_seconds: float = 0.0,
    ) -> None:
        """Report a finished training step: its loss, its learning rate and the current throughput.

        With it go the number of outer steps since they were last reported, and their seconds, 0 if unknown.
        """
        if self._first is None:
            self._first = (step, self._clock())
        figures = f"loss {loss:.4f}  lr {lr:.2e}  {format_tokens_per_second(tokens_per_second)}  ETA {self._eta(step)}"
        if num_outer_steps:
            figures += f"  {num_outer_steps} outer step{'s' * (num_outer_steps > 1)}"
            figures += f" in {format_seconds(outer_seconds)}" if outer_seconds else ""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, where=self._where(step), figures=figures)
        elif step // self._log_every > self._last_step // self._log_every or step == self._num_steps or self._is_late():
            self._silent_since = None
            self.note(f"{self._where(step)}  {figures}")
        self._last_step = step

    def _is_late(self) -> bool:
        """Return True if the first line has been waited for so long that any step shall be one."""
        return self._silent_since is not None and self._clock() - self._silent_since >= SILENT_SECONDS

    def evaluation(self, step: int, values: Mapping[str, Any]) -> None:
        """Report an evaluation: the perplexity, and of replicas that differ their range, merged model and spread.

        Args:
          step: its inner step.
          values: as `evaluate` returns them and metrics.jsonl has them; for an island, which has one replica, as
            `evaluate_alone` does, with `island`, its name.
        """
        text = f"{self._where(step)}  perplexity {format_perplexity(values['perplexity'])}"
        if "island" in values:
            text += f" of island {values['island']}"
        elif values["replica_spread"] != 0:
            replicas = sorted(values["perplexity_replicas"], key=or_infinity)
            text += f" (replicas {format_perplexity(replicas[0])} to {format_perplexity(replicas[-1])}), merged "
            text += (
                f"{format_perplexity(values['perplexity_merged'])}, spread {format_spread(values['replica_spread'])}"
            )
        self.note(text + by_source(values))

    def note(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        self._console.print(text)

    def close(self) -> None:
        """Stop the live line; its last state stays visible."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _where(self, step: int) -> str:
        return f"step {step:>{len(str(self._num_steps))}}/{self._num_steps}"

    def _eta(self, step: int) -> str:
        """Estimate the remaining time from the mean time of this start's steps, evaluations included."""
        assert self._first is not None
        first, start = self._first
        if step == first:
            return "-:--"
        return format_clock((self._clock() - start) / (step - first) * (self._num_steps - step))
