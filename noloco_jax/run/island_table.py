"""The table of a run's islands: what became of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from noloco_jax.formatting import format_bytes, format_perplexity
from noloco_jax.run.island_log import History, read_log
from noloco_jax.run.island_timeline import figures_of
from noloco_jax.run.metrics import METRICS_FILE, read_metrics


class Row(NamedTuple):
    """An island's log, and the perplexity of its last evaluation; None before the first."""

    history: History
    perplexity: float | None


def row_of(workdir: Path) -> Row:
    """What an island's folder tells. Raises `UserError` where it is none."""
    history = read_log(workdir)
    lines = read_metrics(workdir) if (workdir / METRICS_FILE).exists() else []
    evaluations = [line["perplexity"] for line in lines if line["kind"] == "eval"]
    return Row(history, evaluations[-1] if evaluations else None)


def report_table(rows: Sequence[Row]) -> Table:
    """A row an island: its rounds, exchanges, how late and how large they were, starts, healings, perplexity."""
    every = [figures_of(row.history) for row in rows]
    gave_way = sum(figures.gave_way for figures in every)
    title = f"islands (lag: rounds by which corrections were late; gave way {gave_way:.0f} s in all)"
    table = Table("island", title=title, title_justify="left")
    for name in ("rounds", "exchanged", "lag", "sent", "starts", "healed", "perplexity"):
        table.add_column(name, justify="right")
    for (history, perplexity), figures in zip(rows, every, strict=True):
        table.add_row(
            history.name,
            str(figures.rounds),
            f"{figures.met} of {figures.due}" if figures.due else "none due",
            f"{figures.lag:.2f}",
            format_bytes(figures.sent),
            str(figures.starts),
            str(figures.healings),
            "not yet" if perplexity is None else format_perplexity(perplexity),
        )
    return table
