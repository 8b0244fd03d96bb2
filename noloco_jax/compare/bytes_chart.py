"""The picture that judges by bytes: what a replica sends on the one axis, and how far it is above ddp on the other."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from noloco_jax.compare.colors import styles
from noloco_jax.compare.report import format_share
from noloco_jax.compare.rows import Row, mean_and_std, worths
from noloco_jax.files import write_picture
from noloco_jax.formatting import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GREY = "#6b7280"


def draw_bytes(rows: Sequence[Row], path: Path) -> bool:
    """Draws the rows that have a gap, whole or not at all; returns whether there are any.

    A mark is the mean over the seeds with a bar from their least to their greatest: full ones of the mean of the
    replicas, hollow ones of the merged model. A line joins the variants that no other beats. What sends nothing has no
    place on the axis, and is a level.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # here: slow to import
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    beaten = [worth.beaten_by is not None for worth in worths(rows)]
    shown = [
        (row, style, sent, row.figures["gap_percent"], row.figures["gap_merged_percent"], is_beaten)
        for row, style, is_beaten in zip(rows, styles(rows), beaten, strict=True)
        if math.isfinite(sent := mean_and_std(row.figures["bytes_sent"])[0])
        and np.isfinite(row.figures["gap_percent"]).any()
    ]
    if not any(sent > 0 for _, _, sent, *_ in shown):
        return False
    figure = Figure(figsize=(11, 5.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_xscale("log")
    axes.axhline(0, color=_GREY, linewidth=0.8)
    sizes = [sent for _, _, sent, *_ in shown if sent > 0]
    aside = max(max(sizes) / min(sizes), 2.0) ** 0.006  # so that the bars of a variant do not hide each other
    legend = []
    for row, (color, _, mark), sent, gaps, merged, _ in sorted(shown, key=lambda entry: -entry[2]):
        gap, merged_gap = mean_and_std(gaps)[0], mean_and_std(merged)[0]
        share = mean_and_std(row.figures["bytes_share"])[0]
        parts = f"{gap:+.1f} %, merged {merged_gap:+.1f} %"
        if sent > 0:
            _mark(axes, sent / aside, gaps, color, mark, face=color)
            _mark(axes, sent * aside, merged, color, mark, face="white")
            axes.annotate(row.label, (sent, gap), (9, 4), textcoords="offset points", color=color, fontsize=9)
            written = format_share(share) if math.isfinite(share) else format_bytes(sent)
            handle = Line2D([], [], color=color, marker=mark, linestyle="")
        else:
            axes.axhline(gap, color=color, linewidth=1.2, linestyle=":")
            written = "sends nothing"
            handle = Line2D([], [], color=color, linestyle=":")
        handle.set_label(f"{row.label} ({written}): {parts}")
        legend.append(handle)
    for reference in dict.fromkeys(row.reference for row, *_ in shown):
        front = sorted(
            (sent, mean_and_std(gaps)[0])
            for row, _, sent, gaps, _, is_beaten in shown
            if row.reference == reference and sent > 0 and not is_beaten
        )
        axes.plot([sent for sent, _ in front], [gap for _, gap in front], color="#c4c8cf", linewidth=1.2, zorder=0)
    legend += [
        Line2D([], [], color=_GREY, marker="o", linestyle="", label="full: mean of the replicas"),
        Line2D([], [], color=_GREY, marker="o", markerfacecolor="white", linestyle="", label="hollow: merged model"),
    ]
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("bytes that a replica sends in the whole run")
    axes.set_ylabel("perplexity above the reference (ddp), %")
    axes.margins(x=0.08)
    axes.grid(True, color="#e6e8ec", linewidth=0.8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.legend(handles=legend, loc="outside right upper", frameon=False, fontsize=9)
    write_picture(path, figure)
    return True


def _mark(axes: "Axes", sent: float, gaps: np.ndarray, color: str, mark: str, face: str) -> None:
    """A mark at the mean, with a bar over all seeds where there are several."""
    there = gaps[np.isfinite(gaps)]
    if len(there):
        mean = there.mean()
        reach = [[mean - there.min()], [there.max() - mean]] if len(there) > 1 else None
        axes.errorbar(sent, mean, reach, color=color, marker=mark, markerfacecolor=face, markersize=7, capsize=3)
