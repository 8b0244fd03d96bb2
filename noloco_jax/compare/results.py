"""Progress, evaluations and bytes sent of a comparison's runs, read from their metrics.jsonl."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from noloco_jax.compare.plan import Run
from noloco_jax.metrics.flops import model_flops_per_token
from noloco_jax.metrics.writer import METRICS_FILE, read_metrics
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
    """Progress of a run: its evaluations and its last line of training, empty before it begins."""

    evaluations: Sequence[dict[str, Any]] = ()
    last: Mapping[str, Any] = field(default_factory=dict)


def read_progress(workdir: Path) -> Progress:
    """Read the progress of the run in a workdir."""
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
    """Return True if the run in `workdir`/NAME has its last evaluation."""
    evaluations = read_progress(workdir / run.name).evaluations
    return bool(evaluations) and evaluations[-1]["step"] >= run.config.num_steps


def seconds_left(runs: Iterable[Run], workdir: Path, trainers: int, beside: float = 0.0) -> float | None:
    """Estimate how long the rest of a comparison takes, by the FLOPs of its runs; None before any has trained.

    Args:
      runs: all that are expected, finished ones included.
      workdir: their folder.
      trainers: how many train at a time, each as fast as the median run so far.
      beside: seconds of a run beside its training steps: its start, compilation and evaluations.
    """
    paces, left, starts = [], [], []
    for run in runs:
        config, last = run.config, read_progress(workdir / run.name).last
        whole = model_flops_per_token(config) * config.tokens_per_step * config.num_steps
        trained = last.get("step", 0) / config.num_steps
        left.append(whole * (1 - trained))
        starts.append(beside if trained == 0 else 0.0)
        if trained > 0 and last.get("seconds", 0) > 0:
            paces.append(last["seconds"] / (whole * trained))
    if not paces:
        return None
    each = np.array(left) * np.median(paces) + starts
    return max(float(each.sum()) / trainers, float(each.max()))


def read_curve(run: Run, workdir: Path) -> Curve:
    """Read the evaluations of a run in `workdir`/NAME; values that are not finite become NaN."""
    config = run.config
    evaluations = read_progress(workdir / run.name).evaluations
    steps = np.array([entry["step"] for entry in evaluations], int)

    def column(name: str) -> np.ndarray:
        return np.array([entry[name] for entry in evaluations], float)  # None becomes NaN

    lr = learning_rates(config.inner, config.num_steps)[steps - 1]
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
    """Return the bytes that a replica sent in the whole run; NaN for a run of an earlier version, which kept no sum."""
    last = read_progress(workdir).last
    return float(last["bytes_sent_total"]) if "bytes_sent_total" in last else float("nan")


def correlation(curve: Curve, warmup_steps: int) -> float:
    """Return Pearson's r between replica spread and learning rate over the evaluations after the warmup.

    NaN where fewer than three of them have a spread, or the learning rate does not change.
    """
    used = (curve.steps > warmup_steps) & np.isfinite(curve.spread)
    spread, lr = curve.spread[used], curve.lr[used]
    if used.sum() < 3 or np.ptp(lr) == 0 or np.ptp(spread) == 0:
        return float("nan")
    return float(np.corrcoef(spread, lr)[0, 1])


def last_perplexities(runs: Sequence[Run], workdir: Path) -> dict[Run, float]:
    """Return the last perplexity of every finished run; NaN where it is not finite."""
    return {
        run: float(np.array(read_progress(workdir / run.name).evaluations[-1]["perplexity"], float))
        for run in runs
        if is_complete(run, workdir)
    }
