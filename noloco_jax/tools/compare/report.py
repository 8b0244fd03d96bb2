"""Results of a comparison's finished runs, the figures of each variant over its seeds, their table and picture."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from noloco_jax.files import write_picture
from noloco_jax.formatting import format_bytes, format_count, format_spread, markdown_table, or_infinity
from noloco_jax.metrics.writer import METRICS_FILE, read_metrics
from noloco_jax.tools.compare.plan import ComparisonPlan, PlannedRun, Variant
from noloco_jax.train.bytes_sent import num_outer_steps

# Spreads below this part of the peak learning rate are rounding: ddp's, and diloco's right after an outer step.
_ROUNDING_SPREAD = 1e-4
_DASHES = ("-", "--", ":", "-.")
_MARKS = "os^vPX<>p*h"


@dataclass(frozen=True)
class RunResult:
    """Evaluations of a finished run, and the bytes that it sent.

    Attributes:
      curve: inner step -> perplexity, the mean of the replicas; infinite where it is not finite.
      figures: those of the last evaluation (`perplexity`, `perplexity_merged`, `replica_spread`) and `bytes_sent` by a
        replica in all; NaN where there is none.
    """

    curve: Mapping[int, float]
    figures: Mapping[str, float]

    @property
    def perplexity(self) -> float:
        return self.figures["perplexity"]


@dataclass(frozen=True)
class ComparisonRow:
    """A variant over its finished seeds, at its best value of the field that is tuned.

    Attributes:
      variant: the variant.
      reference: the variant that its gaps are above, or None.
      runs: one a seed.
      tokens: (E,) tokens trained on until each evaluation, by all replicas together.
      curves: (seed, E) perplexities, the mean of the replicas.
      figures: name -> an entry a seed, NaN where a run has no such figure: those of `RunResult`; `gap_percent` and
        `gap_merged_percent` above the reference's of the same seed; `bytes_share` of the reference's.
    """

    variant: Variant
    reference: Variant | None
    runs: Sequence[PlannedRun]
    tokens: np.ndarray
    curves: np.ndarray
    figures: Mapping[str, np.ndarray]


def results_of(runs: Iterable[PlannedRun], workdir: Path) -> dict[PlannedRun, RunResult]:
    """Read the results of the runs that are finished: their last step is evaluated in `workdir`/NAME."""
    found = {}
    for run in runs:
        lines = read_metrics(workdir / run.name) if (workdir / run.name / METRICS_FILE).exists() else []
        evals = [line for line in lines if line["kind"] == "eval"]
        if not evals or evals[-1]["step"] < run.config.num_steps:
            continue
        spread, sent = evals[-1]["replica_spread"], [line["bytes_sent_total"] for line in lines if "loss" in line]
        figures = {name: or_infinity(evals[-1][name]) for name in ("perplexity", "perplexity_merged")}
        figures["replica_spread"] = spread if spread and spread > _ROUNDING_SPREAD * run.config.inner.lr else math.nan
        figures["bytes_sent"] = float(sent[-1]) if sent else math.nan
        found[run] = RunResult({line["step"]: or_infinity(line["perplexity"]) for line in evals}, figures)
    return found


def make_rows(plan: ComparisonPlan, results: Mapping[PlannedRun, RunResult]) -> list[ComparisonRow]:
    """Return a row for every variant that has finished runs, in the order of the plan."""
    perplexities = {run: result.perplexity for run, result in results.items()}
    rows = []
    for variant in plan.variants:
        runs = [run for run in plan.chosen(variant, perplexities) if run in results]
        if not runs:
            continue
        reference = plan.references.get(variant)
        of_reference = plan.chosen(reference, perplexities) if reference is not None else []
        same_seed = {run.seed: results[run].figures for run in of_reference if run in results}
        of_seeds = [
            {**results[run].figures, **_gaps(results[run].figures, same_seed.get(run.seed, {}))} for run in runs
        ]
        curves = [results[run].curve for run in runs]
        rows.append(
            ComparisonRow(
                variant,
                reference,
                runs,
                tokens=np.array(list(curves[0])) * runs[0].config.tokens_per_step,
                curves=np.array([list(curve.values()) for curve in curves]),
                figures={name: np.array([of_seed[name] for of_seed in of_seeds]) for name in of_seeds[0]},
            )
        )
    return rows


def _gaps(own: Mapping[str, float], reference: Mapping[str, float]) -> dict[str, float]:
    """Return how far a run's perplexities are above its reference's, in percent, and its share of the bytes."""

    def ratio(name: str) -> float:
        other = reference.get(name, math.nan)
        return own[name] / other if math.isfinite(other) and other else math.nan

    return {
        "gap_percent": 100 * (ratio("perplexity") - 1),
        "gap_merged_percent": 100 * (ratio("perplexity_merged") - 1),
        "bytes_share": ratio("bytes_sent"),
    }


def mean_and_std(values: np.ndarray) -> tuple[float, float]:
    """Return mean and sample std of the entries that are not NaN; NaN for the mean of none and the std of fewer than 2.

    With an infinite one, of a run that diverged, the mean is infinite too.
    """
    there = values[~np.isnan(values)]
    if np.isinf(there).any():
        return math.inf, math.nan
    return (
        float(there.mean()) if len(there) else math.nan,
        float(there.std(ddof=1)) if len(there) > 1 else math.nan,
    )


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


def markdown(plan: ComparisonPlan, rows: Sequence[ComparisonRow], command: str, missing: Sequence[PlannedRun]) -> str:
    """Return the page of a comparison.

    Args:
      plan: the runs.
      rows: the finished runs.
      command: the command that makes the comparison.
      missing: runs that are known to be needed and are not finished.
    """
    parts = ["# Comparison", f"    {command}", comparison_table(plan, rows), _LEGEND, *remarks(plan, rows)]
    if missing:
        parts.append(f"Not finished: {', '.join(run.name for run in missing)}.")
    if rows:
        parts.append("![perplexity against tokens, and the gap to ddp against bytes](comparison.png)")
    return "\n\n".join(parts) + "\n"


def comparison_table(plan: ComparisonPlan, rows: Sequence[ComparisonRow]) -> str:
    """Return the table in Markdown."""
    tuned = [f"best {plan.tune.title}"] if plan.tune else []
    titles = ["variant", *(choices.title for choices in plan.vary), *tuned, "seeds", "outer steps"]
    lines = []
    for row in rows:
        values = {choices: value[0] for choices, value in row.variant.varied}
        own = [values.get(choices, "–") for choices in plan.vary]
        if plan.tune:
            value = row.runs[0].tuned
            own.append("–" if value is None else f"{value} (at the end)" if plan.is_at_end(value) else value)
        own += [str(len(row.runs)), str(num_outer_steps(row.runs[0].config) or "–")]
        figures = [_figure(row.figures[name], write, name not in _WITHOUT_DEVIATION) for _, name, write in _COLUMNS]
        lines.append([row.variant.title, *own, *figures])
    return markdown_table([*titles, *(title for title, _, _ in _COLUMNS)], lines, left=1 + len(plan.vary))


def remarks(plan: ComparisonPlan, rows: Sequence[ComparisonRow]) -> Iterator[str]:
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


def _figure(values: np.ndarray, write: Callable[[float], str], with_deviation: bool) -> str:
    mean, std = mean_and_std(values)
    if np.isinf(mean):
        return f"inf ({np.isinf(values).sum()} of {len(values)})" if len(values) > 1 else "inf"
    if np.isnan(mean):
        return "–"
    return f"{write(mean)} ± {write(std).lstrip('+')}" if with_deviation and std > 0 else write(mean)


def draw_comparison(rows: Sequence[ComparisonRow], path: Path) -> None:
    """Draw perplexity against tokens, and the gap to ddp against the bytes that a replica sends.

    A line is the mean over seeds, a band or bar goes from the least seed to the greatest. What sends nothing is a
    level, as the axis has no place for it.
    """
    from matplotlib import colormaps  # here: slow to import
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(13, 5), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2)
    titles = list(dict.fromkeys(row.variant.title for row in rows))
    for row in rows:
        color = colormaps["tab10"](titles.index(row.variant.title) % 10)
        place = [other.variant for other in rows if other.variant.title == row.variant.title].index(row.variant)
        last = mean_and_std(row.figures["perplexity"])[0]
        label = f"{row.variant.name}: {last:.2f}"
        left.plot(row.tokens, row.curves.mean(axis=0), color=color, linestyle=_DASHES[place % 4], label=label)
        low, high = row.curves.min(axis=0), row.curves.max(axis=0)
        left.fill_between(row.tokens, low, high, color=color, alpha=0.2, linewidth=0)
        gaps, sent = row.figures["gap_percent"], mean_and_std(row.figures["bytes_sent"])[0]
        gap = mean_and_std(gaps)[0]
        if not np.isfinite([gap, sent]).all():
            continue
        if sent == 0:
            right.axhline(gap, color=color, linestyle=":", label=f"{row.variant.name}, sends nothing")
            continue
        reach = [[gap - np.nanmin(gaps)], [np.nanmax(gaps) - gap]]
        mark = _MARKS[place % len(_MARKS)]
        right.errorbar(sent, gap, reach, color=color, marker=mark, markersize=8, capsize=3, linestyle="")
        right.annotate(row.variant.name, (sent, gap), (9, 4), textcoords="offset points", color=color, fontsize=9)

    last = np.concatenate([row.curves[:, len(row.tokens) // 4 :].ravel() for row in rows])  # the first ones dwarf it
    if np.isfinite(last).any():
        left.set_ylim(0.97 * last[np.isfinite(last)].min(), 1.03 * last[np.isfinite(last)].max())
    left.set_title("Validation perplexity, mean of the replicas")
    left.set_xlabel("tokens, all replicas together")
    left.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))
    right.set_title("Perplexity above ddp")
    right.set_xlabel("bytes that a replica sends in the whole run")
    right.set_ylabel("above ddp, %")
    right.set_xscale("log")
    right.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))
    for axes in (left, right):
        axes.grid(True, color="#e6e8ec", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=9)
    write_picture(path, figure)
