"""Picture of a comparison: perplexity against tokens, and the gap to ddp against the bytes that a replica sends."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from noloco_jax.compare.results import Row, mean_and_std
from noloco_jax.files import write_picture
from noloco_jax.formatting import format_bytes, format_count

_DASHES = ("-", "--", ":", "-.")
_MARKS = "os^vPX<>p*h"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the rows: a line the mean over seeds, a band or bar from the least seed to the greatest.

    On the right, full marks are of the mean of the replicas and hollow ones of the merged model; what sends nothing is
    a level, as the axis has no place for it.
    """
    from matplotlib import colormaps  # here: slow to import
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(13, 5), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2)
    titles = list(dict.fromkeys(row.variant.title for row in rows))
    for row in rows:
        color = colormaps["tab10"](titles.index(row.variant.title) % 10)
        same = [other.variant for other in rows if other.variant.title == row.variant.title]
        place = same.index(row.variant)
        last = mean_and_std(row.figures["perplexity"])[0]
        label = f"{row.variant.name}: {last:.2f}"
        left.plot(row.tokens, row.curves.mean(axis=0), color=color, linestyle=_DASHES[place % 4], label=label)
        left.fill_between(
            row.tokens, row.curves.min(axis=0), row.curves.max(axis=0), color=color, alpha=0.2, linewidth=0
        )
        gaps, sent = row.figures["gap_percent"], mean_and_std(row.figures["bytes_sent"])[0]
        gap, merged = (mean_and_std(row.figures[name])[0] for name in ("gap_percent", "gap_merged_percent"))
        if not np.isfinite([gap, merged, sent]).all():
            continue
        if sent == 0:
            right.axhline(gap, color=color, linestyle=":", label=f"{row.variant.name}, sends nothing")
            continue
        mark, reach = _MARKS[place % len(_MARKS)], [[gap - gaps.min()], [gaps.max() - gap]]
        right.errorbar(sent, gap, reach, color=color, marker=mark, markersize=8, capsize=3, linestyle="")
        right.plot(sent, merged, color=color, marker=mark, markerfacecolor="white", linestyle="")
        right.annotate(row.variant.name, (sent, gap), (9, 4), textcoords="offset points", color=color, fontsize=9)

    last = np.concatenate([row.curves[:, len(row.tokens) // 4 :].ravel() for row in rows])  # the first ones dwarf it
    if np.isfinite(last).any():
        left.set_ylim(0.97 * last[np.isfinite(last)].min(), 1.03 * last[np.isfinite(last)].max())
    left.set_title("Validation perplexity, mean of the replicas")
    left.set_xlabel("tokens, all replicas together")
    left.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))
    right.set_title("Perplexity above ddp (full: mean of the replicas, hollow: merged model)")
    right.set_xlabel("bytes that a replica sends in the whole run")
    right.set_ylabel("above ddp, %")
    right.set_xscale("log")
    right.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))
    for axes in (left, right):
        axes.grid(True, color="#e6e8ec", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=9)
    write_picture(path, figure)
