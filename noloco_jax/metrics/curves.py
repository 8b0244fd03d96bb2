"""Plot of a run: training loss, validation perplexity and replica spread over the steps, from metrics.jsonl."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from noloco_jax.errors import UserError
from noloco_jax.files import write_picture
from noloco_jax.metrics.writer import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVES_FILE = "curves.png"

_RAW, _MAIN, _MERGED, _SPREAD = "#b9c6d8", "#1f5fa8", "#d1495b", "#2a7f62"
_MOST = 1e9  # largest perplexity drawn; that of a diverged replica would flatten all others
_SOURCES = ("#8a5fb0", "#c98a1b", "#3a9ca6", "#7a7a3d", "#b05f86")  # in turns
_LEGEND_STYLE: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "framealpha": 0.85}


def plot_curves(workdir: str | os.PathLike[str]) -> Path:
    """Draw WORKDIR/curves.png from WORKDIR/metrics.jsonl and return its path.

    Three panels over the inner step: the training loss and its running mean; the validation perplexity of each replica,
    their mean and the merged model, and the mean on each source of a mixture; the replica spread on a logarithmic axis.
    An island, which has one replica, shows its own perplexity and no third panel.
    """
    metrics = read_metrics(workdir)
    train = [entry for entry in metrics if entry["kind"] == "train" and "loss" in entry]
    evals = [entry for entry in metrics if entry["kind"] == "eval"]
    evals = [entry for entry in evals if ("island" in entry) == ("island" in evals[-1])]  # a run may become an island
    if not train and not evals:
        raise UserError(f"{workdir} has no training steps or evaluations to draw yet: train some more")

    # Imported here because it is slow. Without pyplot no display and no global state is touched.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 9.5), dpi=120, layout="constrained")
    draw_on(figure, train, evals)
    return write_picture(Path(workdir) / CURVES_FILE, figure)


def draw_on(figure: "Figure", train: list[dict[str, Any]], evals: list[dict[str, Any]]) -> None:
    """Draw the panels of `plot_curves`."""
    has_spread = any("replica_spread" in entry for entry in evals)
    panels = figure.subplots(2 + has_spread, 1, sharex=True)
    for axes in panels:
        axes.grid(True, color="#e6e8ec", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    _draw_loss(panels[0], train)
    _draw_perplexity(panels[1], evals)
    if has_spread:
        _draw_spread(panels[2], evals)
    for axes in panels:
        if len(axes.lines) > 1:
            axes.legend(**_LEGEND_STYLE)
    panels[-1].set_xlabel("inner step")


def _column(entries: list[dict[str, Any]], name: str) -> np.ndarray:
    """Return a value of each line; NaN where it is missing, or None, written for non-finite values."""
    return np.array([entry.get(name) for entry in entries], dtype=float)


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Return the mean over a window of up to `window` values centred on each; NaN counts as missing."""
    present = np.isfinite(values)
    kernel = np.ones(window)
    sums = np.convolve(np.where(present, values, 0.0), kernel, mode="full")
    counts = np.convolve(present.astype(float), kernel, mode="full")
    start = (window - 1) // 2
    part = slice(start, start + len(values))
    return np.divide(sums[part], counts[part], out=np.full(len(values), np.nan), where=counts[part] > 0)


def _draw_loss(axes: "Axes", train: list[dict[str, Any]]) -> None:
    axes.set_title("Training loss")
    axes.set_ylabel("nats per token")
    steps, losses = [entry["step"] for entry in train], _column(train, "loss")
    window = max(1, len(steps) // 50) | 1
    axes.plot(steps, losses, color=_RAW if window > 1 else _MAIN, linewidth=1, label="logged points")
    if window > 1:
        label = f"mean of {window} logged points"
        axes.plot(steps, running_mean(losses, window), color=_MAIN, linewidth=2, label=label)
    settled = losses[np.isfinite(losses)][len(losses) // 50 :]  # the first steps would flatten the rest of the curve
    if len(settled) > 1:
        margin = 0.05 * np.ptp(settled) + 1e-6
        axes.set_ylim(settled.min() - margin, settled.max() + margin)


def _draw_perplexity(axes: "Axes", evals: list[dict[str, Any]]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_title("Validation perplexity")
    axes.set_yscale("log")
    # 5, 10, 20 instead of powers of ten, of which a short range has only one.
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    if not evals:
        return
    steps = [entry["step"] for entry in evals]
    marker = "o" if len(steps) <= 30 else ""

    def draw(values: np.ndarray, color: str, width: float, label: str | None, mark: str = marker) -> None:
        drawn = np.where(values <= _MOST, values, np.nan)
        axes.plot(steps, drawn, color=color, linewidth=width, marker=mark, markersize=4, label=label)

    for index, replica in enumerate(_replicas(evals)):
        draw(replica, _RAW, 1, "each replica" if index == 0 else None, mark="")
    means, merged = _column(evals, "perplexity"), _column(evals, "perplexity_merged")
    draw(means, _MAIN, 2, f"island {evals[-1]['island']}" if "island" in evals[-1] else "mean of the replicas")
    if "perplexity_merged" in evals[-1]:
        draw(merged, _MERGED, 2, "merged model")
    for number, name in enumerate(evals[-1].get("perplexity_by_source", ())):
        by_source = _column([entry.get("perplexity_by_source", {}) for entry in evals], name)
        draw(by_source, _SOURCES[number % len(_SOURCES)], 1, f"on {name}")
    for values, others, color in ((means, merged, _MAIN), (merged, means, _MERGED)):
        if values[-1] <= _MOST:
            up = 5 if values[-1] > others[-1] else -5  # keeps labels apart where the lines end close together
            text, end = f"{values[-1]:.2f}", (steps[-1], values[-1])
            axes.annotate(text, end, (6, up), textcoords="offset points", color=color, va="center")


def _replicas(evals: list[dict[str, Any]]) -> np.ndarray:
    """Return the perplexities (replicas, evaluations); NaN where a run resumed with fewer or more replicas."""
    rows = [entry.get("perplexity_replicas", ()) for entry in evals]
    table = np.full((max(map(len, rows)), len(rows)), np.nan)
    for column, row in enumerate(rows):
        table[: len(row), column] = np.array(row, dtype=float)
    return table


def _draw_spread(axes: "Axes", evals: list[dict[str, Any]]) -> None:
    axes.set_title("Replica spread")
    axes.set_ylabel("rms distance from the mean")
    axes.set_yscale("log")
    steps, spreads = [entry["step"] for entry in evals], _column(evals, "replica_spread")
    spreads = np.where(spreads > 0, spreads, np.nan)  # zero while replicas are equal, as always with ddp
    if np.isfinite(spreads).any():
        axes.plot(steps, spreads, color=_SPREAD, linewidth=2, marker="o", markersize=4)
    else:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "all replicas are equal at every evaluation", transform=axes.transAxes, ha="center")
