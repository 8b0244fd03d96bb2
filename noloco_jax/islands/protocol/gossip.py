"""Spread of membership entries: news in headers that are sent anyway, and requests for older entries that differ."""

from dataclasses import dataclass

from noloco_jax.islands.protocol.context import Context
from noloco_jax.islands.protocol.events import Channel, Learned
from noloco_jax.islands.protocol.messages import Header, News, Status, StatusRequest


@dataclass
class _Request:
    """Request for the older entries of one peer."""

    channel: Channel
    peer: str
    deadline: float


class Gossip:
    """Entries heard and asked for by one island.

    Args:
      context: the island's shared state.
    """

    def __init__(self, context: Context):
        self._context = context
        self._request: _Request | None = None
        self._stopped = False
        self._asked: set[str] = set()  # peers asked for older entries since the last round

    def hear(self, peer: str, header: Header) -> None:
        """Take a header's news, and ask its sender for older entries where those differ."""
        news = getattr(header, "news", None)
        if news is None:
            return
        self.learn(news)
        before = self._context.members.differs_before(news)
        is_free = self._request is None and not self._stopped
        if before is not None and is_free and peer in self._context.peers and peer not in self._asked:
            self._asked.add(peer)
            self._ask(peer, before)

    def learn(self, news: News) -> None:
        """Take entries that are new here."""
        context = self._context
        if taken := context.members.merge(news.entries):
            context.actions.append(Learned(tuple(taken)))
            context.refresh_peers()

    def round_ended(self) -> None:
        self._asked.clear()

    def arrived(self, channel: Channel, header: Header) -> None:
        """Handle an answer to a request: ask for the next page, if there the entries still differ."""
        request = self._request
        if request is None or channel != request.channel:
            return
        self._end()
        if isinstance(header, Status) and header.news is not None:
            # `hear` has taken the page's entries.
            before = self._context.members.differs_before(header.news)
            if before is not None and request.peer in self._context.peers:
                self._ask(request.peer, before)

    def broken(self, channel: Channel) -> None:
        if self._request is not None and channel == self._request.channel:
            self._request = None

    def tick(self) -> None:
        if self._request is not None and self._request.deadline <= self._context.now:
            self._end()

    def stop(self) -> None:
        self._stopped = True
        if self._request is not None:
            self._end()

    def deadlines(self) -> list[float]:
        return [self._request.deadline] if self._request is not None else []

    def _ask(self, peer: str, before: int) -> None:
        context = self._context
        if not context.dials(peer):
            return  # it asks for itself
        channel = context.open(peer, StatusRequest(context.identity, before=before))
        self._request = _Request(channel, peer, context.now + context.settings.answer_seconds)

    def _end(self) -> None:
        assert self._request is not None
        self._context.close(self._request.channel)
        self._request = None
