"""Islands to look at: real agents over TLS, of which each does something else."""

import contextlib
import dataclasses
import math
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from noloco_jax.islands.keys import load_keys, make_keys
from noloco_jax.islands.log import IslandLog, earlier_events
from noloco_jax.islands.protocol.members import Members
from noloco_jax.islands.roster import Roster
from support.counted import in_time
from support.island_nodes import IDENTITY
from support.rosters import on_loopback, written
from support.sites import Site

NAMES = ("berlin", "lisbon", "oslo", "paris", "rome", "vienna")
VIEWER = "viewer_ann"
_POISON_FROM = 8  # once the others know what is usual


class SeenSite(Site):
    """Island that logs as the trainer does.

    Args:
      folder: its workdir.
      number: makes its loss differ from the others'.
      poison: True if its messages become implausibly large.
      **options: of `Site`.
    """

    def __init__(self, name: str, roster: Roster, folder: Path, *, number: int = 0, poison: bool = False, **options):
        self._poison, self._number = poison, number
        super().__init__(name, roster, **options)
        for event in earlier_events(folder):
            self.agent.recent.add(event)
        self.log = IslandLog(folder, name, self.agent.recent.add)
        self._logged = 0

    def message(self, round: int) -> np.ndarray:
        message = super().message(round)
        return message * np.float32(50) if self._poison and round >= _POISON_FROM else message

    def begin(self) -> None:
        self.open()
        self.log.start(10 * (self.round + 1), 0.0)

    def train(self, rounds: int, seconds: float) -> None:
        for _ in range(rounds):
            super().train(1, seconds)
            self.log.round(self.round, 10 * (self.round + 1), 0.01 * self.round, 0.02 * self.round)
            figures = {"loss": 1.2 + 0.03 * self._number + 2.4 * math.exp(-self.round / 8), "tokens_per_second": 2.0e5}
            self.agent.recent.add_figures(10 * (self.round + 1), figures)

    def look(self) -> None:
        super().look()
        for met in self.met[self._logged :]:
            self.log.exchange(met, 4000 if met.outcome in ("met", "late") else 0)
        self._logged = len(self.met)


@dataclasses.dataclass(frozen=True)
class Seen:
    """Islands under way, and what it takes to look at them."""

    roster: Path
    keys: Path
    sites: dict[str, SeenSite]


def has_met_and_refused(site: SeenSite) -> bool:
    """Return whether an island has exchanged with another, and refused vienna."""
    return site.agent.recent.totals["met"] > 0 and any("vienna was refused" in line for line in site.lines)


def is_back(site: SeenSite) -> bool:
    """Return whether an island trains again after its second start, from another one's state."""
    return site.agent.recent.totals["starts"] == 2 and site.agent.recent.totals["healed"] > 0


@contextlib.contextmanager
def seen_islands(folder: Path, rounds: int = 24, seconds: float = 0.15) -> Iterator[Seen]:
    """Run six islands: three train; rome's messages become too large; lisbon ends and comes back; vienna is refused.

    Args:
      folder: gets roster, keys and workdirs.
      rounds: rounds before the body runs; the islands go on during it.
      seconds: duration of a round.
    """
    roster, keys = on_loopback(*NAMES, run="c4-125m"), folder / "keys"
    path = written(roster, folder / "roster.toml")
    make_keys(roster, keys, 90, viewers=[VIEWER])

    def make(name: str, incarnation: int = 1, **options) -> SeenSite:
        credentials, members = load_keys(keys / name, name), Members(roster.names)
        number = NAMES.index(name)
        return SeenSite(
            name,
            roster,
            folder / name,
            number=number,
            poison=name == "rome",
            credentials=credentials,
            members=members,
            incarnation=incarnation,
            **options,
        )

    sites = {name: make(name) for name in NAMES[:-1]}
    over = threading.Event()

    def live(name: str, most: float = math.inf) -> None:
        site = sites[name]
        site.begin()
        while not over.is_set() and site.round + 1 < most:
            site.train(1, seconds if site.round < rounds else 4 * seconds)  # or early events would be forgotten

    def killed_and_back(name: str) -> None:
        live(name, rounds // 3)
        sites[name].agent.close()
        if not over.wait(seconds * rounds / 3):
            sites[name] = make(name, incarnation=10**6, began_before=True)
            live(name)

    stranger = make("vienna", identity=dataclasses.replace(IDENTITY, config={"seed": "2"}))
    lives = {name: killed_and_back if name == "lisbon" else live for name in sites}
    threads = [threading.Thread(target=life, args=(name,), daemon=True) for name, life in lives.items()]
    try:
        for thread in threads:
            thread.start()
        over.wait(seconds * rounds)
        stranger.agent.open()  # another configuration: the others refuse it, and it goes away
        over.wait(1.0)
        assert in_time(lambda: all(has_met_and_refused(sites[name]) for name in ("berlin", "oslo", "paris")))
        stranger.agent.close()
        over.wait(seconds * 4)
        assert in_time(lambda: is_back(sites["lisbon"]))
        yield Seen(path, keys, sites)
    finally:
        over.set()
        for thread in threads:
            thread.join(30)
        for site in sites.values():
            site.agent.close()
