"""Limit of concurrent exchanges on slow links, where parallel transfers would all miss their deadline.

An island has up to `patience` exchanges under way, one per waiting message. On a link of half the needed bandwidth, all
of them in parallel take twice `patience` rounds, and each is dropped half through. One by one, every second completes.
"""

from collections.abc import Iterable

from noloco_jax.islands.protocol.context import Context
from noloco_jax.islands.protocol.meeting import Exchange, Meeting, Stage
from noloco_jax.islands.protocol.peers import Transfers


class LinkLimit:
    """Transfer times of this island, compared with its round time."""

    def __init__(self, context: Context):
        self._context = context
        self._all = Transfers()

    def took(self, exchange: Exchange | None, now: float) -> None:
        """Record the duration of an exchange that ended or was cut off; one that was only offered is ignored."""
        if exchange is not None and exchange.stage is not Stage.OFFERED:
            exchange.peer.transfers.add(now - exchange.began)
            self._all.add(now - exchange.began)

    def must_wait(self, meeting: Meeting, meetings: Iterable[Meeting], *, by_offers: bool = True) -> bool:
        """Return whether a meeting must wait for other exchanges under way, and note it in `meeting.waits`.

        On a slow own link, where even the quickest transfers take longer than a round, it waits for all of them; on a
        slow link to one peer, for those with that peer.

        Args:
          meeting: the meeting to dial or accept.
          meetings: all meetings.
          by_offers: True to count exchanges that have not been answered yet.
        """
        running = [other.running for other in meetings if other is not meeting and other.running is not None]
        busy = [one.peer for one in running if by_offers or one.stage is not Stage.OFFERED]
        with_peer = meeting.peer in busy and self._is_slow(meeting.peer.transfers)
        meeting.waits = with_peer or (bool(busy) and self._is_slow(self._all))
        return meeting.waits

    def _is_slow(self, transfers: Transfers) -> bool:
        return 0 < self._context.round_seconds < transfers.quarter()
