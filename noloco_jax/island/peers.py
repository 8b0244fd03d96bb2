"""What islands know of one another: their keys, and how all of them are. Needs no jax."""

import argparse

from noloco_jax.errors import UserError
from noloco_jax.files import check_writable
from noloco_jax.islands.keys import AUTHORITY_KEY, make_keys
from noloco_jax.islands.look import ask_all, clients_of
from noloco_jax.islands.roster import read_roster
from noloco_jax.run.console import make_console
from noloco_jax.run.island_status import status_table


def keys(flags: argparse.Namespace) -> int:
    """Makes the keys that are missing, and says what to do with them."""
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
    """Asks every island how it is; those that do not answer have a line that says why."""
    roster = read_roster(flags.roster)
    if not 0 < flags.seconds <= 600:
        raise UserError(f"--seconds={flags.seconds}: give more than 0 and up to 600")
    make_console().print(status_table(roster, ask_all(clients_of(roster, flags.keys), flags.seconds)))
    return 0
