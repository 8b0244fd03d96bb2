"""Status of all islands: a table, once or again and again. Needs no jax."""

import argparse
import time
from collections.abc import Mapping
from functools import partial

from rich.live import Live
from rich.table import Table
from rich.text import Text

from noloco_jax.errors import UserError
from noloco_jax.islands.ask import discover, open_run
from noloco_jax.islands.roster import Member, Roster
from noloco_jax.islands.standing import AWAY, FINISHED, LEFT, REMOVED, TRAINING, Watched, states_of, summary
from noloco_jax.islands.watcher import Watcher
from noloco_jax.metrics.console import make_console

_EVERY = 2.0  # seconds
_COLORS = {TRAINING: "green", FINISHED: "blue", LEFT: "magenta", REMOVED: "bright_black", AWAY: "red"}
_FRAME = 8  # lines of a terminal that are no rows, and a few for states of two lines


def status(flags: argparse.Namespace) -> int:
    """Print the status of every island, with a reason for those that do not answer; with --watch until Ctrl-C."""
    if not 0 < flags.seconds <= 600:
        raise UserError(f"--seconds={flags.seconds}: give more than 0 and up to 600")
    run, console = open_run(flags.roster, flags.keys), make_console()
    if not flags.watch:
        found = discover(run, flags.seconds)
        roster = found.run.roster
        console.print(status_table(roster, states_of(roster, found.islands), found.islands))
        return 0
    watcher = Watcher(run, _EVERY, flags.seconds, reopen=partial(open_run, flags.roster, flags.keys))
    watcher.start()
    try:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                time.sleep(_EVERY)
                live.update(status_table(*watcher.known(), console.height - _FRAME), refresh=True)
    except KeyboardInterrupt:
        return 0
    finally:
        watcher.close()


def status_table(
    roster: Roster, states: Mapping[str, str], islands: Mapping[str, Watched], max_rows: int | None = None
) -> Table:
    """Return a table of the islands: round, state, exchanges, lateness, partner, roster's version, and loss.

    It has `max_rows`, those first that do not train; None: all, in the order of the roster.
    """
    names = list(states)
    if max_rows is not None and len(names) > max_rows:
        names.sort(key=lambda name: states[name] == TRAINING)
        names = names[: max(max_rows, 1)]
    columns = "island", "round", "state", "exchanged", "late", "partner", "roster", "loss"
    version = f", roster version {roster.version}" if roster.version > 1 else ""
    title = f"run {roster.run}{version}\n{summary(states.values())}"
    hidden = len(states) - len(names)
    table = Table(*columns, title=title, caption=f"{hidden} more are not shown" if hidden else None)
    for name in names:
        table.add_row(*_row(roster.member(name), states[name], islands.get(name) or Watched(), roster.version))
    return table


def _row(member: Member, state: str, known: Watched, newest: int) -> list[str | Text]:
    """Return the cells of an island; of one that does not answer the last that is known."""
    text = state
    if state == AWAY:
        text = f"{state}: {known.fault}"
    elif member.until_round is not None:
        before = f"before round {member.until_round + 1}"
        text = f"{state} {before}" if state == REMOVED else f"{state}, removed {before}"
    shown, styled = known.to_json(state, newest, 0.0), Text(text, _COLORS.get(state, "yellow"))
    if "due" not in shown:
        return [member.name, "", styled]
    loss = shown["figures"].get("loss")
    return [
        member.name,
        str(shown.get("round", "")),
        styled,
        f"{shown['committed']} of {shown['due']}" if shown["due"] else "none due yet",
        "" if shown["steps_late"] is None else f"{shown['steps_late']:.2f}",
        shown["partner"] or "nobody",
        f"{shown['roster']}{', behind' * shown['is_behind']}",
        "" if loss is None else f"{loss:.3f}",
    ]
