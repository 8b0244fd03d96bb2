"""State that the parts of an island's protocol share: identity, round, peers, and pending actions."""

import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from noloco_jax.islands.protocol.bounds import Bounds
from noloco_jax.islands.protocol.events import Action, Channel, Close, Open, Refused, Send, Tell
from noloco_jax.islands.protocol.ledger import Ledger
from noloco_jax.islands.protocol.members import Members, News
from noloco_jax.islands.protocol.messages import Answer, Caller, ExchangeId, Identity, Opener, Wrong
from noloco_jax.islands.protocol.pace import Pace
from noloco_jax.islands.protocol.peers import Peer


@dataclass(frozen=True)
class Settings:
    """Settings of the protocol, in rounds and seconds.

    Attributes:
      patience: rounds that a message waits for its partner's. Each costs the memory of a message, and corrections later
        than 2 rounds do harm. An island further behind the median of the others exchanges with nobody and takes a
        donor's state. With 1, an island almost a round behind, as after taking a state, has hardly time to exchange.
      reach_seconds: seconds by which an island may be late without taking a state, whatever the rounds: short delays of
        a machine are made up for by peers that pause, see `pace.py`. After twice as long it takes one all the same.
      quarantine_rounds: rounds without a partner that has sent `broken_in_a_row` broken messages.
      broken_in_a_row: consecutive broken messages that lead to quarantine.
      answer_seconds: timeout of the answer to an opener.
      rest_seconds: timeout of the other answers once an island that trains has answered one that starts.
      start_seconds: time that islands starting together wait for each other.
      awaits_absent: True if an island that begins a run waits as long for those that do not answer yet.
      lost_seconds: time for which an island that has lost its weights waits for others that have some; it then begins
        anew where at least half of all islands answer, itself included.
      share_seconds: timeout of a share of a state; it doubles with each that is late.
      state_seconds: limit of `share_seconds`, and the time without a share after which those that came are too old.
      shares: shares of a state beside its position, see `islands.state_shares`.
      whole_state: True if an island catches up from a whole state; otherwise from weights alone.
      retry_seconds: delay of the first retry; it doubles with each.
      keeps_pace: True if an island fits its inner steps to common rounds, see `pace.py`.
      fits: (last round, inner steps) of a donor -> True if training can continue there.
    """

    patience: int = 2
    reach_seconds: float = 5.0
    quarantine_rounds: int = 16
    broken_in_a_row: int = 3
    answer_seconds: float = 10.0
    rest_seconds: float = 2.0
    start_seconds: float = 120.0
    awaits_absent: bool = False
    lost_seconds: float = 600.0
    share_seconds: float = 20.0
    state_seconds: float = 600.0
    shares: int = 0
    whole_state: bool = False
    retry_seconds: float = 1.0
    keeps_pace: bool = False
    fits: Callable[[int, int], bool] = lambda round, step: True

    def __post_init__(self):
        if self.patience < 1:
            raise ValueError(f"patience is {self.patience}: it must be at least 1")


STARTS_APART = 1_000_000  # increase of the incarnation with a start, so that increments by healing stay below it
MOST_AHEAD = 10**13  # largest increase on a peer's word: a clock of 1970 is behind by less
LONGEST_PAUSE = 32  # longest pause between two tries, in multiples of the first
ROUNDS_TIMED = 8


