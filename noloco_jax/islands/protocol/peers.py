"""What an island knows of the others, and which of their messages it believes."""

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

MEMORY = 16
NEEDED = 3


class Transfers:
    """Seconds of the last transfers with one peer, as links differ, or with all."""

    def __init__(self):
        self._seconds: deque[float] = deque(maxlen=MEMORY)

    def add(self, seconds: float) -> None:
        """A transfer took so long, or was cut off after so long.

        Those cut off count, or a link that has become slow for good would be cut off for ever.
        """
        self._seconds.append(seconds)

    def allowance(self, least: float) -> float:
        """Seconds for the next one: the median and 4 median absolute deviations, at least twice the median.

        Never below `least`: a fast link's transfers take milliseconds, and a busy machine may not look for longer.
        Infinite before a few have been seen: the end of the round cuts it off then.
        """
        if len(self._seconds) < NEEDED:
            return math.inf
        median = statistics.median(self._seconds)
        deviation = statistics.median(abs(seconds - median) for seconds in self._seconds)
        return max(median + max(4 * deviation, median), least)

    def quarter(self) -> float:
        """Seconds within which a quarter of the last ones were over; 0 before a few have been seen."""
        if len(self._seconds) < NEEDED:
            return 0.0
        return sorted(self._seconds)[len(self._seconds) // 4]


PROPORTION = 10.0
NORMS_KEPT = 32


@dataclass
class Peer:
    """Another island, as far as it is known.

    Attributes:
      name: in the roster.
      incarnation, round: the latest that it told; -1: none.
      seen: when something last came from it; none: never.
      away: whether it has said goodbye.
      finished: whether it has taken all steps of the run.
      wrong: what it finds wrong with this island, or nothing.
      broken: broken messages in a row.
      quarantined_until: the round in which it may be met again.
      delay: seconds until its last answer to an offer came: as long as its own offers may be on their way.
      transfers: how long exchanges with it took.
    """

    name: str
    incarnation: int = -1
    round: int = -1
    seen: float | None = None
    away: bool = False
    finished: bool = False
    wrong: str | None = None
    broken: int = 0
    quarantined_until: int = 0
    delay: float = 0.0
    transfers: Transfers = field(default_factory=Transfers)

    def told(self, incarnation: int, round: int, now: float) -> None:
        """It says which it is and where, and so finds nothing wrong. Late words of a past incarnation are not heard."""
        if incarnation < self.incarnation:
            return
        self.seen = now
        self.finished = self.finished and incarnation == self.incarnation
        self.round = round if incarnation > self.incarnation else max(self.round, round)
        self.incarnation, self.away, self.wrong = incarnation, False, None


class Norms:
    """The norms of the last good messages, the island's own among them: all islands train one model.

    What is left of a corrupted message that came whole and finite is far too large. Their scatter is small, but after
    a partition the islands may be far apart and have to meet all the same: hence a factor rather than deviations.
    """

    def __init__(self):
        self._norms: deque[float] = deque(maxlen=NORMS_KEPT)

    def add(self, norm: float) -> None:
        self._norms.append(norm)

    def believe(self, norm: float) -> bool:
        """Whether a message of this norm is finite and in proportion to the median."""
        if not math.isfinite(norm):
            return False
        return not self._norms or norm <= PROPORTION * statistics.median(self._norms)
