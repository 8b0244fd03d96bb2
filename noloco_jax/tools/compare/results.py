"""Results of finished runs, and the figures of each variant over its seeds."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from noloco_jax.formatting import or_infinity
from noloco_jax.metrics.writer import METRICS_FILE, read_metrics
from noloco_jax.tools.compare.plan import Plan, PlannedRun
from noloco_jax.tools.compare.variants import Variant

# Spreads below this part of the peak learning rate are rounding: ddp's, and diloco's right after an outer step.
_ROUNDING = 1e-4


@dataclass(frozen=True)
class Result:
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
class Row:
    """A variant over its finished seeds, at its best value of the field that is tuned.

    Attributes:
      variant: the variant.
      reference: the variant that its gaps are above, or None.
      runs: one a seed.
      tokens: (E,) tokens trained on until each evaluation, by all replicas together.
      curves: (seed, E) perplexities, the mean of the replicas.
      figures: name -> an entry a seed, NaN where a run has no such figure: those of `Result`; `gap_percent` and
        `gap_merged_percent` above the reference's of the same seed; `bytes_share` of the reference's.
    """

    variant: Variant
    reference: Variant | None
    runs: Sequence[PlannedRun]
    tokens: np.ndarray
    curves: np.ndarray
    figures: Mapping[str, np.ndarray]


def results_of(runs: Iterable[PlannedRun], workdir: Path) -> dict[PlannedRun, Result]:
    """Read the results of the runs that are finished: their last step is evaluated in `workdir`/NAME."""
    found = {}
    for run in runs:
        lines = read_metrics(workdir / run.name) if (workdir / run.name / METRICS_FILE).exists() else []
        evals = [line for line in lines if line["kind"] == "eval"]
        if not evals or evals[-1]["step"] < run.config.num_steps:
            continue
        spread, sent = evals[-1]["replica_spread"], [line["bytes_sent_total"] for line in lines if "loss" in line]
        figures = {name: or_infinity(evals[-1][name]) for name in ("perplexity", "perplexity_merged")}
        figures["replica_spread"] = spread if spread and spread > _ROUNDING * run.config.inner.lr else math.nan
        figures["bytes_sent"] = float(sent[-1]) if sent else math.nan
        found[run] = Result({line["step"]: or_infinity(line["perplexity"]) for line in evals}, figures)
    return found


def make_rows(plan: Plan, results: Mapping[PlannedRun, Result]) -> list[Row]:
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
            Row(
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
