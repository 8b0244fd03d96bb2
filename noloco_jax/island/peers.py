"""Commands on islands' keys and status. Needs no jax."""

import argparse

from rich.table import Table

from noloco_jax.errors import UserError
from noloco_jax.files import check_writable
from noloco_jax.island.members import check_days
from noloco_jax.islands.certificates import VIEWER, is_viewer
from noloco_jax.islands.discovery import Found, discover, read_run
from noloco_jax.islands.entries import MEMBERS_FILE, describe, known_roster, members_at, read_members, write_members
from noloco_jax.islands.keys import AUTHORITY_KEY, make_keys, signing_alone
from noloco_jax.islands.protocol.members import Members
from noloco_jax.islands.roster import Roster, check_name, read_roster
from noloco_jax.metrics.console import make_console


def keys(flags: argparse.Namespace) -> int:
    """Make the keys that are missing, and print what to do with them."""
    check_days(flags.days)
    founders = read_roster(flags.roster)
    check_writable(flags.out)
    with signing_alone(flags.out):
        return _keys(flags, founders)


def _keys(flags: argparse.Namespace, founders: Roster) -> int:
    path = flags.out / MEMBERS_FILE
    entries = read_members(path).entries if path.exists() else ()
    if entries:
        members_at(path, founders, None)  # raises where the roster has changed since
    roster = known_roster(founders, Members(founders.names, lambda entry: True, entries), 0)
    wanted = [*flags.viewer, *filter(is_viewer, flags.replace)]
    viewers = list(dict.fromkeys(VIEWER + name.removeprefix(VIEWER) for name in wanted))
    for viewer in viewers:
        check_name(viewer.removeprefix(VIEWER))
    made = make_keys(roster, flags.out, flags.days, flags.replace, viewers)
    write_members(path, founders, entries)
    for name in made:
        if name in roster.names and name not in founders.names:
            write_members(flags.out / name / MEMBERS_FILE, founders, entries)  # what `join` begins from
    kept = [name for name in (*roster.names, *viewers) if name not in made]
    if kept:
        print(f"kept as they are: {', '.join(kept)}")
    for name in [name for name in made if is_viewer(name)]:
        print(f"made: {flags.out / name}, valid for {flags.days} days: it opens the status of islands and nothing else")
    for name in [name for name in made if not is_viewer(name)]:
        print(f"made: {flags.out / name}, valid for {flags.days} days; carry it to {name}'s machine, and nowhere else")
    if made:
        print(
            f"{flags.out / AUTHORITY_KEY} signs for any name of {roster.run}: no island needs it, keep it off their "
            "machines; you need it here again for `island invite` and `island remove`"
        )
    return 0


def status(flags: argparse.Namespace) -> int:
    """Print the status of every island, with a reason for those that do not answer."""
    run = read_run(flags.roster)
    if not 0 < flags.seconds <= 600:
        raise UserError(f"--seconds={flags.seconds}: give more than 0 and up to 600")
    found = discover(run, flags.keys, flags.seconds)
    console = make_console()
    console.print(status_table(found))
    if found.members.entries:
        console.print(entries_table(found))
    return 0


def status_table(found: Found) -> Table:
    """Return a table of the islands: round, state, exchanges that committed, lag, partner, members that it counts."""
    columns = "island", "round", "state", "exchanged", "lag", "partner", "members"
    table = Table(*columns, title=f"islands of {found.roster.run}")
    for island in found.roster.islands:
        answer = found.answers[island.name]
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
            str(answer.members),
        )
    return table


def entries_table(found: Found) -> Table:
    """Return a table of what has changed since the roster, and which islands know it."""
    table = Table("change", "known to", title=f"members of {found.roster.run}")
    for entry in found.members.entries:
        missing = [name for name, known in found.entries.items() if entry not in known]
        known = f"all but {', '.join(missing)}" if missing else "all that answer" if found.entries else "nobody answers"
        table.add_row(describe(entry), known)
    return table
