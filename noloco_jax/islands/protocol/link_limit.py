"""Whether an exchange has a line to itself: on a narrow one they go one by one, or none would end in time.

An island has as many exchanges under way as messages wait, `patience` at the most. Where a line carries half of what is
due, all of them together take twice `patience`, and each is dropped when it is half through. One by one, every second
ends.
"""

from collections.abc import Iterable

from noloco_jax.islands.protocol.context import Context
from noloco_jax.islands.protocol.meeting import Exchange, Meeting, Stage
from noloco_jax.islands.protocol.peers import Transfers


class LinkLimit:
    """How long this island's transfers take beside its rounds."""

    def __init__(self, context: Context):
        self._context = context
        self._all = Transfers()

    def took(self, exchange: Exchange | None, now: float) -> None:
        """An exchange is over, or is cut off; one that was offered alone says nothing."""
        if exchange is not None and exchange.stage is not Stage.OFFERED:
            exchange.peer.transfers.add(now - exchange.began)
            self._all.add(now - exchange.began)

    def must_wait(self, meeting: Meeting, meetings: Iterable[Meeting], *, by_offers: bool = True) -> bool:
        """Whether a meeting has to wait for what is under way in others, which is noted in it.

        Where the own line is narrow, as even the quickest transfers take longer than a round, it waits for all of them;
        where only those with its peer do, for those with that one.

        Args:
          meeting: which.
          meetings: all of them.
          by_offers: also what has not been answered yet counts as under way.
        """
        running = [other.running for other in meetings if other is not meeting and other.running is not None]
        busy = [one.peer for one in running if by_offers or one.stage is not Stage.OFFERED]
        with_peer = meeting.peer in busy and self._is_slow(meeting.peer.transfers)
        meeting.waits = with_peer or (bool(busy) and self._is_slow(self._all))
        return meeting.waits

    def _is_slow(self, transfers: Transfers) -> bool:
        return 0 < self._context.round_seconds < transfers.quarter()
