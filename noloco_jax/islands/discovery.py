"""Members of a run as its islands know them, asked for from outside; and news told to them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from noloco_jax.islands.client import Client
from noloco_jax.islands.entries import Saved, check_of, known_roster, read_members
from noloco_jax.islands.protocol.members import Entry, Members, News
from noloco_jax.islands.protocol.messages import Status, StatusRequest
from noloco_jax.islands.query import ask_all, ask_status, clients_of, credentials_in, kept_entries
from noloco_jax.islands.roster import Roster, read_roster

_MOST_PAGES = 1024


@dataclass(frozen=True)
class Found:
    """Islands of a run and what they answer.

    Attributes:
      roster: the known members, at their newest addresses.
      members: the entries of all that answered, merged.
      clients: island -> its client, or the reason why it cannot be asked.
      answers: island -> its status, or the reason why it is unknown.
      entries: island that answered -> the entries that it knows.
    """

    roster: Roster
    members: Members
    clients: Mapping[str, Client | str]
    answers: Mapping[str, Status | str]
    entries: Mapping[str, frozenset[Entry]]

    @property
    def statuses(self) -> dict[str, Status]:
        return {name: answer for name, answer in self.answers.items() if isinstance(answer, Status)}

    @property
    def round(self) -> int:
        """The last round that one of them has ended; -1: none."""
        return max((status.round for status in self.statuses.values()), default=-1)

    @property
    def active(self) -> tuple[str, ...]:
        """Members of the round under way, by their ids."""
        return self.members.active(self.round + 1)


def read_run(path: Path) -> Saved:
    """Read the founders from a roster's TOML file, or founders and entries from an island's `members.json`."""
    return read_members(path) if path.suffix == ".json" else Saved(read_roster(path), ())


def discover(run: Saved, keys: Path | None, seconds: float, tell: Sequence[Entry] = ()) -> Found:
    """Ask all islands of a run for their status and entries, also those that only their entries name.

    Args:
      run: the founders and the entries known here.
      keys: see `query.clients_of`.
      seconds: the limit of each answer.
      tell: entries to tell every island, in the same calls.
    """
    credentials = next(iter(credentials_in(run.roster, keys, run.entries).values()), None)
    known = (*kept_entries(keys), *run.entries, *tell)
    members = Members(run.roster.names, check_of(run.roster.run, credentials), known)
    clients: dict[str, Client | str] = {}
    answers: dict[str, Status | str] = {}
    entries: dict[str, frozenset[Entry]] = {}
    news = News(tuple(tell)) if tell else None

    def ask(client: Client) -> tuple[Status, list[Entry]]:
        status = ask_status(client, StatusRequest(news=news), seconds)
        return status, _entries(client, status, seconds)

    while True:
        reached = max((one.round for one in answers.values() if isinstance(one, Status)), default=0)
        roster = known_roster(run.roster, members, reached)
        new = {name: one for name, one in clients_of(roster, keys).items() if name not in answers}
        if not new:
            return Found(roster, members, clients, answers, entries)
        clients |= new
        for name, answer in ask_all(new, ask).items():
            answers[name] = answer if isinstance(answer, str) else answer[0]
            if not isinstance(answer, str):
                members.merge(answer[1])
                entries[name] = frozenset(answer[1])


def introduce(client: Client, members: Members, seconds: float) -> Status:
    """Tell an island all entries known here, and learn all of its own; return its status.

    Raises `PeerError` if it does not answer.
    """
    before: int | None = None
    while True:
        page = members.news(before)
        status = ask_status(client, StatusRequest(news=page), seconds)
        if not page.rest:
            break
        before = min(entry.order for entry in page.entries)
    members.merge(_entries(client, status, seconds))
    return status


def _entries(client: Client, status: Status, seconds: float) -> list[Entry]:
    """Return all entries of an island, from its status on page by page."""
    found: list[Entry] = []
    for _ in range(_MOST_PAGES):
        page = status.news or News()
        found += page.entries
        if not page.rest or not page.entries:
            break
        before = min(entry.order for entry in page.entries)
        status = ask_status(client, StatusRequest(before=before), seconds)
    return found
