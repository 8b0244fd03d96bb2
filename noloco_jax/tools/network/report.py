"""Figures of runs on slow links, from their metrics.jsonl; their table and picture."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from noloco_jax.config import TrainConfig
from noloco_jax.files import write_picture
from noloco_jax.formatting import format_bytes, format_count, format_percent, format_seconds, markdown_table
from noloco_jax.metrics.writer import read_metrics

_NO_FIGURE = "–"
_DASHES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Figures:
    """Figures of a run on its links; seconds are without those of evaluations.

    Attributes:
      step_seconds: of an inner step, its share of the exchanges included.
      exchange_bytes: that a replica sends in an exchange.
      exchanges_per_step: number of them.
      compute_seconds: of an inner step alone, with as many processes on the same machine.
      tokens_per_step: tokens of all replicas.
      curve: (E, 2) seconds since the first step, and perplexity, of every evaluation.
    """

    step_seconds: float
    exchange_bytes: float
    exchanges_per_step: float
    compute_seconds: float
    tokens_per_step: int
    curve: np.ndarray

    @property
    def computing(self) -> float:
        """Share of the time in which inner steps are computed."""
        return min(self.compute_seconds / self.step_seconds, 1.0)

    @property
    def exchange_seconds(self) -> float:
        """Seconds by which an exchange makes the run longer."""
        return max(self.step_seconds - self.compute_seconds, 0.0) / self.exchanges_per_step

    def seconds_to(self, perplexity: float) -> float:
        """Return the seconds until the perplexity is reached, between evaluations by its logarithm; or infinity."""
        seconds, values = self.curve.T
        reached = np.flatnonzero(values <= perplexity)
        if not len(reached):
            return math.inf
        last = int(reached[0])
        if last == 0:
            return float(seconds[0])
        here = slice(last - 1, last + 1)
        return float(np.interp(-math.log(perplexity), -np.log(values[here]), seconds[here]))


def step_seconds(workdir: Path) -> float:
    """Return the mean seconds of the inner steps between the first and the last logged one, without evaluations."""
    metrics = read_metrics(workdir)
    return _step_seconds([line for line in metrics if line["kind"] == "train"], _evaluations(metrics))


def figures_of(workdir: Path, config: TrainConfig, compute_seconds: float) -> Figures:
    """Return the figures of a finished run.

    Args:
      workdir: of the run, or of one of its islands.
      config: the run's.
      compute_seconds: of an inner step alone.
    """
    metrics = read_metrics(workdir)
    steps, evaluations = [line for line in metrics if line["kind"] == "train"], _evaluations(metrics)
    outer = [line for line in steps if line.get("outer_steps")]
    step = _step_seconds(steps, evaluations)
    if outer:
        number = sum(line["outer_steps"] for line in outer)
        sent, per_step = sum(line["bytes_sent"] for line in outer) / number, number / steps[-1]["step"]
    else:  # gradients, at every step
        sent, per_step = steps[-1].get("bytes_sent_inner_step", 0), 1.0
    training = np.cumsum([line["evaluation_seconds"] for line in evaluations])
    curve = [(line["seconds"] - before, line["perplexity"]) for line, before in zip(evaluations, training, strict=True)]
    return Figures(step, sent, per_step, compute_seconds, config.tokens_per_step, np.array(curve))


def _evaluations(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in metrics if line["kind"] == "eval"]


def _step_seconds(steps: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> float:
    first, last = steps[0], steps[-1]
    evaluating = sum(line["evaluation_seconds"] for line in evaluations if first["step"] <= line["step"] < last["step"])
    return (last["seconds"] - first["seconds"] - evaluating) / (last["step"] - first["step"])


class NetworkRow(NamedTuple):
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


def network_table(rows: Sequence[NetworkRow]) -> str:
    """Return the table in Markdown."""
    header = ["method", "links", "step", "computing", "sent", "exchange", "over bytes/rate", "tokens/s", "perplexity"]
    target = rows[0].perplexity
    return markdown_table(
        header + ([f"to {target:g}"] if target is not None else []), [_cells(row) for row in rows], left=2
    )


def _cells(row: NetworkRow) -> list[str]:
    own = row.figures
    least, seconds = 8 * own.exchange_bytes / row.rate, own.exchange_seconds
    cells = [
        row.name,
        row.links,
        format_seconds(own.step_seconds),
        format_percent(own.computing),
        format_bytes(own.exchange_bytes) if own.exchange_bytes else _NO_FIGURE,
        format_seconds(seconds) if own.exchange_bytes else _NO_FIGURE,
        f"{seconds / least:.2f}" if least > 0 else _NO_FIGURE,
        format_count(own.tokens_per_step / own.step_seconds),
        f"{own.curve[-1, 1]:.2f}",
    ]
    if row.perplexity is not None:
        reached = own.seconds_to(row.perplexity)
        cells.append(_NO_FIGURE if math.isinf(reached) else format_seconds(reached))
    return cells


def draw_network(rows: Sequence[NetworkRow], path: Path, perplexity: float | None) -> None:
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
