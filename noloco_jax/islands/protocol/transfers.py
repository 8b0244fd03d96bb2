"""How long a transfer may take: from how long the last ones took."""

import math
import statistics
from collections import deque

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
