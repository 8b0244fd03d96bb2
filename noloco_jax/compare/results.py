"""Evaluations of finished runs, and the figures of each variant over its seeds."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from noloco_jax.compare.plan import Plan, Run
from noloco_jax.compare.variants import Variant
from noloco_jax.formatting import or_infinity
from noloco_jax.metrics.writer import METRICS_FILE, read_metrics

# Spreads below this part of the peak learning rate are rounding: ddp's, and diloco's right after an outer step.
_ROUNDING = 1e-4


@dataclass(frozen=True)
class Row:
    """A variant over its finished seeds, at its best value of the field that is tuned.

    Attributes:
      variant: the variant.
      reference: the variant that its gaps are above, or None.
      runs: one a seed.
      tokens: (E,) tokens trained on until each evaluation, by all replicas together.
      curves: (seed, E) perplexities, the mean of the replicas.
      figures: name -> an entry a seed, NaN where a run has no such figure. Last evaluations: `perplexity`,
        `perplexity_merged`, `replica_spread`; `gap_percent`, `gap_merged_percent`: above the reference's of the same
        seed; `bytes_sent`: by a replica in all; `bytes_share`: of the reference's.
    """

    variant: Variant
    reference: Variant | None
    runs: Sequence[Run]
    tokens: np.ndarray
    curves: np.ndarray
    figures: Mapping[str, np.ndarray]


def evaluations(run: Run, workdir: Path) -> list[dict[str, Any]]:
    """Return the evaluations of a run in `workdir`/NAME up to its last step; none if that is still to come."""
    if not (workdir / run.name / METRICS_FILE).exists():
        return []
    found = [line for line in read_metrics(workdir / run.name) if line["kind"] == "eval"]
    return found if found and found[-1]["step"] >= run.config.num_steps else []


def last_perplexities(runs: Iterable[Run], workdir: Path) -> dict[Run, float]:
    """Return the last perplexity of every finished run; infinite where it is not finite."""
    found = {run: evaluations(run, workdir) for run in runs}
    return {run: or_infinity(lines[-1]["perplexity"]) for run, lines in found.items() if lines}


def make_rows(plan: Plan, workdir: Path) -> list[Row]:
    """Return a row for every variant that has finished runs, in the order of the plan."""
    perplexities = last_perplexities(plan.runs, workdir)
    chosen = {
        variant: [run for run in plan.chosen(variant, perplexities) if run in perplexities] for variant in plan.variants
    }
    figures = {run: _figures(run, workdir) for runs in chosen.values() for run in runs}
    rows = []
    for variant, runs in chosen.items():
        if not runs:
            continue
        reference = plan.references.get(variant)
        same_seed = {run.seed: figures[run] for run in chosen[reference]} if reference is not None else {}
        of_seeds = [figures[run] | _gaps(figures[run], same_seed.get(run.seed, {})) for run in runs]
        lines = [evaluations(run, workdir) for run in runs]
        tokens = np.array([line["step"] for line in lines[0]]) * runs[0].config.tokens_per_step
        curves = np.array([[or_infinity(line["perplexity"]) for line in of_run] for of_run in lines])
        of_row = {name: np.array([of_seed[name] for of_seed in of_seeds]) for name in of_seeds[0]}
        rows.append(Row(variant, reference, runs, tokens, curves, of_row))
    return rows


def _figures(run: Run, workdir: Path) -> dict[str, float]:
    last = evaluations(run, workdir)[-1]
    trained = [line for line in read_metrics(workdir / run.name) if line["kind"] == "train"]
    spread = math.nan if last["replica_spread"] is None else float(last["replica_spread"])
    return {
        "perplexity": or_infinity(last["perplexity"]),
        "perplexity_merged": or_infinity(last["perplexity_merged"]),
        "replica_spread": spread if spread > _ROUNDING * run.config.inner.lr else math.nan,
        "bytes_sent": float(trained[-1]["bytes_sent_total"]) if trained else math.nan,
    }


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
