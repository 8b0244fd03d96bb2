"""Members of a run: signed entries that islands merge whenever they talk, and who is active in a round (design §16).

A run begins with its founders, the islands of the roster, whose ids are their places there. Whatever changes later is
an entry: the authority admits a member from a round on or removes one, and a member tells its own new address. The
newest version of an entry wins, wherever it was heard, so that islands that talk come to the same set. Who is active in
a round is a pure function of that set; two islands with different sets do not pair in that round, which costs each a
round alone.

News travels with the headers that islands send anyway: the newest entries, and a digest of the older ones. Where the
digests of older ones differ, an island asks for them, page by page.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple, NewType

PAGE = 32  # entries in one header
_MOST_VERSION = 1 << 42  # milliseconds since 1970
GRACE = 8  # rounds after a removal in which the messages of earlier rounds may still be exchanged
OPEN = -1  # until_round of a member that stays

Certificate = NewType("Certificate", str)


@dataclass(frozen=True)
class Entry:
    """Signed statement about one member.

    Attributes:
      id: the member's number, which never changes; -1 in a statement of the member itself.
      name: the island's name.
      address: where others reach it, "host:port"; empty: as before.
      from_round: the first round in which it is active.
      until_round: the round from which on it is not; -1: it stays.
      issued: milliseconds in which its certificate was made: older ones of that name are refused.
      version: grows with every statement of one signer about one member: milliseconds since 1970.
      signature: the authority's; or the member's own where its `certificate` is given, and only the address counts.
      certificate: the member's, DER in base 64; empty in a statement of the authority.
    """

    id: int
    name: str
    address: str
    from_round: int
    until_round: int
    issued: int
    version: int
    signature: str = ""
    certificate: Certificate = Certificate("")

    @property
    def slot(self) -> int | str:
        """Key of the statements of which the newest counts."""
        return self.name if self.certificate else self.id

    @property
    def order(self) -> int:
        """Place among all entries: by version, and by a few bits of the content where versions are equal."""
        return self.version << 20 | self.mark & 0xFFFFF

    @property
    def mark(self) -> int:
        """64 bits that tell it from other entries."""
        content = json.dumps(astuple(self)).encode()
        return int.from_bytes(hashlib.sha256(content).digest()[:8], "big")


@dataclass(frozen=True)
class News:
    """Entries of a sender: its newest ones, or the newest before a place that was asked for.

    Attributes:
      entries: the newest first.
      rest: digest of all that are older than these.
    """

    entries: tuple[Entry, ...] = ()
    rest: str = ""


class _Span(NamedTuple):
    """Rounds of a member: as in `Entry`."""

    id: int
    name: str
    from_round: int
    until_round: int


class Members:
    """Merged entries of one run.

    Args:
      founders: the islands of the roster, in its order.
      is_signed: returns True for an entry whose signature holds; only those are taken.
      entries: those that are known, as after an earlier start.
    """

    def __init__(
        self,
        founders: Sequence[str],
        is_signed: Callable[[Entry], bool] = lambda entry: False,
        entries: Iterable[Entry] = (),
    ):
        self.founders = tuple(founders)
        self._is_signed = is_signed
        self._slots: dict[int | str, Entry] = {}
        self._marks: dict[int | str, tuple[int, int]] = {}  # mark and order of each
        self._total = 0  # exclusive or of all marks
        self._newest: list[Entry] = []
        self._active: dict[int, tuple[str, ...]] = {}
        self._refresh()
        self.merge(entries)

    def merge(self, entries: Iterable[Entry]) -> list[Entry]:
        """Take entries that are newer than the known ones and well signed, and return them."""
        taken = [entry for entry in entries if self._is_news(entry)]
        for entry in taken:
            self._total ^= self._marks.get(entry.slot, (0, 0))[0] ^ entry.mark
            self._slots[entry.slot], self._marks[entry.slot] = entry, (entry.mark, entry.order)
        if taken:
            self._newest = sorted(self._slots.values(), key=self._order, reverse=True)
            self._active.clear()
            self._refresh()
        return taken

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All that are known, the newest first."""
        return tuple(self._newest)

    @property
    def view(self) -> str:
        """Digest of all entries: equal on two islands that know the same."""
        return f"{self._total:016x}"

    # Who is a member.

    def active(self, round: int) -> tuple[str, ...]:
        """Return the members of a round, by their ids."""
        if round not in self._active:
            if len(self._active) > PAGE:
                self._active.clear()
            self._active[round] = tuple(
                name for _, name, first, until in self._spans if first <= round and (until == OPEN or round < until)
            )
        return self._active[round]

    def present(self, round: int) -> tuple[str, ...]:
        """Return those that an island after `round` may hear from: also future members, and just removed ones."""
        return tuple(name for _, name, _, until in self._spans if until == OPEN or round < until + GRACE)

    def first_round(self, name: str) -> int:
        """Return the round from which on a name is that of a member; 0 for one that is unknown."""
        return self._by_name[name].from_round if name in self._by_name else 0

    def is_over(self, name: str, round: int) -> bool:
        """Return whether a membership has ended before a round; False for a name that is unknown."""
        span = self._by_name.get(name)
        return span is not None and span.until_round != OPEN and round >= span.until_round

    def id_of(self, name: str) -> int | None:
        """Return a member's number; None for a name that is unknown."""
        return self._by_name[name].id if name in self._by_name else None

    def entry_of(self, name: str) -> Entry | None:
        """Return the authority's entry about a name; None if there is none, as for founders at first."""
        return next((entry for entry in self._of_authority() if entry.name == name), None)

    def address_of(self, name: str) -> str:
        """Return the newest address that was told of a member; empty: none since the roster."""
        told = [entry for entry in (self.entry_of(name), self._slots.get(name)) if entry is not None and entry.address]
        return max(told, key=lambda entry: entry.version).address if told else ""

    # News.

    def news(self, before: int | None = None) -> News:
        """Return the newest entries, of those before a place in their order if one is given."""
        older = [entry for entry in self._newest if before is None or self._order(entry) < before]
        page = older[:PAGE]
        return News(tuple(page), self._rest(self._order(page[-1])) if len(page) < len(older) else "")

    def differs_before(self, news: News) -> int | None:
        """Return the place before which a sender's entries are not those here; None if they agree."""
        if not news.rest or not news.entries:
            return None
        oldest = min(entry.order for entry in news.entries)
        return None if self._rest(oldest) == news.rest else oldest

    def _order(self, entry: Entry) -> int:
        return self._marks[entry.slot][1]

    def _rest(self, order: int) -> str:
        """Return the digest of all entries before a place."""
        total = self._total
        for entry in self._newest:
            if self._order(entry) < order:
                break
            total ^= self._marks[entry.slot][0]
        return f"{total:016x}"

    def _is_news(self, entry: Entry) -> bool:
        known = self._slots.get(entry.slot)
        if (known is not None and known.version >= entry.version) or not 0 <= entry.version < _MOST_VERSION:
            return False
        if not entry.certificate:
            is_founder = 0 <= entry.id < len(self.founders)
            if entry.id < 0 or (is_founder and self.founders[entry.id] != entry.name):
                return False
            if not is_founder and entry.name in self.founders:
                return False
        return self._is_signed(entry)

    def _of_authority(self) -> list[Entry]:
        """Return the authority's entries; of two ids with one name, which it never gives, the newer one."""
        by_name = {entry.name: entry for entry in reversed(self._newest) if not entry.certificate}
        return list(by_name.values())

    def _refresh(self) -> None:
        """Work out all members' spans, by the ids, and by the names for questions about one."""
        spans = {id: _Span(id, name, 0, OPEN) for id, name in enumerate(self.founders)}
        for entry in self._of_authority():
            spans[entry.id] = _Span(entry.id, entry.name, entry.from_round, entry.until_round)
        self._spans = [spans[id] for id in sorted(spans)]
        self._by_name = {span.name: span for span in reversed(self._spans)}
