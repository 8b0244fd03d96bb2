"""Plot of a run: training loss, validation perplexity and replica spread over the steps, from metrics.jsonl."""

import os
from collections.abc import Sequence
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

_RAW, _MAIN, _MERGED, _SPREAD, _OUTER = "#b9c6d8", "#1f5fa8", "#d1495b", "#2a7f62", "#8a8f98"
_MOST = 1e9  # largest perplexity drawn; that of a diverged replica would flatten all others
_SOURCES = ("#8a5fb0", "#c98a1b", "#3a9ca6", "#7a7a3d", "#b05f86")  # in turns
_LEGEND: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "framealpha": 0.85}


def plot_curves(workdir: str | os.PathLike[str]) -> Path:
    """Draw WORKDIR/curves.png from WORKDIR/metrics.jsonl and return its path.

    Three panels over the inner step: the training loss and its running mean; the validation perplexity of each replica,
    their mean and the merged model, and the mean on each source of a mixture; the replica spread on a logarithmic axis.
    The outer steps are counted, and marked if each has a line of its own. An island, which has one replica, shows its
    own perplexity and no third panel.
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
    draw_on(figure, train, evals, *outer_steps(metrics))
    return write_picture(Path(workdir) / CURVES_FILE, figure)


def draw_on(
    figure: "Figure", train: list[dict[str, Any]], evals: list[dict[str, Any]], count: int, marked: list[int]
) -> None:
    """Draw the panels of `plot_curves`; the last two arguments are as `outer_steps` returns them."""
    is_island = bool(evals) and "island" in evals[-1]
    heights = (1.1, 1.1) if is_island else (1.1, 1.1, 0.9)
    panels = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    for axes in panels:
        axes.grid(True, color="#e6e8ec", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    _draw_loss(panels[0], train)
    panels[0].set_title(f"Island {evals[-1]['island']}" if is_island else "Training, evaluation and replica spread")
    (_draw_own_perplexity if is_island else _draw_perplexity)(panels[1], evals)
    if not is_island:
        _draw_spread(panels[2], evals)
    _draw_outer_steps(panels[-1], count, marked)
    if panels[-1].get_legend_handles_labels()[0]:
        panels[-1].legend(**_LEGEND)
    panels[-1].set_xlabel("inner step")


def outer_steps(metrics: list[dict[str, Any]]) -> tuple[int, list[int]]:
    """Return the number of outer steps and their inner steps; the latter is empty if a line covers several."""
    lines = {entry["step"]: entry["outer_steps"] for entry in metrics if "outer_step_seconds" in entry}
    count = sum(lines.values())
    return count, sorted(lines) if len(lines) == count else []


def _column(entries: list[dict[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (steps, values) of the lines that have the value; None, written for non-finite values, becomes NaN."""
    entries = [entry for entry in entries if name in entry]
    return np.array([entry["step"] for entry in entries]), np.array([entry[name] for entry in entries], dtype=float)


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
    axes.set_ylabel("training loss (nats a token)")
    steps, losses = _column(train, "loss")
    if not len(steps):
        return
    window = max(1, len(steps) // 50) | 1
    axes.plot(steps, losses, color=_RAW if window > 1 else _MAIN, linewidth=1, label="loss")
    if window > 1:
        axes.plot(steps, running_mean(losses, window), color=_MAIN, linewidth=2, label=f"mean of {window}")
    settled = losses[np.isfinite(losses)][len(losses) // 50 :]  # the first steps would flatten the rest of the curve
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
    marker = _marker(steps)
    for index, replica in enumerate(_replicas(evals)):
        axes.plot(steps, _drawn(replica), color=_RAW, linewidth=1, label="each replica" if index == 0 else None)
    axes.plot(steps, means, color=_MAIN, linewidth=2, marker=marker, markersize=4, label="mean of the replicas")
    merged = _drawn(_column(evals, "perplexity_merged")[1])
    axes.plot(steps, merged, color=_MERGED, linewidth=2, marker=marker, markersize=4, label="merged model")
    for values, others, color in ((means, merged, _MAIN), (merged, means, _MERGED)):
        up = 5 if values[-1] > others[-1] else -5  # keeps the two labels apart where the lines end close together
        _annotate(axes, steps, values, up, color)
    _draw_sources(axes, evals)
    axes.legend(**_LEGEND)
    _label_plainly(axes)


def _draw_own_perplexity(axes: "Axes", evals: list[dict[str, Any]]) -> None:
    axes.set_ylabel("validation perplexity")
    axes.set_yscale("log")
    steps, perplexities = _column(evals, "perplexity")
    perplexities, label = _drawn(perplexities), f"island {evals[-1]['island']}"
    axes.plot(steps, perplexities, color=_MAIN, linewidth=2, marker=_marker(steps), markersize=4, label=label)
    _annotate(axes, steps, perplexities, 0, _MAIN)
    if _draw_sources(axes, evals):
        axes.legend(**_LEGEND)
    _label_plainly(axes)


def _draw_sources(axes: "Axes", evals: list[dict[str, Any]]) -> bool:
    """Draw the perplexity on each source of a mixture as the last evaluation names them; return True if there are."""
    names = list(evals[-1].get("perplexity_by_source", ()))
    for number, name in enumerate(names):
        found = [(entry["step"], entry.get("perplexity_by_source", {})) for entry in evals]
        steps, perplexities = zip(*((step, values[name]) for step, values in found if name in values), strict=True)
        color = _SOURCES[number % len(_SOURCES)]
        drawn = _drawn(np.array(perplexities, dtype=float))
        axes.plot(steps, drawn, color=color, linewidth=1, marker=_marker(steps), markersize=3, label=f"on {name}")
    return bool(names)


def _marker(steps: Sequence[int] | np.ndarray) -> str:
    return "o" if len(steps) <= 30 else ""


def _annotate(axes: "Axes", steps: np.ndarray, perplexities: np.ndarray, up: float, color: str) -> None:
    """Write the last perplexity beside the end of its line, `up` points above it."""
    if np.isfinite(perplexities[-1]):
        text, end = f"{perplexities[-1]:.2f}", (steps[-1], perplexities[-1])
        axes.annotate(text, end, (6, up), textcoords="offset points", color=color, va="center")


def _drawn(perplexities: np.ndarray) -> np.ndarray:
    """Return the perplexities, with NaN for those too large to draw."""
    return np.where(perplexities <= _MOST, perplexities, np.nan)


def _replicas(evals: list[dict[str, Any]]) -> np.ndarray:
    """Return the perplexities (replicas, evaluations); NaN where a run resumed with fewer or more replicas."""
    rows = [entry["perplexity_replicas"] for entry in evals]
    table = np.full((max(map(len, rows)), len(rows)), np.nan)
    for column, row in enumerate(rows):
        table[: len(row), column] = np.array(row, dtype=float)
    return table


def _label_plainly(axes: "Axes") -> None:
    """Label a logarithmic axis with 5, 10, 20 instead of powers of ten, of which a short range has only one."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _draw_spread(axes: "Axes", evals: list[dict[str, Any]]) -> None:
    axes.set_ylabel("replica spread (rms distance)")
    axes.set_yscale("log")
    steps, spreads = _column(evals, "replica_spread")
    spreads = np.where(spreads > 0, spreads, np.nan)  # zero while replicas are equal, as always with ddp
    if np.isfinite(spreads).any():
        axes.plot(steps, spreads, color=_SPREAD, linewidth=2, marker="o", markersize=4, label="spread at evaluations")
    elif len(steps):
        axes.set_yticks([])
        axes.text(0.5, 0.5, "all replicas are equal at every evaluation", transform=axes.transAxes, ha="center")


def _draw_outer_steps(axes: "Axes", count: int, marked: list[int]) -> None:
    """Count the outer steps in the legend, and mark them at the lower edge."""
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
