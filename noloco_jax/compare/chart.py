"""Pictures of a comparison: curves against tokens, and the gap to ddp against bytes and against meetings."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from noloco_jax.compare.law import Law
from noloco_jax.compare.report import format_share
from noloco_jax.compare.results import Curve
from noloco_jax.compare.rows import Row, mean_and_std, worths
from noloco_jax.files import write_picture
from noloco_jax.formatting import format_bytes, format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_METHODS = {
    "ddp": "#6b7280",
    "diloco": "#d95f02",
    "noloco": "#1b7837",
    "local": "#7b5ea7",
    "epidemic": "#1f78b4",
    "sparseloco": "#b8860b",
}
_OTHERS = ("#d6336c", "#0b7285", "#f08c00", "#5c940d", "#364fc7", "#8c510a", "#a61e4d", "#15aabf", "#212529", "#b197fc")
_DASHES = ("-", "--", ":", "-.")
_MARKS = ("o", "s", "^", "v", "P", "X", "<", ">", "p", "*", "h")
_GREY, _LR = "#6b7280", "#b0b4bb"
_NAMED_MARKS = 8  # more names beside marks would cover one another; the legend has them all


def _styles(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """Return (color, dash, mark) of each row: a color a variant, a dash and a mark for its values of varied fields.

    A method that goes by its own name has the same color in all pictures.
    """
    named = [title for title in dict.fromkeys(row.variant.title for row in rows) if title not in _METHODS]
    colors = _METHODS | {title: _OTHERS[i % len(_OTHERS)] for i, title in enumerate(named)}
    values = list(dict.fromkeys(row.variant.values for row in rows if row.variant.values))

    def place(row: Row) -> int:
        return values.index(row.variant.values) if row.variant.values else 0

    return [
        (colors[row.variant.title], _DASHES[place(row) % len(_DASHES)], _MARKS[place(row) % len(_MARKS)])
        for row in rows
    ]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the rows, whole or not at all: a line the mean over seeds, a band from their least to their greatest."""
    from matplotlib.figure import Figure  # here: slow to import
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(12, 4.8), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2)
    rates = right.twinx()
    right.set_zorder(rates.get_zorder() + 1)
    right.set_facecolor("none")
    for row, (color, dash, _) in zip(rows, _styles(rows), strict=True):
        style = {"color": color, "linestyle": dash, "linewidth": 1.8}
        last = row.curves[0].tokens[-1]
        _line(left, row.curves, "perplexity", f"{row.label}: {np.mean(row.figures['perplexity']):.2f}", style)
        if any(np.isfinite(curve.spread).any() for curve in row.curves):
            _line(right, row.curves, "spread", row.label, style)
        left.set_xlim(right=max(left.get_xlim()[1], last))
    for curve in _distinct([row.curves[0] for row in rows]):
        rates.plot(curve.tokens, curve.lr, color=_LR, linewidth=1.4, label="learning rate")

    left.set_ylim(*_limits(rows))
    band = ", band: least to greatest seed" if any(len(row.curves) > 1 for row in rows) else ""
    left.set_title(f"Validation perplexity{band}")
    left.set_ylabel("perplexity, mean of the replicas")
    right.set_yscale("log")
    right.set_title("Distance between replicas")
    right.set_ylabel("replica spread (rms distance of a weight)")
    rates.set_ylabel("learning rate", color="#6b7280")
    rates.set_ylim(bottom=0)
    for axes in (left, right):
        axes.set_xlabel("tokens, all replicas together")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))
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


