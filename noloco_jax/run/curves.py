"""The picture of a run: training loss, validation perplexity and replica spread over the steps, from metrics.jsonl."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from noloco_jax.errors import UserError
from noloco_jax.files import write_picture
from noloco_jax.run.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVES_FILE = "curves.png"

_RAW, _MAIN, _MERGED, _SPREAD, _OUTER = "#b9c6d8", "#1f5fa8", "#d1495b", "#2a7f62", "#8a8f98"
_MOST = 1e9  # of a perplexity: of a replica that has diverged, which would flatten all others
_LEGEND: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "framealpha": 0.85}


def plot_curves(workdir: str | os.PathLike[str]) -> Path:
    """Draws WORKDIR/curves.png from WORKDIR/metrics.jsonl and returns its path.

    Three panels over the inner step: the training loss and its running mean; the validation perplexity of each replica,
    their mean and the merged model; the replica spread on a logarithmic axis with the outer steps counted, and marked
    where each has a line of its own.
    """
    metrics = read_metrics(workdir)
    train = [entry for entry in metrics if entry["kind"] == "train" and "loss" in entry]
    evals = [entry for entry in metrics if entry["kind"] == "eval"]
    if not train and not evals:
        raise UserError(f"{workdir} has no training steps or evaluations to draw yet: train some more")

    from matplotlib.backends.backend_agg import FigureCanvasAgg  # here: slow to import, and not pyplot, so that no
    from matplotlib.figure import Figure  # display and no global state is touched

    figure = Figure(figsize=(9, 9.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    loss, perplexity, spread = figure.subplots(3, 1, sharex=True, height_ratios=(1.1, 1.1, 0.9))
    for axes in (loss, perplexity, spread):
        axes.grid(True, color="#e6e8ec", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    _draw_loss(loss, train)
    _draw_perplexity(perplexity, evals)
    _draw_spread(spread, evals, *outer_steps(metrics))
    spread.set_xlabel("inner step")

    return write_picture(Path(workdir) / CURVES_FILE, figure)


def outer_steps(metrics: list[dict[str, Any]]) -> tuple[int, list[int]]:
    """How many outer steps there were, and at which inner steps; none of these where a line tells of several.

    A line that does not say how many it tells of, as lines did not once, counts as one.
    """
    lines = {entry["step"]: entry.get("outer_steps", 1) for entry in metrics if "outer_step_seconds" in entry}
    count = sum(lines.values())
    return count, sorted(lines) if len(lines) == count else []


def _column(entries: list[dict[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values) of the lines that have the value; None, which stands for what was not finite, becomes NaN."""
    entries = [entry for entry in entries if name in entry]
    return np.array([entry["step"] for entry in entries]), np.array([entry[name] for entry in entries], dtype=float)


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean over the up to `window` values that are centred on each; NaN counts as missing."""
    present = np.isfinite(values)
    kernel = np.ones(window)
    sums = np.convolve(np.where(present, values, 0.0), kernel, mode="full")
    counts = np.convolve(present.astype(float), kernel, mode="full")
    start = (window - 1) // 2
    part = slice(start, start + len(values))
    return np.divide(sums[part], counts[part], out=np.full(len(values), np.nan), where=counts[part] > 0)


def _draw_loss(axes: "Axes", train: list[dict[str, Any]]) -> None:
    axes.set_ylabel("training loss")
    steps, losses = _column(train, "loss")
    if not len(steps):
        return
    window = max(1, len(steps) // 50) | 1
    axes.plot(steps, losses, color=_RAW if window > 1 else _MAIN, linewidth=1, label="loss")
    if window > 1:
        axes.plot(steps, running_mean(losses, window), color=_MAIN, linewidth=2, label=f"mean of {window}")
    settled = losses[np.isfinite(losses)][len(losses) // 50 :]  # the first steps would flatten all that follows
    if len(settled) > 1:
        margin = 0.05 * np.ptp(settled) + 1e-6
        axes.set_ylim(settled.min() - margin, settled.max() + margin)
    axes.legend(**_LEGEND)


def _draw_perplexity(axes: "Axes", evals: list[dict[str, Any]]) -> None:
    axes.set_ylabel("validation perplexity")
    axes.set_yscale("log")
    steps, means = _column(evals, "perplexity")
    if not len(steps):
        return
    means = _drawn(means)
    marker = "o" if len(steps) <= 30 else ""
    for index, replica in enumerate(_replicas(evals)):
        axes.plot(steps, _drawn(replica), color=_RAW, linewidth=1, label="each replica" if index == 0 else None)
    axes.plot(steps, means, color=_MAIN, linewidth=2, marker=marker, markersize=4, label="mean of the replicas")
    merged = _drawn(_column(evals, "perplexity_merged")[1])
    axes.plot(steps, merged, color=_MERGED, linewidth=2, marker=marker, markersize=4, label="merged model")
    for value, other, color in ((means[-1], merged[-1], _MAIN), (merged[-1], means[-1], _MERGED)):
        if np.isfinite(value):
            aside = (6, 5 if value > other else -5)  # apart, where the two lines end close together
            axes.annotate(
                f"{value:.2f}", (steps[-1], value), aside, textcoords="offset points", color=color, va="center"
            )
    axes.legend(**_LEGEND)
    _label_plainly(axes)


def _drawn(perplexities: np.ndarray) -> np.ndarray:
    """Those that have a place in the picture, and NaN."""
    return np.where(perplexities <= _MOST, perplexities, np.nan)


def _replicas(evals: list[dict[str, Any]]) -> np.ndarray:
    """(replicas, evaluations); a run may have gone on with another number of replicas, whose places are NaN."""
    rows = [entry["perplexity_replicas"] for entry in evals]
    table = np.full((max(map(len, rows)), len(rows)), np.nan)
    for column, row in enumerate(rows):
        table[: len(row), column] = np.array(row, dtype=float)
    return table


def _label_plainly(axes: "Axes") -> None:
    """Ticks of a logarithmic axis as 5, 10, 20 rather than powers of ten, which a short range has one of."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _draw_spread(axes: "Axes", evals: list[dict[str, Any]], count: int, marked: list[int]) -> None:
    axes.set_ylabel("replica spread")
    axes.set_yscale("log")
    steps, spreads = _column(evals, "replica_spread")
    spreads = np.where(spreads > 0, spreads, np.nan)  # replicas start out equal, and ddp keeps them so
    if np.isfinite(spreads).any():
        axes.plot(steps, spreads, color=_SPREAD, linewidth=2, marker="o", markersize=4, label="spread at evaluations")
    if count:
        axes.plot(
            marked,
            [0.02] * len(marked),
            color=_OUTER,
            linestyle="",
            marker="|" if marked else "",
            markersize=12,
            transform=axes.get_xaxis_transform(),
            label=f"{count:,} outer step{'s' * (count > 1)}",
        )
        if len(marked) <= 60:
            for step in marked:
                axes.axvline(step, color=_OUTER, linewidth=0.6, alpha=0.35)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(**_LEGEND)
