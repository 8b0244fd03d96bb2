"""The table of a comparison, as Markdown and as CSV."""

import csv
import io
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from noloco_jax.compare.plan import Plan, Run
from noloco_jax.compare.results import Row, mean_and_std
from noloco_jax.formatting import format_bytes, format_spread
from noloco_jax.methods import METHODS, schedule_of


def format_share(share: float) -> str:
    """Format a share of the bytes of data parallel training: `1/17`, `1/2.3`, `1.2 x`."""
    if share in (0, 1):
        return f"{share:g}"
    parts = 1 / share
    return f"{share:.3g} x" if share > 1 else f"1/{parts:.0f}" if parts >= 100 else f"1/{parts:.3g}"


# Of each column: its title, the figure in it, and how a number is written.
_COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("perplexity", "perplexity", lambda x: f"{x:.2f}" if x < 1e5 else f"{x:.4g}"),
    ("gap (%)", "gap_percent", lambda x: f"{x:+.2f}"),
    ("merged", "perplexity_merged", lambda x: f"{x:.2f}" if x < 1e5 else f"{x:.4g}"),
    ("merged's gap (%)", "gap_merged_percent", lambda x: f"{x:+.2f}"),
    ("sent per replica", "bytes_sent", format_bytes),
    ("share", "bytes_share", format_share),
    ("spread", "replica_spread", format_spread),
)
_WITHOUT_DEVIATION = ("bytes_sent", "bytes_share")  # equal for all seeds
_LEGEND = """\
Mean ± standard deviation over seeds. *perplexity*: at the last evaluation, the mean of the replicas; *merged*: of the
mean of their weights; *gap*: above the ddp of the same seed and inner optimizer; *sent*: bytes in the whole run, an
all-reduce counted as a ring; *share*: of that ddp's; *spread*: between the replicas' weights at the last evaluation."""


def markdown(plan: Plan, rows: Sequence[Row], command: str, picture: str | None, missing: Sequence[Run]) -> str:
    """Return the page of a comparison.

    Args:
      plan: which runs.
      rows: the finished runs.
      command: that makes the comparison.
      picture: file name of the picture, or None.
      missing: runs that are known to be needed and are not finished.
    """
    parts = ["# Comparison", f"    {command}", "\n".join(table(plan, rows)), _LEGEND, *remarks(plan, rows)]
    if missing:
        parts.append(f"Not finished: {', '.join(run.name for run in missing)}.")
    if picture is not None:
        parts.append(f"![perplexity against tokens, and the gap to ddp against bytes]({picture})")
    return "\n\n".join(parts) + "\n"


def table(plan: Plan, rows: Sequence[Row]) -> list[str]:
    """Return the lines of the table in Markdown."""
    tuned = [f"best {plan.tune.title}"] if plan.tune else []
    titles = ["variant", *(choices.title for choices in plan.vary), *tuned, "seeds", "outer steps"]
    titles += [title for title, _, _ in _COLUMNS]
    left = 1 + len(plan.vary)
    lines = [_line(titles), _line(["---"] * left + ["---:"] * (len(titles) - left))]
    for row in rows:
        own = [row.variant.value_of(choices) or "–" for choices in plan.vary]
        if plan.tune:
            value = row.runs[0].tuned
            own.append("–" if value is None else f"{value} (at the end)" if plan.is_at_end(value) else value)
        figures = [_figure(row.figures[name], write, name not in _WITHOUT_DEVIATION) for _, name, write in _COLUMNS]
        lines.append(_line([row.variant.title, *own, str(len(row.runs)), str(_outer_steps(row) or "–"), *figures]))
    return lines


def table_csv(plan: Plan, rows: Sequence[Row]) -> str:
    """Return the table as CSV for programs: a mean and a std of every figure, empty where there is none."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    own = [choices.title for choices in (*plan.vary, plan.tune) if choices]
    names = [f"{name}_{part}" for _, name, _ in _COLUMNS for part in ("mean", "std")]
    writer.writerow(["variant", "method", *own, "seeds", "outer_steps", *names])
    for row in rows:
        values = [row.variant.value_of(choices) or "" for choices in plan.vary]
        values += [row.runs[0].tuned or ""] if plan.tune else []
        figures = [number for _, name, _ in _COLUMNS for number in mean_and_std(row.figures[name])]
        written = ["" if np.isnan(number) else f"{number:.8g}" for number in figures]
        writer.writerow([row.variant.title, row.variant.method, *values, len(row.runs), _outer_steps(row), *written])
    return text.getvalue()


def remarks(plan: Plan, rows: Sequence[Row]) -> Iterator[str]:
    """Yield the notes on single variants that belong under the table."""
    ends = [f"{row.variant.name} ({row.runs[0].tuned})" for row in rows if plan.is_at_end(row.runs[0].tuned)]
    if plan.tune is not None and ends:
        yield f"Best at an end of the list of {plan.tune.title}, so extend --tune beyond it: {', '.join(ends)}."
    without = [row.runs[0].config.inner.optimizer for row in rows if row.reference is None]
    for optimizer in dict.fromkeys(without):
        yield (
            f"There is no ddp with inner.optimizer={optimizer!r}, so no gap: add "
            f"--variant=ddp-{optimizer}:method=ddp,inner.optimizer={optimizer}."
        )
    for row in rows:
        config, outer = row.runs[0].config, row.runs[0].config.outer
        is_of_all = METHODS[row.variant.method].equal_after_outer_steps and outer.fragments == 1 and not outer.delay
        if is_of_all and config.eval_every % outer.sync_every == config.num_steps % outer.sync_every == 0:
            yield f"{row.variant.name}'s replicas were evaluated right after outer steps alone, when they are equal."
    factors = {row.variant.title: METHODS[row.variant.method].sync_factor for row in rows if _varies_interval(row)}
    for title, factor in factors.items():
        if factor != 1:
            yield f"{title} takes {factor} x the outer.sync_every of the table."


def _varies_interval(row: Row) -> bool:
    return any("outer.sync_every" in choices.fields for choices, _ in row.variant.varied)


def _outer_steps(row: Row) -> int:
    config = row.runs[0].config
    schedule = schedule_of(config)
    return schedule.total(config.num_steps) if schedule is not None else 0


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _figure(values: np.ndarray, write: Callable[[float], str], with_deviation: bool) -> str:
    mean, std = mean_and_std(values)
    if np.isinf(mean):
        return f"inf ({np.isinf(values).sum()} of {len(values)})" if len(values) > 1 else "inf"
    if np.isnan(mean):
        return "–"
    return f"{write(mean)} ± {write(std).lstrip('+')}" if with_deviation and std > 0 else write(mean)
