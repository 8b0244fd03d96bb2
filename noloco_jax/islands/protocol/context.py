"""What the parts of an island's protocol share: who and where it is, whom it knows, and what it is about to do."""

import itertools
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from noloco_jax.islands.protocol.events import Action, Channel, Close, Open, Refused, Send, Tell
from noloco_jax.islands.protocol.ledger import Ledger
from noloco_jax.islands.protocol.messages import Answer, Caller, ExchangeId, Identity, Opener, Wrong
from noloco_jax.islands.protocol.pace import Pace
from noloco_jax.islands.protocol.peers import Norms, Peer


@dataclass(frozen=True)
class Settings:
    """Rounds and seconds of the protocol.

    Attributes:
      patience: rounds that a message waits for its partner's; each costs the memory of a message, and corrections that
        come later than 2 rounds do harm. An island that is further behind the median of the others meets nobody any
        more: it takes another one's state. With 1, what is almost a round behind, as islands are that have just healed,
        has hardly any time left to exchange.
      reach_seconds: in which an island may be late all the same, by however many rounds, and takes nobody's state: what
        holds a machine up for a moment is made up for by those who give way, see `pace.py`.
      quarantine_rounds: rounds without a partner that has sent `broken_in_a_row` broken messages.
      broken_in_a_row: see there.
      answer_seconds: for the answer to an opener.
      start_seconds: for islands that start at the same time, to begin together.
      state_seconds: for a whole state on its way.
      retry_seconds: until the first retry; the time doubles with each.
      keeps_pace: whether an island fits its inner steps to common rounds, see `pace.py`.
    """

    patience: int = 2
    reach_seconds: float = 5.0
    quarantine_rounds: int = 16
    broken_in_a_row: int = 3
    answer_seconds: float = 10.0
    start_seconds: float = 120.0
    state_seconds: float = 600.0
    retry_seconds: float = 1.0
    keeps_pace: bool = False

    def __post_init__(self):
        if self.patience < 1:
            raise ValueError(f"patience is {self.patience}: it must be at least 1")


LONGEST_PAUSE = 32  # times the first one, between two tries
ROUNDS_TIMED = 8


class Context:
    """An island's standing. `now` is the time of the event at hand, in monotonic seconds that the caller gives.

    Attributes:
      round: the last round that was ended, also by a state that was restored; -1: none.
      lineage: whether a committed exchange is in the past of its weights, through checkpoints and healings.
      commits: exchanges committed since the start.
      came_too_late: whether a partner had given up a round's message before this island dialled, in this round.
      refused: whether most others say that this island does not belong to them.
      pace: how it keeps pace with the others.
    """

    def __init__(
        self, name: str, others: Sequence[str], identity: Identity, settings: Settings, incarnation: int, ledger: Ledger
    ):
        self.name = name
        self.identity = identity
        self.settings = settings
        self.peers = {other: Peer(other) for other in others}
        self.norms = Norms()
        self.ledger = ledger
        self.incarnation = incarnation
        self.round = -1
        self.lineage = False
        self.commits = 0
        self.refused = False
        self.came_too_late = False
        self.pace = Pace(name, settings.keeps_pace)
        self.now = 0.0
        self._ends: deque[float] = deque(maxlen=ROUNDS_TIMED + 1)
        self.actions: list[Action] = []
        self._numbers = itertools.count()
        self._told_past: int | None = None

    def round_ended(self, round: int) -> None:
        self.round = round
        self._ends.append(self.now)
        self.pace.round_ended(round, self.now)

    @property
    def round_seconds(self) -> float:
        """The median of the last rounds, which evaluations between them do not touch; 0 before the first is known."""
        return statistics.median([after - before for before, after in itertools.pairwise(self._ends)] or [0.0])

    @property
    def reach(self) -> int:
        """Rounds by which an island may be late and go on, as the others give way; who is further behind heals."""
        least, seconds = self.settings.patience, self.round_seconds
        if self.settings.keeps_pace or not seconds:
            return least
        return max(least, math.ceil(self.settings.reach_seconds / seconds))

    def caller(self, peer: str) -> Caller:
        return Caller(self.identity, self.name, peer, self.incarnation, self.round)

    def open(self, peer: str, header: Opener) -> Channel:
        channel = ("out", next(self._numbers))
        self.actions.append(Open(channel, peer, header))
        return channel

    def send(self, channel: Channel, header: Answer) -> None:
        self.actions.append(Send(channel, header))

    def close(self, channel: Channel) -> None:
        self.actions.append(Close(channel))

    def answer(self, channel: Channel, header: Answer) -> None:
        """An answer after which there is nothing to say."""
        self.send(channel, header)
        self.close(channel)

    def tell(self, line: str) -> None:
        self.actions.append(Tell(line))

    def refusal(self, peer: str, caller: Caller) -> Wrong | None:
        """What is wrong with a caller whose certificate says `peer`."""
        if (caller.sender, caller.receiver) != (peer, self.name):
            what = f"name is {self.name}, yours is {peer}; you say that {caller.sender} calls {caller.receiver}"
        elif (difference := self.identity.difference(caller.identity)) is not None:
            what = difference
        else:
            return None
        return self.refused_for(peer, what)

    def refused_for(self, peer: str, what: str) -> Wrong:
        """The answer to a caller with which something is wrong; people here are told as well."""
        self.tell(f"{peer} was refused: {what}")
        return Wrong(what)

    def is_wrong(self, peer: str, wrong: Wrong) -> None:
        """A peer says that this island does not belong to it; more than half of them must be right.

        Not where an exchange has been committed: a newcomer with another configuration stops nobody but itself.
        """
        self.peers[peer].wrong = wrong.what
        self.tell(f"{peer} refuses {self.name}: {wrong.what}")
        sayings = [other.wrong for other in self.peers.values() if other.wrong is not None]
        if not self.commits and 2 * len(sayings) > len(self.peers):
            line = (
                f"{len(sayings)} of {len(self.peers)} islands refuse {self.name}; {peer} says: {wrong.what}: give all "
                "islands the same roster, configuration and version of noloco_jax"
            )
            self.actions.append(Refused(line))
            self.refused = True

    def is_past(self, xid: ExchangeId) -> None:
        """A peer took this island's call for one of a past incarnation: a later one of this name has called it."""
        if xid.incarnation == self.incarnation != self._told_past:
            self._told_past = self.incarnation
            self.tell(
                f"another {self.name} has started since, and the others exchange with that one alone: stop one of them"
            )

    def renew(self, round: int, lineage: bool) -> None:
        """Other weights than before: a new incarnation, that has seen no exchange."""
        self.incarnation += 1
        self.round = round
        self.lineage = lineage
        self.ledger = Ledger()
        self._ends.clear()
        self.pace.restart()


class Backoff:
    """The time of the next try: each pause is twice the last one, up to a limit."""

    def __init__(self, context: Context):
        self._context = context
        self._times = 1
        self.at: float | None = None

    def start(self, least: float = 0.0) -> None:
        self.at = self._context.now + max(self._context.settings.retry_seconds * self._times, least)
        self._times = min(2 * self._times, LONGEST_PAUSE)

    def due(self) -> bool:
        """Whether the time has come; only once for each start."""
        if self.at is None or self.at > self._context.now:
            return False
        self.at = None
        return True
