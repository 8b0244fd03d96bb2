"""Status of all islands: a table, once or again and again, and the watcher behind the dashboard. Needs no jax."""

import argparse
import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.live import Live
from rich.table import Table

from noloco_jax.errors import UserError
from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.commands import Found, Run, ask_all, discover, open_run
from noloco_jax.islands.transport import Dialler
from noloco_jax.metrics.console import make_console

PHASES = {
    pb.Status.STARTING: "starting",
    pb.Status.READY: "waiting to begin",
    pb.Status.TRAINING: "training",
    pb.Status.FINISHED: "finished",
    pb.Status.LEAVING: "leaving",
    pb.Status.MERGED: "finished",
    pb.Status.GONE: "leaving",
}
_KEPT = 600  # samples of an island
_LONGEST = 300  # characters of a line


def status(flags: argparse.Namespace) -> int:
    """Print the status of every island, with a reason for those that do not answer; with --watch until Ctrl-C."""
    if not 0 < flags.seconds <= 600:
        raise UserError(f"--seconds={flags.seconds}: give more than 0 and up to 600")
    run, console = open_run(flags.roster, flags.keys), make_console()
    found = discover(run, flags.seconds)
    if not flags.watch:
        console.print(status_table(found))
        return 0
    with Live(status_table(found), console=console, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(2)
                live.update(status_table(discover(found.run, flags.seconds)), refresh=True)
        except KeyboardInterrupt:
            return 0


def status_table(found: Found) -> Table:
    """Return a table of the islands: round, state, exchanges, lateness, partner, and the roster's version."""
    roster = found.run.roster
    columns = "island", "round", "state", "exchanged", "late", "partner", "roster", "loss"
    table = Table(*columns, title=f"islands of {roster.run}, roster version {roster.version}")
    for member in roster.members:
        answer = found.answers.get(member.name, "removed")
        if member.until_round is not None:
            answer = answer if isinstance(answer, pb.Status) else f"removed before round {member.until_round + 1}"
        if isinstance(answer, str):
            table.add_row(member.name, "", answer if answer.startswith("removed") else f"away: {answer}")
            continue
        loss = answer.figures.get("loss")
        table.add_row(
            member.name,
            str(answer.round + 1),
            PHASES.get(answer.phase, "?"),
            f"{answer.committed} of {answer.due}" if answer.due else "none due yet",
            f"{answer.steps_late:.2f}",
            answer.partner or "nobody",
            str(answer.roster_version),
            "" if loss is None else f"{loss:.3f}",
        )
    return table


@dataclass
class Watched:
    """Last known state of one island, and samples of it.

    Attributes:
      status: its last answer.
      away: the reason for which it does not answer now; empty: it does.
      answered: time of the last answer.
      samples: (time, round, loss, perplexity) of its answers; None for each where it gave none.
    """

    status: pb.Status | None = None
    away: str = "not asked yet"
    answered: float = 0.0
    samples: deque = field(default_factory=lambda: deque(maxlen=_KEPT))

    def take(self, answer: pb.Status | str, now: float) -> None:
        """Keep an answer, or the reason for which there is none."""
        if isinstance(answer, str):
            self.away = answer
            self.samples.append((now, None, None, None))
            return
        self.status, self.away, self.answered = answer, "", now
        figures = _finite(answer.figures)
        self.samples.append((now, answer.round + 1, figures.get("loss"), figures.get("perplexity")))

    def to_json(self, now: float) -> dict[str, Any]:
        """Return what a page shows."""
        one = self.status
        shown: dict[str, Any] = {"away": self.away, "samples": list(self.samples)}
        if one is None:
            return shown
        return shown | {
            "phase": PHASES.get(one.phase, "?") if not self.away else "away",
            "seconds": now - self.answered,
            "round": one.round + 1,
            "step": one.step,
            "due": one.due,
            "committed": one.committed,
            "one_sided": one.one_sided,
            "steps_late": one.steps_late if math.isfinite(one.steps_late) else None,
            "participation": one.committed / one.due if one.due else None,
            "partner": one.partner,
            "members": one.num_members,
            "roster": one.roster_version,
            "figures": _finite(one.figures),
            "peers": [{"name": peer.name, "fault": peer.fault[:_LONGEST]} for peer in one.peers],
            "notices": [line[:_LONGEST] for line in one.notices],
        }


def _finite(figures: Mapping[str, float]) -> dict[str, float]:
    """Return the figures that JSON can hold."""
    return {name: value for name, value in figures.items() if math.isfinite(value)}


class Watcher:
    """Asks all islands again and again, in a thread, from `start` until `close`.

    Args:
      run: the run.
      every: seconds between two questions.
    """

    def __init__(self, run: Run, every: float):
        self._run, self._every = run, every
        self._lock = threading.Lock()
        self._islands: dict[str, Watched] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="island-watcher")

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(10)

    def to_json(self) -> dict[str, Any]:
        """Return the run and its islands, for a page and for metrics."""
        now = time.time()
        with self._lock:
            islands = {name: one.to_json(now) for name, one in self._islands.items()}
        return {"run": self._run.roster.run, "version": self._run.roster.version, "now": now, "islands": islands}

    def _watch(self) -> None:
        asyncio.run(self._poll())

    async def _poll(self) -> None:
        dialler = Dialler(self._run.name, self._run.credentials, self._run.roster)
        while not self._over.is_set():
            found = await ask_all(self._run, dialler, max(self._every, 2.0))
            with self._lock:
                self._run = found.run
                for name, answer in found.answers.items():
                    self._islands.setdefault(name, Watched()).take(answer, time.time())
            waited = time.monotonic() + self._every
            while time.monotonic() < waited and not self._over.is_set():
                await asyncio.sleep(0.1)
        await dialler.close()
