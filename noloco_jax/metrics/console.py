"""Console of a run: a banner, a progress bar on a terminal or plain lines elsewhere, and the results table."""

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
from rich.table import Table

from noloco_jax.errors import tell
from noloco_jax.formatting import (
    format_clock,
    format_perplexity,
    format_seconds,
    format_spread,
    format_tokens_per_second,
    or_infinity,
)
from noloco_jax.patience import SILENT_SECONDS

_MANY = 16  # the most replicas or groups that are shown one by one


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
        if not self._is_lost:
            try:
                return self._stream.write(text)
            except OSError as error:
                self._give_up(error)
        return len(text)

    def flush(self) -> None:
        if not self._is_lost:
            try:
                self._stream.flush()
            except OSError as error:
                self._give_up(error)

    def isatty(self) -> bool:
        return not self._is_lost and self._stream.isatty()

    def _give_up(self, error: OSError) -> None:
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


def results_table(values: Mapping[str, Any], console: Console | None = None) -> None:
    """Print an evaluation: the perplexity of each replica, their mean, the merged model's, and the replica spread.

    Args:
      values: as `evaluate` returns them and metrics.jsonl has them, each source of a mixture in a column of its own;
        for an island, which has one replica, as `evaluate_alone` does, with `island`, its name.
      console: where to print.
    """
    table = Table("model", title="validation", title_justify="left", title_style="bold")
    for name in ("perplexity", *values.get("perplexity_by_source", ())):
        table.add_column(name, justify="right")
    if "island" in values:
        table.add_row(f"island {values['island']}", *_perplexities(values, "perplexity"))
    else:
        _add_replicas(table, values)
    (console or make_console()).print(table)


def by_source(values: Mapping[str, Any]) -> str:
    """Format the perplexity on each source of a mixture, to follow other figures in a line; empty for other data."""
    sources = values.get("perplexity_by_source", {})
    return "".join(f", on {name} {format_perplexity(perplexity)}" for name, perplexity in sources.items())


def _perplexities(values: Mapping[str, Any], name: str) -> list[str]:
    """Format a perplexity and those of the sources of a mixture."""
    return [*map(format_perplexity, (values[name], *values.get(f"{name}_by_source", {}).values()))]


def _add_replicas(table: Table, values: Mapping[str, Any]) -> None:
    replicas = values["perplexity_replicas"]
    if len(replicas) <= _MANY:
        for index, perplexity in enumerate(replicas):
            table.add_row(f"replica {index}", format_perplexity(perplexity))
    else:
        table.add_row(f"best of {len(replicas)} replicas", format_perplexity(min(replicas, key=or_infinity)))
        table.add_row(f"worst of {len(replicas)} replicas", format_perplexity(max(replicas, key=or_infinity)))
    table.add_section()
    table.add_row("mean of the replicas", *_perplexities(values, "perplexity"))
    table.add_row("merged model", *_perplexities(values, "perplexity_merged"), style="bold")
    table.add_section()
    table.add_row("replica spread", format_spread(values["replica_spread"]))


def _groups(groups: Sequence[Sequence[int]]) -> str:
    """Format groups as 0-2 1-3; a single replica in parentheses."""
    texts = []
    for group in groups:
        if len(group) == 1:
            texts.append(f"({group[0]})")
        elif len(group) <= _MANY:
            texts.append("-".join(str(replica) for replica in group))
        else:
            texts.append(f"{len(group)} replicas")
    more = f" and {len(texts) - _MANY} more groups" if len(texts) > _MANY else ""
    return " ".join(texts[:_MANY]) + more


class Progress:
    """Progress of a run: one live line with a bar on a terminal, else a line every `log_every` steps.

    Outer steps, evaluations and notes are lines of their own, above the bar. Close it, or use it as a context manager,
    to restore the terminal.

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

    def update(self, step: int, loss: float, lr: float, tokens_per_second: float) -> None:
        """Report a finished training step: its loss, its learning rate and the current throughput."""
        if self._first is None:
            self._first = (step, self._clock())
        figures = f"loss {loss:.4f}  lr {lr:.2e}  {format_tokens_per_second(tokens_per_second)}  ETA {self._eta(step)}"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, where=self._where(step), figures=figures)
        elif step // self._log_every > self._last_step // self._log_every or step == self._num_steps or self._is_late():
            self._silent_since = None
            self.note(f"{self._where(step)}  {figures}")
        self._last_step = step

    def _is_late(self) -> bool:
        """Return True if the first line has been waited for so long that any step shall be one."""
        return self._silent_since is not None and self._clock() - self._silent_since >= SILENT_SECONDS

    def outer(self, step: int, count: int, last: int, groups: Sequence[Sequence[int]], seconds: float) -> None:
        """Report `count` outer steps: the number (from 0) and groups of the last one, and the seconds of all."""
        taken = format_seconds(seconds)
        if count == 1:
            self.note(f"{self._where(step)}  outer step {last + 1}: {_groups(groups)}, {taken}")
            return
        what = f"outer steps {last + 2 - count} to {last + 1}, the last: {_groups(groups)}"
        self.note(f"{self._where(step)}  {what}, {taken} in all")

    def evaluation(self, step: int, values: Mapping[str, Any]) -> None:
        """Report an evaluation; `values` as for `results_table`."""
        text = f"{self._where(step)}  perplexity {format_perplexity(values['perplexity'])}"
        if "island" in values:
            self.note(f"{text} of island {values['island']}{by_source(values)}")
            return
        replicas = sorted(values["perplexity_replicas"], key=or_infinity)
        self.note(
            f"{text} (replicas {format_perplexity(replicas[0])} to {format_perplexity(replicas[-1])}), "
            f"merged {format_perplexity(values['perplexity_merged'])}, spread {format_spread(values['replica_spread'])}"
            f"{by_source(values)}"
        )

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
