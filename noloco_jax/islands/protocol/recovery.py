"""Recovery of exchanges whose final decision was lost on its way to the dialler.

This is the one place where an exchange can end on one side only. The dialler asks, round after round, how it ended; its
partner's answer settles the exchange on both sides.
"""

from dataclasses import dataclass

from noloco_jax.islands.protocol.bounds import agreed
from noloco_jax.islands.protocol.context import Backoff, Context
from noloco_jax.islands.protocol.events import Channel
from noloco_jax.islands.protocol.meeting import Exchange
from noloco_jax.islands.protocol.messages import ExchangeId, Header, Outcome, Status, StatusRequest


@dataclass
class _Unresolved:
    exchange: Exchange
    retry: Backoff
    channel: Channel | None = None
    deadline: float = 0.0


class Recovery:
    """Unresolved exchanges: their outcome is not known here."""

    def __init__(self, context: Context):
        self._context = context
        self._unresolved: dict[ExchangeId, _Unresolved] = {}
        self._goodbyes: list[tuple[Channel, str]] = []  # of leaving peers, which are asked first

    @property
    def exchanges(self) -> list[Exchange]:
        return [one.exchange for one in self._unresolved.values()]

    def about(self, round: int) -> bool:
        """Return whether this round's message may have been committed."""
        return any(xid.round == round for xid in self._unresolved)

    def add(self, exchange: Exchange) -> None:
        one = self._unresolved[exchange.xid] = _Unresolved(exchange, Backoff(self._context))
        self._ask(one)

    def goodbye(self, channel: Channel, peer: str) -> None:
        """Ask a leaving peer, which waits for this call to end, about every unresolved exchange first."""
        self._goodbyes.append((channel, peer))
        for one in self._unresolved.values():
            if one.exchange.peer.name == peer and one.channel is None:
                self._ask(one)
        self._let_go()

    def arrived(self, channel: Channel, header: Header) -> tuple[Exchange, Outcome] | None:
        """Handle an answer; return the exchange that it resolves and the outcome, or None."""
        one = self._asked(channel)
        if one is None:
            return None
        self._context.close(channel)
        if isinstance(header, Status):
            one.exchange.peer.told(header.incarnation, header.round, self._context.now)
            if header.outcome is not None:
                del self._unresolved[one.exchange.xid]
                self._let_go()
                one.exchange.factors = agreed(one.exchange.own_factors, header.factors)
                return one.exchange, header.outcome
        self._ask_later(one)
        return None

    def broken(self, channel: Channel) -> None:
        one = self._asked(channel)
        if one is not None:
            self._ask_later(one)

    def tick(self) -> None:
        for one in self._unresolved.values():
            if one.channel is not None and one.deadline <= self._context.now:
                self._context.close(one.channel)
                self._ask_later(one)
            elif one.retry.due():
                self._ask(one)

    def give_up(self, round: int) -> list[Exchange]:
        """Give up the unresolved exchanges of this round and earlier ones, and return them."""
        old = [one for xid, one in self._unresolved.items() if xid.round <= round]
        for one in old:
            if one.channel is not None:
                self._context.close(one.channel)
            del self._unresolved[one.exchange.xid]
        self._let_go()
        return [one.exchange for one in old]

    def deadlines(self) -> list[float]:
        times = ((one.retry.at if one.channel is None else one.deadline) for one in self._unresolved.values())
        return [time for time in times if time is not None]

    def _asked(self, channel: Channel) -> _Unresolved | None:
        return next((one for one in self._unresolved.values() if one.channel == channel), None)

    def _ask(self, one: _Unresolved) -> None:
        request = StatusRequest(self._context.identity, one.exchange.xid, factors=one.exchange.own_factors)
        one.channel = self._context.open(one.exchange.peer.name, request)
        one.deadline = self._context.now + self._context.settings.answer_seconds

    def _ask_later(self, one: _Unresolved) -> None:
        one.channel = None
        one.retry.start()
        self._let_go()

    def _let_go(self) -> None:
        """Close the goodbyes of peers that have no open question left."""
        asked = {one.exchange.peer.name for one in self._unresolved.values() if one.channel is not None}
        for channel, peer in self._goodbyes:
            if peer not in asked:
                self._context.close(channel)
        self._goodbyes = [(channel, peer) for channel, peer in self._goodbyes if peer in asked]
