"""Figures of each variant over the seeds, against its reference, and the worth of its bytes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from noloco_jax.compare.plan import Plan, Run, at_end
from noloco_jax.compare.results import Curve, bytes_sent, correlation, last_perplexities, read_curve
from noloco_jax.compare.variants import Variant


@dataclass(frozen=True)
class Row:
    """A variant over its finished seeds, at its best value of the field that is tuned.

    Attributes:
      variant: the variant.
      reference: the title of the variant that its gaps are above, or None.
      runs: one a seed, and
      curves: their evaluations.
      figures: name -> an entry a seed, NaN where a run has no such figure. Last evaluations: `perplexity`,
        `perplexity_merged`, `replica_spread`; `gap_percent`, `gap_merged_percent`: above the reference's of the same
        seed; `bytes_sent`: by a replica in all; `bytes_share`: of the reference's; `spread_lr_correlation`.
      tuned: the best value of the tuned field, as written, or None where none is.
      is_at_end: whether that is the least or the greatest value, so that a better one may lie beyond.
    """

    variant: Variant
    reference: str | None
    runs: Sequence[Run]
    curves: Sequence[Curve]
    figures: Mapping[str, np.ndarray]
    tuned: str | None
    is_at_end: bool

    @property
    def label(self) -> str:
        return self.variant.name


def mean_and_std(values: np.ndarray) -> tuple[float, float]:
    """Return mean and sample std of the entries that are not NaN; NaN for the mean of none and the std of fewer than 2.

    With an infinite one, of a run that diverged, the mean is infinite too.
    """
    there = values[~np.isnan(values)]
    if np.isinf(there).any():
        return math.inf, math.nan
    return (
        float(there.mean()) if len(there) else float("nan"),
        float(there.std(ddof=1)) if len(there) > 1 else float("nan"),
    )


def make_rows(plan: Plan, workdir: Path) -> list[Row]:
    """Return a row for every variant that has finished runs, in the order of the plan."""
    perplexities = last_perplexities(plan.runs, workdir)
    chosen = {variant: plan.chosen(variant, perplexities) for variant in plan.variants}
    rows = []
    for variant in plan.variants:
        runs, reference = chosen[variant], plan.references.get(variant)
        if not runs:
            continue
        curves = [read_curve(run, workdir) for run in runs]
        same_seed = {run.seed: run for run in chosen[reference]} if reference is not None else {}
        references = [same_seed.get(run.seed) for run in runs]
        reference_curves = [read_curve(run, workdir) if run else None for run in references]
        pairs = list(zip(curves, reference_curves, strict=True))
        sent = [bytes_sent(workdir / run.name) for run in runs]
        of_references = [bytes_sent(workdir / run.name) if run else math.nan for run in references]
        figures = {
            "perplexity": [_or_inf(curve.perplexity[-1]) for curve in curves],
            "perplexity_merged": [_or_inf(curve.merged[-1]) for curve in curves],
            "gap_percent": [_gap(curve.perplexity, ref.perplexity) if ref else math.nan for curve, ref in pairs],
            "gap_merged_percent": [_gap(curve.merged, ref.merged) if ref else math.nan for curve, ref in pairs],
            "replica_spread": [curve.spread[-1] for curve in curves],
            "bytes_sent": sent,
            "bytes_share": [
                mine / other if other else math.nan for mine, other in zip(sent, of_references, strict=True)
            ],
            "spread_lr_correlation": [
                correlation(curve, run.config.inner.warmup_steps) for run, curve in zip(runs, curves, strict=True)
            ],
        }
        tuned = runs[0].tuned
        rows.append(
            Row(
                variant,
                reference.name if reference is not None else None,
                runs,
                curves,
                {name: np.array(values, float) for name, values in figures.items()},
                tuned,
                plan.tune is not None and tuned is not None and at_end(plan.tune, tuned),
            )
        )
    return rows


def _gap(values: np.ndarray, reference: np.ndarray) -> float:
    """Return the last perplexity's distance above a reference's, in percent; NaN where the reference diverged."""
    return 100 * (_or_inf(values[-1]) / reference[-1] - 1)


def _or_inf(perplexity: float) -> float:
    """Return a perplexity that is not finite, which curves have as NaN, as infinite."""
    return perplexity if math.isfinite(perplexity) else math.inf


@dataclass(frozen=True)
class Worth:
    """Worth of a variant's bytes, by mean gaps and among the variants with the same reference.

    Attributes:
      beaten_by: the variant that sends no more and has the least gap, where that is smaller; None where there is none.
      cheaper: the next cheaper variant that is not beaten, where this one is not either and both send something.
      points: percentage points of its gap below that one's.
      times: its bytes over that one's.
    """

    beaten_by: str | None
    cheaper: str | None = None
    points: float = math.nan
    times: float = math.nan


def worths(rows: Sequence[Row]) -> list[Worth]:
    """Return the worth of every row's bytes."""
    sent = [mean_and_std(row.figures["bytes_sent"])[0] for row in rows]
    gaps = [mean_and_std(row.figures["gap_percent"])[0] for row in rows]

    def best_of_as_cheap(index: int) -> int:
        rivals = (i for i, row in enumerate(rows) if row.reference == rows[index].reference and sent[i] <= sent[index])
        return min(rivals, key=lambda i: gaps[i] if math.isfinite(gaps[i]) else math.inf, default=index)

    best = [best_of_as_cheap(index) for index in range(len(rows))]
    is_beaten = [gaps[by] < gaps[index] for index, by in enumerate(best)]
    result = []
    for index, row in enumerate(rows):
        if is_beaten[index]:
            result.append(Worth(rows[best[index]].label))
            continue
        cheaper = (
            i
            for i, other in enumerate(rows)
            if other.reference == row.reference and not is_beaten[i] and 0 < sent[i] < sent[index]
        )
        before = max(cheaper, key=lambda i: sent[i], default=None)
        if before is None:
            result.append(Worth(None))
        else:
            points, times = gaps[before] - gaps[index], sent[index] / sent[before]
            result.append(Worth(None, rows[before].label, points, times))
    return result
