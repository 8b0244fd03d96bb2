"""What a comparison measures: the figures of each run from its metrics.jsonl, and rows that sum up the seeds."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from noloco_jax.compare.plan import Run
from noloco_jax.run.metrics import METRICS_FILE, read_metrics
from noloco_jax.spmd.inner import learning_rates

# Replicas count as equal where they differ by less than this part of what one inner step may move a weight by: rounding
# of ddp's, and of diloco's after an outer step.
_ROUNDING = 1e-3


@dataclass(frozen=True)
class Curve:
    """The evaluations of a finished run, an entry each: arrays of the same length (E,).

    Attributes:
      steps: inner steps taken.
      tokens: trained on until then by all replicas together.
      perplexity: exp of the loss averaged over the replicas.
      merged: perplexity of the mean of their weights.
      spread: sqrt(Σ|mean − θ_i|²/(numel · N)) of the weights; NaN where it is rounding alone.
      lr: learning rate of the step before.
    """

    steps: np.ndarray
    tokens: np.ndarray
    perplexity: np.ndarray
    merged: np.ndarray
    spread: np.ndarray
    lr: np.ndarray


@dataclass(frozen=True)
class Progress:
    """How far a run is: its evaluations, and its last line of training; none of one that has not begun."""

    evaluations: Sequence[dict[str, Any]] = ()
    last: Mapping[str, Any] = field(default_factory=dict)


def read_progress(workdir: Path) -> Progress:
    """How far the run in a workdir is."""
    try:
        status = (workdir / METRICS_FILE).stat()
    except FileNotFoundError:
        return Progress()
    return _progress(workdir, status.st_ino, status.st_size, status.st_mtime_ns)


@functools.cache  # a line a run; the files of finished runs are long and change no more
def _progress(workdir: Path, *version: int) -> Progress:
    del version
    lines = read_metrics(workdir)
    evaluations = tuple(line for line in lines if line["kind"] == "eval")
    return Progress(evaluations, next((line for line in reversed(lines) if line["kind"] == "train"), {}))


def is_complete(run: Run, workdir: Path) -> bool:
    """Whether the run in `workdir`/NAME has its last evaluation."""
    evaluations = read_progress(workdir / run.name).evaluations
    return bool(evaluations) and evaluations[-1]["step"] >= run.config.num_steps


def read_curve(run: Run, workdir: Path) -> Curve:
    """The evaluations of a run in `workdir`/NAME. What was not finite is NaN."""
    config = run.config
    evaluations = read_progress(workdir / run.name).evaluations
    steps = np.array([entry["step"] for entry in evaluations], int)

    def column(name: str) -> np.ndarray:
        return np.array([entry[name] for entry in evaluations], float)  # None becomes NaN

    lr = learning_rates(config)[steps - 1]
    spread = column("replica_spread")
    return Curve(
        steps=steps,
        tokens=steps * config.tokens_per_step,
        perplexity=column("perplexity"),
        merged=column("perplexity_merged"),
        spread=np.where(spread > _ROUNDING * lr, spread, np.nan),
        lr=lr,
    )


def bytes_sent(workdir: Path) -> float:
    """What a replica sent in the whole run; NaN of a run of an earlier version, which did not add it up."""
    last = read_progress(workdir).last
    return float(last["bytes_sent_total"]) if "bytes_sent_total" in last else float("nan")


def correlation(curve: Curve, warmup_steps: int) -> float:
    """Pearson's r between replica spread and learning rate over the evaluations after the warmup.

    NaN where fewer than three of them have a spread, or the learning rate does not change.
    """
    used = (curve.steps > warmup_steps) & np.isfinite(curve.spread)
    spread, lr = curve.spread[used], curve.lr[used]
    if used.sum() < 3 or np.ptp(lr) == 0 or np.ptp(spread) == 0:
        return float("nan")
    return float(np.corrcoef(spread, lr)[0, 1])


@dataclass(frozen=True)
class Row:
    """A method (and a value of the varied field) over its finished seeds.

    Attributes:
      runs: one a seed, and
      curves: their evaluations.
      figures: name -> an entry a seed, NaN where a run has no such figure. Last evaluations: `perplexity`,
        `perplexity_merged`, `replica_spread`; `gap_percent`, `gap_merged_percent`: above ddp's of the same seed and
        value; `bytes_sent`: by a replica in all; `spread_lr_correlation`.
    """

    runs: list[Run]
    curves: list[Curve]
    figures: dict[str, np.ndarray]

    @property
    def method(self) -> str:
        return self.runs[0].method

    @property
    def value(self) -> str | None:
        return self.runs[0].value


def mean_and_std(values: np.ndarray) -> tuple[float, float]:
    """Over the entries there are, the std that of a sample; NaN for the mean of none and the std of fewer than two."""
    there = values[np.isfinite(values)]
    return (
        float(there.mean()) if len(there) else float("nan"),
        float(there.std(ddof=1)) if len(there) > 1 else float("nan"),
    )


def make_rows(runs: Sequence[Run], workdir: Path) -> list[Row]:
    """A row for every method and value that has finished runs, in the order of the plan."""
    curves = {run: read_curve(run, workdir) for run in runs if is_complete(run, workdir)}
    ddp = {(run.seed, run.value): curve for run, curve in curves.items() if run.method == "ddp"}
    rows = []
    for method, value in dict.fromkeys((run.method, run.value) for run in curves):
        mine = [run for run in curves if (run.method, run.value) == (method, value)]
        # A ddp run without a value is the same for all values.
        references = [ddp.get((run.seed, value), ddp.get((run.seed, None))) for run in mine]
        last = [curves[run] for run in mine]
        figures = {
            "perplexity": [curve.perplexity[-1] for curve in last],
            "perplexity_merged": [curve.merged[-1] for curve in last],
            "gap_percent": [
                _gap(curve.perplexity, ref.perplexity) if ref else np.nan
                for curve, ref in zip(last, references, strict=True)
            ],
            "gap_merged_percent": [
                _gap(curve.merged, ref.merged) if ref else np.nan for curve, ref in zip(last, references, strict=True)
            ],
            "replica_spread": [curve.spread[-1] for curve in last],
            "bytes_sent": [bytes_sent(workdir / run.name) for run in mine],
            "spread_lr_correlation": [
                correlation(curve, run.config.inner.warmup_steps) for run, curve in zip(mine, last, strict=True)
            ],
        }
        rows.append(Row(mine, last, {name: np.array(values, float) for name, values in figures.items()}))
    return rows


def _gap(values: np.ndarray, reference: np.ndarray) -> float:
    """How far the last perplexity is above a reference's, in percent."""
    return 100 * (values[-1] / reference[-1] - 1)
