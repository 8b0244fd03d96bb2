"""Protocol of an island: events in, actions out.

No sockets, threads, files or clocks: the world calls `Island.handle` with an event and the time, carries out the
actions in their order, and calls again with a `Tick` when `Island.next_deadline` has come. The same events at the same
times lead to the same actions.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from noloco_jax.islands.protocol.bounds import Bounds, Distance, Factors
from noloco_jax.islands.protocol.catch_up import CatchUp
from noloco_jax.islands.protocol.context import Context, Settings
from noloco_jax.islands.protocol.events import (
    Action,
    Arrived,
    Broken,
    Channel,
    Drop,
    Event,
    Heal,
    Opened,
    Ready,
    RoundEnded,
    Start,
    Stop,
    Tick,
    Told,
)
from noloco_jax.islands.protocol.exchanges import Exchanges
from noloco_jax.islands.protocol.gossip import Gossip
from noloco_jax.islands.protocol.ledger import Ledger
from noloco_jax.islands.protocol.members import Members
from noloco_jax.islands.protocol.messages import (
    ExchangeId,
    Hello,
    Identity,
    Leave,
    Opener,
    Outcome,
    StateRequest,
    Status,
    StatusRequest,
    Wrong,
)
from noloco_jax.islands.protocol.peers import Peer


class Journal(NamedTuple):
    """Protocol state that is saved with the weights, between two inner steps, after all actions so far.

    Attributes:
      round: the last one that was ended.
      lineage: see `Status`.
      outcomes: outcomes of exchanges, as the weights have seen them.
      floor: the round before which outcomes are forgotten.
      unresolved: exchanges of which the partner may have applied its half.
      factors: of committed exchanges whose corrections were scaled.
      bounds: `Bounds.to_json`; None: none are known yet.
      peers: name -> distance and quarantine of a peer, where there are any.
    """

    round: int
    lineage: bool
    outcomes: Mapping[ExchangeId, Outcome]
    floor: int
    unresolved: tuple[tuple[ExchangeId, str], ...]
    factors: Mapping[ExchangeId, Factors] = MappingProxyType({})
    bounds: Mapping[str, Any] | None = None
    peers: Mapping[str, tuple[Distance, int]] = MappingProxyType({})

    def to_json(self) -> dict[str, Any]:
        outcomes = [[*xid, outcome] for xid, outcome in self.outcomes.items()]
        return {
            "round": self.round,
            "lineage": self.lineage,
            "outcomes": outcomes,
            "floor": self.floor,
            "doubts": [[*xid, peer] for xid, peer in self.unresolved],
            "factors": [[*xid, list(factors)] for xid, factors in self.factors.items()],
            "bounds": self.bounds,
            "peers": [[name, *distance, until] for name, (distance, until) in self.peers.items()],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Journal":
        # Journals of earlier versions have another number after the round, and no bounds.
        outcomes = {ExchangeId(round, *xid[-3:]): Outcome(outcome) for round, *xid, outcome in values["outcomes"]}
        unresolved = tuple((ExchangeId(round, *xid[-3:]), peer) for round, *xid, peer in values["doubts"])
        journal = cls(values["round"], values["lineage"], outcomes, values["floor"], unresolved)
        if "bounds" not in values:
            return journal
        factors = {ExchangeId(*xid): tuple(factors) for *xid, factors in values["factors"]}
        peers = {name: (Distance(count, whole), until) for name, count, whole, until in values["peers"]}
        return journal._replace(factors=factors, bounds=values["bounds"], peers=peers)


class Island:
    """State machine of one island's protocol.

    Args:
      name: the island's name in the roster.
      others: the names of all other islands there.
      identity: values that must equal those of the others.
      partner: round -> name of the partner, or None; a pure function that is the same everywhere.
      incarnation: larger than in every earlier start, and than `incarnation` was at their ends.
      settings: the protocol's settings.
      journal: the journal of the checkpoint to resume from, if any.
      began_before: without a journal: True if this island was part of the run, whose weights it then waits for.
      dials: (name, peer) -> True if the first one dials the second for exchanges; False where the second only dials out
        and the first can be dialled.
      members: the members of the run, which `partner` follows; None: `name` and `others`, for good.
    """

    def __init__(
        self,
        name: str,
        others: Sequence[str],
        identity: Identity,
        partner: Callable[[int], str | None],
        incarnation: int,
        settings: Settings | None = None,
        journal: Journal | None = None,
        began_before: bool = False,
        members: Members | None = None,
        dials: Callable[[str, str], bool] = lambda name, peer: True,
    ):
        settings = settings or Settings()
        ledger = Ledger(journal.outcomes, journal.floor, journal.factors) if journal else Ledger()
        bounds = Bounds(journal.bounds if journal else None)
        members = members or Members((name, *others))
        self._context = context = Context(name, members, identity, settings, incarnation, ledger, bounds, dials)
        context.round = journal.round if journal else -1
        context.refresh_peers()
        context.lineage = journal is not None and journal.lineage
        for other, (distance, until) in (journal.peers if journal else {}).items():
            if other in context.peers:
                context.peers[other].distance, context.peers[other].quarantined_until = distance, until
        self._lost = journal.unresolved if journal else ()
        self._partner = partner
        self._exchanges = Exchanges(context, partner)
        self._gossip = Gossip(context)
        self._catch_up = CatchUp(context, journal is not None, began_before)
        self._finished = False
        self._curious: list[Channel] = []  # calls that wait until this island is ready

    @property
    def incarnation(self) -> int:
        """Incarnation of the weights: larger after a donor's state is taken."""
        return self._context.incarnation

    @property
    def round(self) -> int:
        """Last round that was ended; -1: none."""
        return self._context.round

    @property
    def members(self) -> Members:
        """The run's members, as far as they are known here."""
        return self._context.members

    @property
    def peers(self) -> Mapping[str, Peer]:
        """Known state of the other islands."""
        return self._context.peers

    def is_meeting(self, round: int) -> bool:
        """Return whether the message of this round, or of an earlier one, may still be exchanged."""
        unresolved = (exchange.xid.round for exchange in self._exchanges.recovery.exchanges)
        return any(other <= round for other in (*self._exchanges.meetings, *unresolved))

    def stride(self, now: float, most: int) -> int:
        """Return the steps of the run's schedule, up to `most`, that the next inner step is to stand for: see `Pace`.

        1 where islands keep no pace.
        """
        return self._context.pace.stride(now, most)

    def pause(self) -> float:
        """Return the seconds to pause before the next inner step, see `Pace`; 0 where islands keep pace."""
        return self._context.pace.pause()

    @property
    def is_exchanging(self) -> bool:
        """True while an exchange is under way."""
        return any(meeting.running is not None for meeting in self._exchanges.meetings.values())

    def journal(self) -> Journal:
        """Return the protocol state to checkpoint with the weights."""
        context, ledger, unresolved = self._context, self._context.ledger, tuple(self._exchanges.uncertain())
        outcomes, factors, bounds = dict(ledger.outcomes), dict(ledger.factors), context.bounds.to_json()
        known = {name: (peer.distance, peer.quarantined_until) for name, peer in context.peers.items()}
        peers = {name: values for name, values in known.items() if values != (Distance(), 0)}
        return Journal(self.round, context.lineage, outcomes, ledger.floor, unresolved, factors, bounds, peers)

    def status(self) -> Status:
        """Return this island's status."""
        context, exchanges = self._context, self._exchanges
        lag = sum(exchanges.lags) / len(exchanges.lags) if exchanges.lags else 0.0
        partner = self._partner(context.round) if context.round >= 0 else None
        return Status(
            context.incarnation,
            context.round,
            self._catch_up.training,
            context.lineage,
            context.commits,
            exchanges.due,
            lag,
            partner or "",
            starting=not self._catch_up.is_ready,
            finished=self._finished,
            news=context.news,
            view=context.members.view,
            members=len(context.members.active(max(context.round, 0))),
        )

    def next_deadline(self) -> float | None:
        """Return the time when a `Tick` is due, in the seconds of `handle`; None: no deadline."""
        parts = (self._exchanges, self._catch_up, self._gossip)
        return min((time for part in parts for time in part.deadlines()), default=None)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Handle an event and return the actions that follow from it.

        Args:
          event: the event.
          now: monotonic seconds, the same clock at every call.

        Returns:
          the actions, to be carried out in their order, before the next event is handled.
        """
        context = self._context
        context.now = now
        context.actions = []
        match event:
            case Start():
                self._start()
            case Ready():
                self._ready()
            case RoundEnded():
                self._round_ended(event)
            case Opened():
                self._opened(event)
            case Arrived():
                if event.channel in context.dialled:
                    self._gossip.hear(context.dialled[event.channel], event.header)
                self._gossip.arrived(event.channel, event.header)
                healed = self._catch_up.arrived(event.channel, event.header, event.content)
                if healed is not None:
                    self._heal(healed)
                self._exchanges.arrived(event.channel, event.header, event.content)
            case Broken():
                context.dialled.pop(event.channel, None)
                self._catch_up.broken(event.channel)
                self._exchanges.broken(event.channel, event.corrupt)
                self._gossip.broken(event.channel)
            case Tick():
                self._exchanges.tick()
                self._catch_up.tick()
                self._gossip.tick()
            case Told():
                self._gossip.learn(event.news)
            case Stop():
                self._stop(event.finished)
        self._exchanges.go_on()
        return context.actions

    def _start(self) -> None:
        for xid, peer in self._lost:
            reason = "unresolved when the weights were saved"
            self._context.actions.append(Drop(xid.round, peer, reason, one_sided=True))
        self._catch_up.start()

    def _ready(self) -> None:
        self._catch_up.ready()
        for channel in self._curious:
            self._context.answer(channel, self.status())
        self._curious.clear()

    def _round_ended(self, event: RoundEnded) -> None:
        context = self._context
        if not self._catch_up.training or event.round != context.round + 1:
            state = f"training after round {context.round}" if self._catch_up.training else "not training"
            raise ValueError(f"round {event.round} cannot end: {context.name} is {state}")
        context.round_ended(event.round)
        self._gossip.round_ended()
        context.ledger.forget(event.round)
        self._exchanges.round_ended(event)
        self._catch_up.round_ended()

    def _opened(self, event: Opened) -> None:
        context, channel, header = self._context, event.channel, event.header
        self._gossip.hear(event.peer, header)
        refusal = self._refusal(event.peer, header)
        if refusal is not None:
            context.answer(channel, refusal)
            return
        match header:
            case StatusRequest():
                outcome, factors = None, ()
                if header.xid is not None:
                    outcome, factors = self._exchanges.settle(event.peer, header.xid, header.factors)
                peer = context.peers.get(event.peer)
                if peer is not None and header.identity is not None and header.xid is None:
                    peer.away = False  # it starts again
                yours = -1 if peer is None else peer.incarnation
                status = dataclasses.replace(self.status(), outcome=outcome, factors=factors, yours=yours)
                if header.before is not None:
                    status = dataclasses.replace(status, news=context.members.news(header.before))
                if header.until_ready and status.starting:
                    context.send(channel, status)
                    self._curious.append(channel)
                else:
                    context.answer(channel, status)
            case Hello():
                self._exchanges.opened(channel, header)
            case StateRequest():
                self._catch_up.opened(channel, event.peer, header)
            case Leave():
                peer = context.peers[event.peer]
                peer.away = header.caller.incarnation >= peer.incarnation
                peer.finished = header.finished if peer.away else peer.finished
                self._exchanges.recovery.goodbye(channel, event.peer)

    def _refusal(self, peer: str, header: Opener) -> Wrong | None:
        """Return a refusal of a caller, or None. Status requests may come from anybody whom the transport admits."""
        context = self._context
        if isinstance(header, StatusRequest):
            return context.refusal_of(peer, header.identity) if header.identity else None
        if peer not in context.peers:
            return Wrong(f"name {peer} is none of the other islands")
        return context.refusal(peer, header.caller)

    def _heal(self, healed: Heal) -> None:
        """Adopt a donor's state: forget every exchange of the old weights."""
        self._exchanges.abandon("healed")
        self._context.renew(healed.round, healed.lineage)
        self._context.actions.append(healed)

    def _stop(self, finished: bool) -> None:
        context = self._context
        self._finished = finished
        self._catch_up.stop()
        self._gossip.stop()
        for channel in self._curious:
            context.close(channel)
        self._curious.clear()
        self._exchanges.leave()
        for peer in context.peers.values():
            waits = finished and peer.finished  # to hear that all have
            if peer.seen is not None and (waits or not peer.away):
                context.open(peer.name, Leave(context.caller(peer.name), finished))
