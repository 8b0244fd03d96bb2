"""The table of a comparison, as Markdown and as CSV."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from noloco_jax.compare.law import Law, predictions
from noloco_jax.compare.plan import Plan, Run
from noloco_jax.compare.rows import Row, Worth, mean_and_std, worths
from noloco_jax.compare.variants import Choices
from noloco_jax.formatting import format_bytes, format_spread
from noloco_jax.methods import METHODS
from noloco_jax.train.messages import num_outer_steps

PAPERS_CORRELATION = "the paper finds 0.91 to 0.97"


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
    ("spread and learning rate", "spread_lr_correlation", lambda x: f"{x:.3f}"),
)
_NOT_BRIEF = ("replica_spread", "spread_lr_correlation")
_WITHOUT_DEVIATION = ("bytes_sent", "bytes_share")  # equal for all seeds


def markdown(
    plan: Plan,
    rows: Sequence[Row],
    command: str,
    pictures: Mapping[str, str],
    missing: Sequence[Run],
    laws: Sequence[Law] = (),
) -> str:
    """The page of a comparison.

    Args:
      plan: which runs.
      rows: the finished runs.
      command: that makes the comparison.
      pictures: what a picture shows -> its file name.
      missing: runs that are known to be needed and are not finished.
      laws: of the gap.
    """
    lines = ["# Comparison", "", f"    {command}", ""]
    if rows:
        lines += [_setting(plan, rows), ""]
    lines += table(plan, rows)
    lines += [
        "",
        "Mean ± standard deviation over seeds. *perplexity*: at the last evaluation, exp of the token loss averaged",
        "over the replicas; *merged*: of the mean of the replicas' weights; *gap*: above the reference's of the same",
        "seed, which is the ddp with the same inner optimizer or what the variant names; *sent*: bytes in the whole",
        "run, an all-reduce counted as a ring; *share*: of the reference's bytes; *what its bytes buy*: by how many",
        "points the gap is below that of the next cheaper variant that nothing beats, or what beats it by no more",
        "bytes and a smaller gap; *spread*: between replicas' weights at the last evaluation, – where they are equal",
        "but for rounding; *spread and learning rate*: Pearson's correlation over the evaluations after the warmup",
        f"({PAPERS_CORRELATION}).",
    ]
    for remark in remarks(plan, rows):
        lines += ["", remark]
    for law in laws:
        lines += ["", f"{law}."]
    expected = list(predictions(plan, rows, laws))
    if expected:
        lines += ["", f"Expected by that, with an error of 1 sigma: {'; '.join(expected)}."]
    if missing:
        lines += ["", f"Not finished: {', '.join(run.name for run in missing)}."]
    for shown, file in pictures.items():
        lines += ["", f"![{shown}]({file})"]
    return "\n".join(lines) + "\n"


def table(plan: Plan, rows: Sequence[Row], brief: bool = False) -> list[str]:
    """The lines of the table; `brief` keeps the columns of perplexity and bytes."""
    columns = [column for column in _COLUMNS if not (brief and column[1] in _NOT_BRIEF)]
    titles = ["variant", *_own_titles(plan, rows), "seeds", "outer steps", *(title for title, _, _ in columns)]
    titles.append("what its bytes buy")
    left = 1 + len(plan.vary)
    lines = [_line(titles), _line(["---"] * left + ["---:"] * (len(titles) - left - 1) + ["---"])]
    for row, worth in zip(rows, worths(rows), strict=True):
        meetings = num_outer_steps(row.runs[0].config)
        figures = [_figure(row.figures[name], write, name not in _WITHOUT_DEVIATION) for _, name, write in columns]
        cells = [row.variant.title, *_own_cells(plan, rows, row), str(len(row.runs)), str(meetings or "–"), *figures]
        lines.append(_line([*cells, _bought(worth)]))
    return lines


def _own_titles(plan: Plan, rows: Sequence[Row]) -> list[str]:
    """Columns that not every comparison has."""
    choices = [choices.title() for choices in plan.vary]
    choices += [f"best {plan.tune.title()}"] if plan.tune else []
    return [*choices, *(["reference"] if _has_references(rows) else [])]


def _own_cells(plan: Plan, rows: Sequence[Row], row: Row) -> list[str]:
    cells = [_value(row, choices) or "–" for choices in plan.vary]
    if plan.tune:
        cells.append("–" if row.tuned is None else f"{row.tuned} (at the end)" if row.is_at_end else row.tuned)
    return [*cells, *([row.reference or "–"] if _has_references(rows) else [])]


def _value(row: Row, choices: Choices) -> str:
    value = row.variant.value_of(choices)
    return "" if value is None else choices.title(value)


def _has_references(rows: Sequence[Row]) -> bool:
    """Return True with more than one reference, which the table then names."""
    return len({row.reference for row in rows}) > 1


def _bought(worth: Worth) -> str:
    if worth.beaten_by is not None:
        return f"beaten by {worth.beaten_by}"
    if worth.cheaper is None or not np.isfinite(worth.points):
        return "–"
    return f"{worth.points:.1f} points for {worth.times:.3g} x the bytes of {worth.cheaper}"


def remarks(plan: Plan, rows: Sequence[Row]) -> list[str]:
    """Return the notes on single variants that belong under the table."""
    said = []
    ends = [f"{row.label} ({row.tuned})" for row in rows if row.is_at_end]
    if plan.tune is not None and ends:
        said.append(f"Best at an end of the list of {plan.tune.field}, so extend --tune beyond it: {', '.join(ends)}.")
    for optimizer in dict.fromkeys(
        row.runs[0].config.inner.optimizer for row in rows if row.variant not in plan.references
    ):
        said.append(
            f"There is no ddp with inner.optimizer={optimizer!r}, so no gap: add "
            f"--variant=ddp-{optimizer}:method=ddp,inner.optimizer={optimizer}."
        )
    said += [
        f"{row.label}'s replicas were evaluated right after outer steps alone, when they are equal."
        for row in rows
        if _evaluated_when_equal(row.runs[0])
    ]
    said += [
        f"{row.label} takes no outer step in {row.runs[0].config.num_steps} steps, so its replicas never met."
        for row in rows
        if METHODS[row.variant.method].has_outer_steps and not num_outer_steps(row.runs[0].config)
    ]
    for choices in plan.vary:
        if "outer.sync_every" in choices.fields:
            varied = [row.variant for row in rows if row.variant.value_of(choices)]
            factors = {variant.title: METHODS[variant.method].sync_factor for variant in varied}
            said += [
                f"{title} takes {factor} x the outer.sync_every of the table."
                for title, factor in factors.items()
                if factor != 1
            ]
    return said


def _setting(plan: Plan, rows: Sequence[Row]) -> str:
    usual = next((row for row in rows if not row.variant.settings), rows[0])  # what variants set is listed behind it
    config = usual.runs[0].config
    model, data = config.model, config.data
    rates = {row.runs[0].config.inner.lr for row in rows}
    text = (
        f"Hidden size {model.hidden_size}, {model.num_layers} layers, {config.num_replicas} replicas x "
        f"{data.batch_size} sequences x {data.sequence_length} tokens, {config.num_steps} steps "
        f"({usual.curves[0].tokens[-1]:,} tokens), "
        + (f"inner lr {config.inner.lr:g}, " if len(rates) == 1 else "")
        + f"{data.kind} data"
    )
    text += "".join(f"; {choices.field} as in the table" for choices in plan.vary)
    settings = {row.variant.title: row.variant for row in rows if row.variant.settings}
    text += "".join(f"; {title}: {variant.written}" for title, variant in settings.items())
    if plan.tune:
        values = ", ".join(plan.tune.values)
        text += f"; {plan.tune.field} of {values}, by the perplexity of seed {plan.seeds[0]}"
    return text + "."


def _evaluated_when_equal(run: Run) -> bool:
    """Return True if each evaluation follows an outer step of all replicas, which makes them equal."""
    config, outer = run.config, run.config.outer
    is_of_all = outer.fragments == 1 and not outer.delay
    return (
        METHODS[run.variant.method].equal_after_outer_steps
        and is_of_all
        and config.eval_every % outer.sync_every == config.num_steps % outer.sync_every == 0
    )


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _figure(values: np.ndarray, write: Callable[[float], str], with_deviation: bool = True) -> str:
    mean, std = mean_and_std(values)
    if np.isinf(mean):
        return f"inf ({np.isinf(values).sum()} of {len(values)})" if len(values) > 1 else "inf"
    if np.isnan(mean):
        return "–"
    return f"{write(mean)} ± {write(std).lstrip('+')}" if with_deviation and std > 0 else write(mean)


def table_csv(plan: Plan, rows: Sequence[Row]) -> str:
    """Return the table as CSV for programs: a mean and a std of every figure, empty where there is none."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    own = [choices.title() for choices in (*plan.vary, plan.tune) if choices]
    ends = ["tuned_at_end"] if plan.tune else []
    names = [f"{name}_{part}" for _, name, _ in _COLUMNS for part in ("mean", "std")]
    bought = ["beaten_by", "cheaper", "points_below_cheaper", "times_bytes_of_cheaper"]
    writer.writerow(["variant", "method", *own, *ends, "reference", "seeds", "outer_steps", *names, *bought])
    for row, worth in zip(rows, worths(rows), strict=True):
        values = [_value_taken(row, choices) for choices in plan.vary]
        values += [row.tuned or "", str(row.is_at_end).lower()] if plan.tune else []
        of_row = [row.variant.title, row.variant.method, *values, row.reference or "", len(row.runs)]
        figures = [_number(number) for _, name, _ in _COLUMNS for number in mean_and_std(row.figures[name])]
        bought = [worth.beaten_by or "", worth.cheaper or "", _number(worth.points), _number(worth.times)]
        writer.writerow([*of_row, num_outer_steps(row.runs[0].config), *figures, *bought])
    return text.getvalue()


def _value_taken(row: Row, choices: Choices) -> str:
    """Return a row's value of a varied field; of `outer.sync_every` the one that its method makes of it."""
    value = _value(row, choices)
    return str(row.runs[0].config.outer.sync_every) if value and choices.title() == "outer.sync_every" else value


def _number(value: float) -> str:
    return "" if np.isnan(value) else f"{value:.8g}"


def correlations(rows: Sequence[Row]) -> list[str]:
    """Return a line for each row: the correlation of replica spread with the learning rate."""
    return [f"{row.label}: {_figure(row.figures['spread_lr_correlation'], lambda x: f'{x:.3f}')}" for row in rows]
