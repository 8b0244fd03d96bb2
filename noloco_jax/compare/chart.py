"""The picture of a comparison: validation perplexity, and replica spread with the learning rate, against tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from noloco_jax.compare.results import Curve, Row
from noloco_jax.files import write_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = {
    "ddp": "#6b7280",
    "diloco": "#d95f02",
    "noloco": "#1b7837",
    "local": "#7b5ea7",
    "epidemic": "#1f78b4",
    "sparseloco": "#b8860b",
}
_DASHES = ("-", "--", ":", "-.")
_LR = "#b0b4bb"


def draw(rows: Sequence[Row], vary: str | None, path: Path) -> None:
    """Draws the rows, whole or not at all: a line the mean over seeds, a band from their least to their greatest."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # here: slow to import
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    rates = right.twinx()
    right.set_zorder(rates.get_zorder() + 1)
    right.set_facecolor("none")
    values = list(dict.fromkeys(row.value for row in rows if row.value is not None))
    for row in rows:
        dash = "-" if row.value is None else _DASHES[values.index(row.value) % len(_DASHES)]
        label = row.method + (f", {vary}={row.value}" if row.value is not None else "")
        style = {"color": _COLORS[row.method], "linestyle": dash, "linewidth": 1.8}
        last = row.curves[0].tokens[-1]
        _line(left, row.curves, "perplexity", f"{label}: {np.mean(row.figures['perplexity']):.2f}", style)
        if any(np.isfinite(curve.spread).any() for curve in row.curves):
            _line(right, row.curves, "spread", label, style)
        left.set_xlim(right=max(left.get_xlim()[1], last))
    for curve in _distinct([row.curves[0] for row in rows]):
        rates.plot(curve.tokens, curve.lr, color=_LR, linewidth=1.4, label="learning rate")

    left.set_ylim(*_limits(rows))
    left.set_ylabel("validation perplexity, mean of the replicas")
    right.set_yscale("log")
    right.set_ylabel("replica spread")
    rates.set_ylabel("learning rate", color="#6b7280")
    rates.set_ylim(bottom=0)
    for axes in (left, right):
        axes.set_xlabel("tokens, all replicas together")
        axes.grid(True, color="#e6e8ec", linewidth=0.8)
        axes.spines["top"].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=9)
    left.spines["right"].set_visible(False)
    rates.spines["top"].set_visible(False)

    write_picture(path, figure)


def _line(axes: "Axes", curves: Sequence[Curve], name: str, label: str, style: dict) -> None:
    tokens = curves[0].tokens
    table = np.stack([getattr(curve, name) for curve in curves])
    there = np.isfinite(table).all(axis=0)  # no gaps where replicas are equal, and no points
    marker = "o" if there.sum() <= 30 else ""
    axes.plot(tokens[there], table.mean(axis=0)[there], label=label, marker=marker, markersize=3, **style)
    if len(curves) > 1:
        low, high = table.min(axis=0)[there], table.max(axis=0)[there]
        axes.fill_between(tokens[there], low, high, color=style["color"], alpha=0.2, linewidth=0)


def _distinct(curves: Sequence[Curve]) -> list[Curve]:
    """One curve of each course of the learning rate."""
    return list({(tuple(curve.tokens), tuple(curve.lr)): curve for curve in curves}.values())


def _limits(rows: Sequence[Row]) -> tuple[float | None, float | None]:
    """Room for all but the first fifth of each run, which falls so far that the methods would be one line."""
    late = [curve.perplexity[len(curve.perplexity) // 5 :] for row in rows for curve in row.curves]
    values = np.concatenate(late)
    values = values[np.isfinite(values)]
    return (0.98 * values.min(), 1.02 * values.max()) if len(values) else (None, None)
