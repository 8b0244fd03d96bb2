"""The one place where an exchange can end on one side only: the decision was lost on its way to who had dialled.

The dialler then asks, round after round, how it ended. Its partner's answer settles the exchange on both sides.
"""

from dataclasses import dataclass

from noloco_jax.islands.protocol.context import Backoff, Context
from noloco_jax.islands.protocol.events import Channel
from noloco_jax.islands.protocol.headers import ExchangeId, Header, Outcome, Status, StatusRequest
from noloco_jax.islands.protocol.meeting import Exchange


@dataclass
class _Doubt:
    exchange: Exchange
    retry: Backoff
    channel: Channel | None = None
    deadline: float = 0.0


class Doubts:
    """Exchanges whose outcome is not known here."""

    def __init__(self, context: Context):
        self._context = context
        self._doubts: dict[ExchangeId, _Doubt] = {}
        self._goodbyes: list[tuple[Channel, str]] = []  # of islands that are asked before they go

    @property
    def exchanges(self) -> list[Exchange]:
        return [doubt.exchange for doubt in self._doubts.values()]

    def about(self, round: int) -> bool:
        """Whether this round's message may have been committed."""
        return any(xid.round == round for xid in self._doubts)

    def add(self, exchange: Exchange) -> None:
        doubt = self._doubts[exchange.xid] = _Doubt(exchange, Backoff(self._context))
        self._ask(doubt)

    def goodbye(self, channel: Channel, peer: str) -> None:
        """An island goes, which waits for the end of this call: what only it knows is asked before."""
        self._goodbyes.append((channel, peer))
        for doubt in self._doubts.values():
            if doubt.exchange.peer.name == peer and doubt.channel is None:
                self._ask(doubt)
        self._let_go()

    def arrived(self, channel: Channel, header: Header) -> tuple[Exchange, Outcome] | None:
        """What is settled by what came."""
        doubt = self._asked(channel)
        if doubt is None:
            return None
        self._context.close(channel)
        if isinstance(header, Status):
            doubt.exchange.peer.told(header.incarnation, header.round, self._context.now)
            if header.outcome is not None:
                del self._doubts[doubt.exchange.xid]
                self._let_go()
                return doubt.exchange, header.outcome
        self._ask_later(doubt)
        return None

    def broken(self, channel: Channel) -> None:
        doubt = self._asked(channel)
        if doubt is not None:
            self._ask_later(doubt)

    def tick(self) -> None:
        for doubt in self._doubts.values():
            if doubt.channel is not None and doubt.deadline <= self._context.now:
                self._context.close(doubt.channel)
                self._ask_later(doubt)
            elif doubt.retry.due():
                self._ask(doubt)

    def give_up(self, round: int) -> list[Exchange]:
        """Those of this round and earlier ones: what became of them will not be known."""
        old = [doubt for xid, doubt in self._doubts.items() if xid.round <= round]
        for doubt in old:
            if doubt.channel is not None:
                self._context.close(doubt.channel)
            del self._doubts[doubt.exchange.xid]
        self._let_go()
        return [doubt.exchange for doubt in old]

    def deadlines(self) -> list[float]:
        times = ((doubt.retry.at if doubt.channel is None else doubt.deadline) for doubt in self._doubts.values())
        return [time for time in times if time is not None]

    def _asked(self, channel: Channel) -> _Doubt | None:
        return next((doubt for doubt in self._doubts.values() if doubt.channel == channel), None)

    def _ask(self, doubt: _Doubt) -> None:
        request = StatusRequest(self._context.identity, doubt.exchange.xid)
        doubt.channel = self._context.open(doubt.exchange.peer.name, request)
        doubt.deadline = self._context.now + self._context.settings.answer_seconds

    def _ask_later(self, doubt: _Doubt) -> None:
        doubt.channel = None
        doubt.retry.start()
        self._let_go()

    def _let_go(self) -> None:
        """Those who said goodbye and are asked nothing any more."""
        asked = {doubt.exchange.peer.name for doubt in self._doubts.values() if doubt.channel is not None}
        for channel, peer in self._goodbyes:
            if peer not in asked:
                self._context.close(channel)
        self._goodbyes = [(channel, peer) for channel, peer in self._goodbyes if peer in asked]
