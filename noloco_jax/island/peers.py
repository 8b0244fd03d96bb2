"""Commands on islands' keys and status. Needs no jax."""

import argparse
from collections.abc import Mapping

from rich.table import Table

from noloco_jax.errors import UserError
from noloco_jax.files import check_writable
from noloco_jax.islands.keys import AUTHORITY_KEY, make_keys
from noloco_jax.islands.protocol.messages import Status
from noloco_jax.islands.query import ask_all, clients_of
from noloco_jax.islands.roster import Roster, read_roster
from noloco_jax.run.console import make_console


def keys(flags: argparse.Namespace) -> int:
    """Make the keys that are missing, and print what to do with them."""
    if not 1 <= flags.days <= 3650:
        raise UserError(f"--days={flags.days}: give 1 to 3650, the days that the authority itself is valid")
    roster = read_roster(flags.roster)
    check_writable(flags.out)
    made = make_keys(roster, flags.out, flags.days, flags.replace)
    kept = [name for name in roster.names if name not in made]
    if kept:
        print(f"kept as they are: {', '.join(kept)}")
    for name in made:
        print(f"made: {flags.out / name}, valid for {flags.days} days; carry it to {name}'s machine, and nowhere else")
    if made:
        print(
            f"{flags.out / AUTHORITY_KEY} signs for any name of {roster.run}: no island needs it, keep it off their "
            "machines; you need it here again to add an island"
        )
    return 0


def status(flags: argparse.Namespace) -> int:
    """Print the status of every island, with a reason for those that do not answer."""
    roster = read_roster(flags.roster)
    if not 0 < flags.seconds <= 600:
        raise UserError(f"--seconds={flags.seconds}: give more than 0 and up to 600")
    make_console().print(status_table(roster, ask_all(clients_of(roster, flags.keys), flags.seconds)))
    return 0


def status_table(roster: Roster, answers: Mapping[str, Status | str]) -> Table:
    """Return a table of the islands: round, state, exchanges that committed, lag, partner."""
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
