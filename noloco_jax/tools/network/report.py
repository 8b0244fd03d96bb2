"""Table and picture of runs on slow links."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from noloco_jax.files import write_picture
from noloco_jax.formatting import format_bytes, format_count, format_percent, format_seconds, markdown_table
from noloco_jax.tools.network.figures import Figures

_NONE = "–"
_DASHES = ("-", "--", ":", "-.")


class Row(NamedTuple):
    """A run.

    Attributes:
      name: of its variant.
      links: their rates, for people.
      rate: bits a second of the slowest link of a replica alone on its host; infinite if several share one.
      figures: of the run.
      perplexity: whose time is reported; None: none is.
    """

    name: str
    links: str
    rate: float
    figures: Figures
    perplexity: float | None


def table(rows: Sequence[Row]) -> str:
    """Return the table in Markdown."""
    header = ["method", "links", "step", "computing", "sent", "exchange", "over bytes/rate", "tokens/s", "perplexity"]
    target = rows[0].perplexity
    return markdown_table(
        header + ([f"to {target:g}"] if target is not None else []), [_cells(row) for row in rows], left=2
    )


def _cells(row: Row) -> list[str]:
    own = row.figures
    least, seconds = 8 * own.exchange_bytes / row.rate, own.exchange_seconds
    cells = [
        row.name,
        row.links,
        format_seconds(own.step_seconds),
        format_percent(own.computing),
        format_bytes(own.exchange_bytes) if own.exchange_bytes else _NONE,
        format_seconds(seconds) if own.exchange_bytes else _NONE,
        f"{seconds / least:.2f}" if least > 0 else _NONE,
        format_count(own.tokens_per_step / own.step_seconds),
        f"{own.curve[-1, 1]:.2f}",
    ]
    if row.perplexity is not None:
        reached = own.seconds_to(row.perplexity)
        cells.append(_NONE if math.isinf(reached) else format_seconds(reached))
    return cells


def draw(rows: Sequence[Row], path: Path, perplexity: float | None) -> None:
    """Draw the perplexity against seconds, a panel for the links of each rate."""
    from matplotlib import colormaps  # here: slow to import
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    links, names = (
        list(dict.fromkeys(values)) for values in zip(*((row.links, row.name) for row in rows), strict=True)
    )
    figure = Figure(figsize=(5.5 * len(links), 4.5), dpi=120, layout="constrained")
    for axes, own in zip(figure.subplots(1, len(links), sharey=True, squeeze=False)[0], links, strict=True):
        for row in rows:
            if row.links == own:
                number = names.index(row.name)
                color, dash = colormaps["tab10"](number % 10), _DASHES[number // 10 % len(_DASHES)]
                axes.plot(*row.figures.curve.T, color=color, linestyle=dash, marker="o", markersize=3, label=row.name)
        if perplexity is not None:
            axes.axhline(perplexity, color="#999999", linewidth=0.8)
        axes.set_title(f"links: {own}")
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):  # 5, 10, 20 instead of powers of ten
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("seconds, without evaluations")
        axes.grid(True, color="#e6e8ec", linewidth=0.8)
        axes.legend(fontsize=8)
    figure.axes[0].set_ylabel("validation perplexity")
    write_picture(path, figure)
