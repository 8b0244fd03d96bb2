"""Report of what became of a run's islands, as a table and a picture.

The picture has time from left to right, a row an island, its rounds as ticks, and exchanges between the rows.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.table import Table

from noloco_jax.files import write_picture
from noloco_jax.formatting import format_bytes, format_percent, format_perplexity
from noloco_jax.island.timeline import died, figures_of, links_of, timeline_of
from noloco_jax.islands.log import History, read_log
from noloco_jax.metrics.writer import METRICS_FILE, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROW, _ROUND, _MET, _LATE, _ALONE, _DEAD, _HEALED = (
    *("#c9ced6", "#3d4654", "#1f5fa8", "#e08a1e", "#8e44ad", "#d1495b", "#2a7f62"),
)
_SCALES = ((120, 1.0, "seconds"), (7200, 60.0, "minutes"), (math.inf, 3600.0, "hours"))
_TICK = 0.13  # half a round's tick, in rows


class Row(NamedTuple):
    """Row of the report: an island's log, and the perplexity of its last evaluation; None before the first."""

    history: History
    perplexity: float | None


def row_of(workdir: Path) -> Row:
    """Return the row of an island's workdir.

    Raises `UserError` where it has no log of an island.
    """
    history = read_log(workdir)
    lines = read_metrics(workdir) if (workdir / METRICS_FILE).exists() else []
    evaluations = [line["perplexity"] for line in lines if line["kind"] == "eval"]
    return Row(history, evaluations[-1] if evaluations else None)


def report_table(rows: Sequence[Row]) -> Table:
    """Return a table of the islands: exchanges, how late they were, bytes, starts, states taken, perplexity."""
    every = [figures_of(row.history) for row in rows]
    timed, exposed = sum(figures.timed for figures in every), sum(figures.exposed for figures in every)
    stood_still = f"training stood still for exchanges for {format_percent(exposed / timed)}, " if timed else ""
    gave_way = sum(figures.gave_way for figures in every)
    title = f"islands ({stood_still}paused {gave_way:.0f} s in all)"
    table = Table("island", title=title, title_justify="left")
    for name in ("rounds", "exchanged", "steps\nlate", "sent", "starts", "caught\nup", "per-\nplexity"):
        table.add_column(name, justify="right")
    for (history, perplexity), figures in zip(rows, every, strict=True):
        table.add_row(
            history.name,
            str(figures.rounds),
            f"{figures.met} of {figures.due}" if figures.due else "none due",
            "unknown" if figures.steps_late is None else f"{figures.steps_late:.1f}",
            format_bytes(figures.sent),
            str(figures.starts),
            str(figures.healings),
            "not yet" if perplexity is None else format_perplexity(perplexity),
        )
    return table


def draw_islands(histories: Sequence[History], path: Path) -> Path:
    """Draw the history of these islands, the first on top, and return the picture's path.

    Args:
      histories: logs of one island or more, from `log.read_log`.
      path: path of the PNG.
    """
    from matplotlib.figure import Figure  # here: slow to import, and not pyplot, so that no display is touched

    figure = Figure(figsize=(13, 1.9 + 0.85 * len(histories)), dpi=120, layout="constrained")
    draw_on(figure.subplots(), histories)
    return write_picture(path, figure)


def draw_on(axes: "Axes", histories: Sequence[History]) -> None:
    """Draw the islands' rows; a kind of event that did not occur has no entry in the legend."""
    from matplotlib.collections import LineCollection

    timelines = [timeline_of(history) for history in histories]
    rows = {timeline.name: row for row, timeline in enumerate(timelines)}
    begin = min(life.start for timeline in timelines for life in timeline.lives)
    now = max(life.end for timeline in timelines for life in timeline.lives)
    unit, name = next((seconds, name) for limit, seconds, name in _SCALES if now - begin < limit)

    def at(time: float) -> float:
        return (time - begin) / unit

    def lines(segments: list, color: str, label: str, order: int, **style) -> None:
        if segments:
            axes.add_collection(LineCollection(segments, colors=color, label=label, zorder=order, **style))

    def marks(points: list[tuple[float, float]], marker: str, color: str, label: str, **style) -> None:
        if points:
            axes.plot(*zip(*points, strict=True), marker, color=color, label=label, zorder=5, **style)

    links = [
        (((at(link.first_time), rows[link.first]), (at(link.second_time), rows[link.second])), link.late)
        for link in links_of(histories)
    ]
    faint = {"linewidths": 1.0, "alpha": min(0.75, max(0.15, 120 / max(len(links), 1)))}
    lines([segment for segment, late in links if not late], _MET, "exchange", 2, **faint)
    lines([segment for segment, late in links if late], _LATE, "exchange, late for one", 2, **faint)

    alive, away, ticks, alone, dead, healed, arrows = [], [], [], [], [], [], []
    for row, timeline in enumerate(timelines):
        for number, life in enumerate(timeline.lives):
            alive.append(((at(life.start), row), (at(life.end), row)))
            if number:
                away.append(((at(timeline.lives[number - 1].end), row), (at(life.start), row)))
            if died(life, timeline, now):
                dead.append((at(life.end), row))
        ticks += [((at(time), row - _TICK), (at(time), row + _TICK)) for time in timeline.rounds]
        alone += [(at(time), row) for time in timeline.alone]
        healed += [(at(time), row) for time, _ in timeline.healings]
        arrows += [(at(time), rows[donor], row) for time, donor in timeline.healings if donor in rows]
    lines(alive, _ROW, "trains", 1, linewidths=5)
    lines(away, _DEAD, "away", 1, linewidths=1.5, linestyles="dotted")
    lines(ticks, _ROUND, "end of a round", 3, linewidths=0.8)
    marks(alone, "o", _ALONE, "round alone", markersize=4.5, markerfacecolor="white")
    marks(dead, "X", _DEAD, "killed or failed", markersize=10)
    marks(healed, "D", _HEALED, "caught up: weights of another", markersize=7)
    for time, start, end in arrows:
        style = {"arrowstyle": "->", "color": _HEALED, "linewidth": 2, "shrinkB": 6}
        axes.annotate("", (time, end), (time, start), arrowprops=style, zorder=4)

    axes.set_xlim(0, at(now) * 1.01 or 1)
    axes.set_ylim(len(timelines) - 0.5, -0.5)
    axes.set_yticks(range(len(timelines)), [timeline.name for timeline in timelines])
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel(f"{name} since the first start")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=8, frameon=False, fontsize=9)
