"""Which of several sources the next sequence is of."""

import itertools
from bisect import bisect_right
from collections.abc import Mapping
from fractions import Fraction

_SPAN = 2**64
_STEP = 0x9E3779B97F4A7C15  # the odd integer next to _SPAN divided by the golden ratio


class Mixture:
    """A fixed order of sources in which each has its share of the places.

    Place k belongs to the source in whose part of [0, 1) the point k times the golden ratio modulo 1 lies. Each point
    falls into one of the largest gaps that those before it left (Knuth, The Art of Computer Programming, volume 3,
    section 6.4), so that any consecutive places, wherever they begin, have every source in its share but for a few.
    Nothing but k has to be remembered, and the weights may change at any place.
    """

    def __init__(self, weights: Mapping[str, float]):
        total = sum(map(Fraction, weights.values()))
        self.shares = {name: float(Fraction(weight) / total) for name, weight in weights.items()}
        self._names = tuple(weights)
        ends = itertools.accumulate(map(Fraction, weights.values()))
        self._ends = [int(_SPAN * end / total) for end in ends][:-1]

    def source_at(self, place: int) -> str:
        """The name of the source of which the sequence at `place` is, counted from 0."""
        return self._names[bisect_right(self._ends, place * _STEP % _SPAN)]
