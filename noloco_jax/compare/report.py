"""The table of a comparison, as Markdown and as CSV."""

import csv
import io
from collections.abc import Callable, Sequence

import numpy as np

from noloco_jax.compare.plan import Run
from noloco_jax.compare.results import Row, mean_and_std
from noloco_jax.formatting import format_bytes, format_spread
from noloco_jax.methods import METHODS
from noloco_jax.run.messages import num_outer_steps

# Methods whose replicas are equal right after an outer step.
PAPERS_CORRELATION = "the paper finds 0.91 to 0.97"

# Of each column: its title, the figure in it, and how a number is written.
_COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("perplexity", "perplexity", lambda x: f"{x:.2f}"),
    ("gap to ddp (%)", "gap_percent", lambda x: f"{x:+.2f}"),
    ("merged", "perplexity_merged", lambda x: f"{x:.2f}"),
    ("merged's gap (%)", "gap_merged_percent", lambda x: f"{x:+.2f}"),
    ("spread", "replica_spread", format_spread),
    ("sent per replica", "bytes_sent", format_bytes),
    ("spread and learning rate", "spread_lr_correlation", lambda x: f"{x:.3f}"),
)


def markdown(rows: Sequence[Row], vary: str | None, command: str, picture: str | None, missing: Sequence[Run]) -> str:
    """The page of a comparison.

    Args:
      rows: what is finished.
      vary: the field that varies.
      command: that makes the comparison.
      picture: file name of the picture, or None.
      missing: runs that are not finished.
    """
    lines = ["# Comparison", "", f"    {command}", ""]
    if rows:
        lines += [_setting(rows, vary), ""]
    titles = ["method", *([vary] if vary else []), "seeds", "outer steps", *(title for title, _, _ in _COLUMNS)]
    lines += [_line(titles), _line(["---"] * (1 + bool(vary)) + ["---:"] * (len(_COLUMNS) + 2))]
    lines += [_line(_cells(row, vary)) for row in rows]
    lines += [
        "",
        "Mean ± standard deviation over seeds. *perplexity*: at the last evaluation, exp of the token loss averaged",
        "over the replicas; *merged*: of the mean of the replicas' weights; *gap*: above ddp's of the same seed;",
        "*spread*: between replicas' weights at the last evaluation, – where they are equal but for rounding; *sent*:",
        "bytes in the whole run, an all-reduce counted as a ring; *spread and learning rate*: Pearson's correlation",
        f"over the evaluations after the warmup ({PAPERS_CORRELATION}).",
    ]
    for method in dict.fromkeys(row.method for row in rows if _evaluated_when_equal(row.runs[0])):
        lines += ["", f"{method}'s replicas were evaluated right after outer steps alone, when they are equal."]
    if vary == "outer.sync_every":
        for method in dict.fromkeys(row.method for row in rows if METHODS[row.method].sync_factor != 1 and row.value):
            lines += ["", f"{method} takes {METHODS[method].sync_factor} x the {vary} of the table."]
    if missing:
        lines += ["", f"Not finished: {', '.join(run.name for run in missing)}."]
    if picture:
        lines += ["", f"![validation perplexity and replica spread]({picture})"]
    return "\n".join(lines) + "\n"


def _setting(rows: Sequence[Row], vary: str | None) -> str:
    config = rows[0].runs[0].config
    model, data = config.model, config.data
    return (
        f"Hidden size {model.hidden_size}, {model.num_layers} layers, {config.num_replicas} replicas x "
        f"{data.batch_size} sequences x {data.sequence_length} tokens, {config.num_steps} steps "
        f"({rows[0].curves[0].tokens[-1]:,} tokens), inner lr {config.inner.lr:g}, {data.kind} data"
        + (f"; {vary} as in the table." if vary else ".")
    )


def _evaluated_when_equal(run: Run) -> bool:
    """Whether a run's replicas are equal at each of its evaluations, for each follows an outer step."""
    every, config = run.config.outer.sync_every, run.config
    return METHODS[run.method].equal_after_outer_steps and config.eval_every % every == config.num_steps % every == 0


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(row: Row, vary: str | None) -> list[str]:
    value = [row.value or "–"] if vary else []
    meetings = num_outer_steps(row.runs[0].config)
    figures = [_figure(row.figures[name], write) for _, name, write in _COLUMNS]
    return [row.method, *value, str(len(row.runs)), str(meetings) if meetings else "–", *figures]


def _figure(values: np.ndarray, write: Callable[[float], str]) -> str:
    mean, std = mean_and_std(values)
    if not np.isfinite(mean):
        return "–"
    return f"{write(mean)} ± {write(std).lstrip('+')}" if std > 0 else write(mean)


def table_csv(rows: Sequence[Row], vary: str | None) -> str:
    """The same table for programs: a mean and a std of every figure, empty where there is none."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [f"{name}_{part}" for _, name, _ in _COLUMNS for part in ("mean", "std")]
    writer.writerow(["method", *([vary] if vary else []), "seeds", "outer_steps", *names])
    for row in rows:
        numbers = [number for _, name, _ in _COLUMNS for number in mean_and_std(row.figures[name])]
        value = [row.value or ""] if vary else []
        cells = [f"{number:.8g}" if np.isfinite(number) else "" for number in numbers]
        writer.writerow([row.method, *value, len(row.runs), num_outer_steps(row.runs[0].config), *cells])
    return text.getvalue()


def correlations(rows: Sequence[Row], vary: str | None) -> list[str]:
    """A line for each row on how replica spread goes with the learning rate."""
    lines = []
    for row in rows:
        name = row.method + (f" with {vary}={row.value}" if row.value else "")
        written = _figure(row.figures["spread_lr_correlation"], lambda x: f"{x:.3f}")
        lines.append(f"{name}: {written}")
    return lines
