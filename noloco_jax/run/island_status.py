"""The table of a run's islands: how they are just now. Needs no jax."""

from collections.abc import Mapping

from rich.table import Table

from noloco_jax.islands.protocol.headers import Status
from noloco_jax.islands.roster import Roster


def status_table(roster: Roster, answers: Mapping[str, Status | str]) -> Table:
    """A row an island: its round, whether it trains, how many of its exchanges came about and how late, its partner."""
    table = Table("island", "round", "state", "exchanged", "lag", "partner", title=f"islands of {roster.run}")
    for island in roster.islands:
        answer = answers[island.name]
        if isinstance(answer, str):
            table.add_row(island.name, "", f"away: {answer.removeprefix(island.name).lstrip(' :')}")
            continue
        table.add_row(
            island.name,
            str(answer.round + 1),
            "finished" if answer.finished else "training" if answer.training else "starting or leaving",
            f"{answer.committed} of {answer.due}" if answer.due else "none due yet",
            f"{answer.lag:.2f} rounds",
            answer.partner or "nobody",
        )
    return table