def draw_bytes(rows: Sequence[Row], path: Path) -> bool:
    """Draw the rows that have a gap, whole or not at all; return False if there are none.

    A mark is the mean over the seeds: full ones, with a bar from the least seed to the greatest, of the mean of the
    replicas; hollow diamonds of the merged model. A line joins the variants that no other beats. What sends nothing is
    a level, as the axis has no place for it.
    """
    from matplotlib.lines import Line2D  # here: slow to import
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    beaten = [worth.beaten_by is not None for worth in worths(rows)]
    shown = [
        (row, style, sent, row.figures["gap_percent"], row.figures["gap_merged_percent"], is_beaten)
        for row, style, is_beaten in zip(rows, _styles(rows), beaten, strict=True)
        if math.isfinite(sent := mean_and_std(row.figures["bytes_sent"])[0])
        and math.isfinite(mean_and_std(row.figures["gap_percent"])[0])
    ]
    if not any(sent > 0 for _, _, sent, *_ in shown):
        return False
    is_few = len(shown) <= _NAMED_MARKS
    columns = 2 if max(len(row.label) for row, *_ in shown) <= 20 else 1
    figure, axes = _gap_axes(legend_lines=math.ceil((len(shown) + 2) / columns))
    sizes = [sent for _, _, sent, *_ in shown if sent > 0]
    if min(sizes) == max(sizes):
        axes.set_xlim(sizes[0] / 3, 3 * sizes[0])
    axes.axhline(0, color=_GREY, linewidth=0.8)
    legend = []
    for row, (color, _, mark), sent, gaps, merged, _ in sorted(shown, key=lambda entry: -entry[2]):
        gap, merged_gap = mean_and_std(gaps)[0], mean_and_std(merged)[0]
        share = mean_and_std(row.figures["bytes_share"])[0]
        parts = f"{gap:+.1f} %, merged {merged_gap:+.1f} %"
        if sent > 0:
            _bar(axes, sent, gaps, color, mark)
            axes.plot(sent, merged_gap, color=color, marker="D", markerfacecolor="white", markersize=5, linestyle="")
            if is_few:
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
        Line2D([], [], color=_GREY, marker="o", linestyle="", label="full, bar over the seeds: mean of the replicas"),
        Line2D([], [], color=_GREY, marker="D", markerfacecolor="white", linestyle="", label="hollow: merged model"),
    ]
    is_wide = max(sizes) > 1000 * min(sizes)  # 2 and 5 of each decade would run into one another
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if is_wide else (1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_title("Perplexity above data parallel training, against the bytes that a replica sends")
    axes.set_xlabel("bytes that a replica sends in the whole run")
    if min(sizes) < max(sizes):
        axes.margins(x=0.08)
    figure.legend(handles=legend, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    write_picture(path, figure)
    return True


def draw_laws(rows: Sequence[Row], laws: Sequence[Law], path: Path) -> bool:
    """Draw gaps against the meetings of a weight, with the laws and their 1-sigma bands; return False without a law."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter  # here: slow to import

    if not laws:
        return False
    figure, axes = _gap_axes()
    axes.set_yscale("log")
    colors = dict(zip((row.label for row in rows), (color for color, *_ in _styles(rows)), strict=True))
    for law in laws:
        color = colors[law.rows[0].label]
        at = np.geomspace(law.meetings.min() / 1.3, law.meetings.max() * 1.3, 100)
        gaps, factors = law.predict(at)
        axes.plot(at, gaps, color=color, linewidth=1.4, label=str(law).partition(", fitted")[0])
        axes.fill_between(at, gaps / factors, gaps * factors, color=color, alpha=0.15, linewidth=0)
        lengths = [row.runs[0].config.num_steps for row in law.rows]
        for place, length in enumerate(sorted(set(lengths))):
            there = np.array(lengths) == length
            label = f"{law.title}, {length:,} steps"
            marker = _MARKS[place % len(_MARKS)]
            axes.plot(law.meetings[there], law.gaps[there], marker, color=color, markersize=8, label=label)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.set_title("Perplexity above data parallel training, against how often a weight is averaged")
    axes.set_xlabel("meetings of a weight in the whole run")
    axes.legend(frameon=False, fontsize=9)
    write_picture(path, figure)
    return True


def _gap_axes(legend_lines: int = 0) -> tuple["Figure", "Axes"]:
    """Return a figure and its only axes, for gaps upwards, with so many lines of room below for a legend."""
    from matplotlib.figure import Figure  # here: slow to import

    figure = Figure(figsize=(11, 5.2 + 0.19 * legend_lines), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log")
    axes.set_ylabel("validation perplexity above the reference (ddp), %")
    axes.grid(True, color="#e6e8ec", linewidth=0.8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _bar(axes: "Axes", sent: float, gaps: np.ndarray, color: str, mark: str) -> None:
    """Draw a mark at the mean, with a bar over all seeds where there are several."""
    there = gaps[np.isfinite(gaps)]
    if len(there):
        mean = there.mean()
        reach = [[mean - there.min()], [there.max() - mean]] if len(there) > 1 else None
        axes.errorbar(sent, mean, reach, color=color, marker=mark, markersize=8, capsize=3)