class Context:
    """Shared state of an island. `now` is the time of the event at hand, in monotonic seconds that the caller gives.

    Attributes:
      round: the last round that was ended, also by a state that was restored; -1: none.
      lineage: True if a committed exchange is in the past of its weights, through checkpoints and donors.
      commits: exchanges committed since the start.
      came_too_late: True if a partner had given up a message before this island dialled, in this round.
      taken_for_past: True if a peer knows a later incarnation than this one, which has exchanged nothing yet.
      refused: True once this island has given up.
      pace: its pace relative to the others.
      dials: (name, peer) -> False if only the second one dials for exchanges of the two.
      members: the members of the run, as far as they are known here.
      peers: the other members present.
    """

    def __init__(
        self,
        name: str,
        members: Members,
        identity: Identity,
        settings: Settings,
        incarnation: int,
        ledger: Ledger,
        bounds: Bounds,
        dials: Callable[[str, str], bool] = lambda name, peer: True,
    ):
        self.name = name
        self.identity = identity
        self.settings = settings
        self.members = members
        self.peers: dict[str, Peer] = {}
        self.bounds = bounds
        self.dials = dials
        self.ledger = ledger
        self.incarnation = incarnation
        self.round = -1
        self.lineage = False
        self.commits = 0
        self.refused = False
        self.came_too_late = self.taken_for_past = False
        self.pace = Pace(name, self.peers.keys(), settings.keeps_pace)
        self.now = 0.0
        self._ends: deque[float] = deque(maxlen=ROUNDS_TIMED + 1)
        self.actions: list[Action] = []
        self._numbers = itertools.count()
        self.dialled: dict[Channel, str] = {}  # open calls of this island -> whom it called
        self._told_past: int | None = None
        self.refresh_peers()

    def refresh_peers(self) -> None:
        """Follow the members: those that come are peers, and those that were removed a while ago are none."""
        present = [name for name in self.members.present(self.round) if name != self.name]
        for name in present:
            if name not in self.peers:
                self.peers[name] = Peer(name)
        if len(self.peers) > len(present):
            for name in self.peers.keys() - set(present):
                del self.peers[name]

    def round_ended(self, round: int) -> None:
        self.round = round
        self.refresh_peers()
        self._ends.append(self.now)
        self.pace.round_ended(round, self.now)

    @property
    def round_seconds(self) -> float:
        """Median seconds of the last rounds, robust to evaluations between them; 0 before the first is known."""
        return statistics.median([after - before for before, after in itertools.pairwise(self._ends)] or [0.0])

    @property
    def reach(self) -> int:
        """Rounds by which an island may be late and continue; further behind, it catches up from a donor."""
        least, seconds = self.settings.patience, self.round_seconds
        if self.settings.keeps_pace or not seconds:
            return least
        return max(least, math.ceil(self.settings.reach_seconds / seconds))

    @property
    def news(self) -> News | None:
        """News to send with a header; None while nothing has changed since the roster."""
        return self.members.news() if self.members.entries else None

    def caller(self, peer: str) -> Caller:
        return Caller(self.identity, self.name, peer, self.incarnation, self.round)

    def open(self, peer: str, header: Opener) -> Channel:
        channel = ("out", next(self._numbers))
        self.dialled[channel] = peer
        self.actions.append(Open(channel, peer, header))
        return channel

    def send(self, channel: Channel, header: Answer) -> None:
        self.actions.append(Send(channel, header))

    def close(self, channel: Channel) -> None:
        self.dialled.pop(channel, None)
        self.actions.append(Close(channel))

    def answer(self, channel: Channel, header: Answer) -> None:
        """Send an answer and close the channel."""
        self.send(channel, header)
        self.close(channel)

    def tell(self, line: str) -> None:
        self.actions.append(Tell(line))

    def refusal(self, peer: str, caller: Caller) -> Wrong | None:
        """Return a refusal for a caller whose identity or names do not fit; its certificate says `peer`."""
        if (caller.sender, caller.receiver) != (peer, self.name):
            what = f"name is {self.name}, yours is {peer}; you say that {caller.sender} calls {caller.receiver}"
            self.tell(f"{peer} was refused: {what}")
            return Wrong(what)
        return self.refusal_of(peer, caller.identity)

    def refusal_of(self, peer: str, identity: Identity) -> Wrong | None:
        """Return a refusal of an island with another identity, as it will read it, and report it here."""
        difference = self.identity.difference(identity, peer)
        if difference is None:
            return None
        self.tell(f"{peer} was refused: {difference}")
        return Wrong(identity.difference(self.identity, self.name) or difference)

    def is_wrong(self, peer: str, wrong: Wrong) -> None:
        """Record that a peer refuses this island; give up once more than half of them do.

        Once an exchange has been committed it never gives up: a newcomer with another configuration stops only itself.
        """
        if peer in self.peers:
            self.peers[peer].wrong = wrong.what
        self.tell(f"{peer} refuses {self.name}: {wrong.what}")
        sayings = [other.wrong for other in self.peers.values() if other.wrong is not None]
        if not self.commits and 2 * len(sayings) > len(self.peers):
            line = (
                f"{len(sayings)} of {len(self.peers)} islands refuse {self.name}; {peer} says: {wrong.what}: give all "
                "islands the same roster, configuration and version of noloco_jax"
            )
            self.refuse(line)

    def refuse(self, line: str) -> None:
        """Give up: the island ends with this line."""
        self.actions.append(Refused(line))
        self.refused = True

    def is_past(self, xid: ExchangeId) -> None:
        """Handle that peers took a call for one of a past incarnation.

        A later island of this name has called them; or this is the latest, whose workdir with the incarnation was lost.
        """
        if not self.commits:
            self.taken_for_past = True  # ask around which incarnation they know
        elif xid.incarnation == self.incarnation != self._told_past:
            self._told_past = self.incarnation
            self.tell(
                f"another {self.name} has started since, and the others exchange with that one alone: stop one of them"
            )

    def is_known_as(self, incarnation: int) -> None:
        """Continue as a later incarnation than a peer knows, unless this one has exchanged: then that is another's."""
        if not self.commits and self.incarnation < incarnation < self.incarnation + MOST_AHEAD:
            self.incarnation = incarnation + STARTS_APART
            self.tell(f"peers know a later {self.name}, whose workdir was lost: this one continues as the next")

    def renew(self, round: int, lineage: bool) -> None:
        """Switch to other weights: a new incarnation, without past exchanges."""
        self.incarnation += 1
        self.round = round
        self.refresh_peers()
        self.lineage = lineage
        self.ledger = Ledger()
        self._ends.clear()
        self.pace.restart()


class Backoff:
    """Exponential backoff between tries, up to a limit."""

    def __init__(self, context: Context):
        self._context = context
        self._times = 1
        self.at: float | None = None

    def start(self, least: float = 0.0) -> None:
        self.at = self._context.now + max(self._context.settings.retry_seconds * self._times, least)
        self._times = min(2 * self._times, LONGEST_PAUSE)

    def due(self) -> bool:
        """Return True once the time has come, only once for each start."""
        if self.at is None or self.at > self._context.now:
            return False
        self.at = None
        return True
