"""Knowledge of the peers."""

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

from noloco_jax.islands.protocol.bounds import Distance

MEMORY = 16
NEEDED = 3


class Transfers:
    """Seconds of the last transfers with one peer, as links differ, or with all."""

    def __init__(self):
        self._seconds: deque[float] = deque(maxlen=MEMORY)

    def add(self, seconds: float) -> None:
        """Record the seconds of a transfer, complete or cut off.

        Transfers that were cut off count too: else a link that has become slow would be cut off for ever.
        """
        self._seconds.append(seconds)

    def allowance(self, least: float) -> float:
        """Return the seconds allowed for the next: median + 4 median absolute deviations, at least twice the median.

        Never below `least`: on a fast link transfers take milliseconds, and a busy machine may need longer to respond.
        Infinite before a few have been seen: patience then limits it.
        """
        if len(self._seconds) < NEEDED:
            return math.inf
        median = statistics.median(self._seconds)
        deviation = statistics.median(abs(seconds - median) for seconds in self._seconds)
        return max(median + max(4 * deviation, median), least)

    def quarter(self) -> float:
        """Return the lower quartile of the last transfers' seconds; 0 before a few have been seen."""
        if len(self._seconds) < NEEDED:
            return 0.0
        return sorted(self._seconds)[len(self._seconds) // 4]


@dataclass
class Peer:
    """Known state of a peer.

    Attributes:
      name: its name in the roster.
      incarnation, round: the latest that it reported; -1: none.
      seen: time of its last header; None: never.
      away: True once it has said goodbye.
      finished: True once it has taken all steps of the run.
      wrong: its reason for refusing this island, if any.
      broken: consecutive broken messages.
      met: the last round whose message was exchanged with it; -1: none since the start.
      distance: see `bounds.py`.
      left_out: True while nothing is taken from it, as it is far away and comes no closer.
      leaves_out: True while it takes nothing from this island, for the same reason.
      quarantined_until: the round in which it may be met again after broken messages.
      fault: the reason why it is left out or quarantined, or was last.
      delay: seconds until its last answer to an offer, an estimate of the latency of its own offers.
      transfers: durations of exchanges with it.
    """

    name: str
    incarnation: int = -1
    round: int = -1
    seen: float | None = None
    away: bool = False
    finished: bool = False
    wrong: str | None = None
    broken: int = 0
    met: int = -1
    distance: Distance = field(default_factory=Distance)
    left_out: bool = False
    leaves_out: bool = False
    quarantined_until: int = 0
    fault: str = ""
    delay: float = 0.0
    transfers: Transfers = field(default_factory=Transfers)

    def told(self, incarnation: int, round: int, now: float) -> None:
        """Record a peer's incarnation and round; ignore late words of a past incarnation."""
        if incarnation < self.incarnation:
            return
        self.seen = now
        self.finished = self.finished and incarnation == self.incarnation
        self.round = round if incarnation > self.incarnation else max(self.round, round)
        self.incarnation, self.away, self.wrong = incarnation, False, None
