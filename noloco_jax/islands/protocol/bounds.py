"""Bounds on the corrections of one island: how far one member may move another (design §16).

There is no majority in a pair, so no rule proves a message honest. But honest corrections resemble each other: each
array's, and all arrays' together, is bounded by a multiple of the median of the last accepted ones, which one member of
many cannot move. One array alone has twice the room, as quantized ones change in lumps. Both
islands of a pair scale an array by the smaller of their two factors, so that the weighted sum of their corrections
stays zero.

Replicas that were apart for long have large honest differences. The bound of an array therefore grows with every
exchange that it clips and shrinks with every one that it does not: a member that most others disagree with meets
bounds that stay, and the halves of a partition meet bounds that open.

A small push that always points the same way adds up. Of honest islands that were apart both apply their corrections, so
that they come closer from meeting to meeting. From a peer that is far away and comes no closer (`Distance`) an island
takes nothing, unless most peers are far away. It still sends its own message, so that the peer may come closer: damaged
weights move nobody then, and an honest island that was alone for long is led back within its own bounds.
"""

import itertools
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

MULTIPLE = 2.0  # of the median, for all arrays together; 4 let one of eight drive the others apart
EARLY = 4.0  # of the median of fewer than KEPT: corrections grow while learning rates warm up
ALONE = 2.0  # of the multiple: for one array
KEPT = 16  # exchanges
NEEDED = 3  # exchanges until a median is known
FIRST = 0.1  # bound of |c| over all arrays until then, as a share of the own message's norm
GROWTH = 1.1  # of an array's bound, with an exchange that it clips
FAR = 0.5  # factor below which a peer is far away
CLOSER = 0.9  # of the former distance, or less: the two have come closer

Factors = tuple[float, ...]  # of each array, from 0 to 1; empty: all 1; all 0: the island takes nothing


class Bounds:
    """Bounds by array, from the sizes |c| of the last accepted corrections.

    Args:
      saved: the result of `to_json`, to continue from.
    """

    def __init__(self, saved: Mapping[str, Any] | None = None):
        self._accepted: deque[list[float]] = deque(saved["accepted"] if saved else (), maxlen=KEPT)
        self._slack: list[float] = list(saved["slack"]) if saved else []

    def to_json(self) -> dict[str, Any]:
        return {"accepted": list(self._accepted), "slack": self._slack}

    def factors(self, sizes: Sequence[float], norm: float) -> Factors:
        """Return the factors that bring a correction within the bounds.

        Args:
          sizes: |c| of each array, finite.
          norm: Euclidean, of the own message.
        """
        if len(self._accepted) < NEEDED or len(self._accepted[-1]) != len(sizes):
            whole = math.hypot(*sizes)
            return () if whole <= FIRST * norm else (_rounded(FIRST * norm / whole),) * len(sizes)
        usual = [statistics.median(one) for one in zip(*self._accepted, strict=True)]
        least = math.hypot(*usual) / math.sqrt(len(sizes) or 1)  # arrays of few weights scatter more than others
        if not least:
            return ()
        multiple = MULTIPLE if len(self._accepted) == KEPT else EARLY
        limits = [ALONE * multiple * slack * max(own, least) for own, slack in zip(usual, self._slack, strict=True)]
        # Exchanges that clip all arrays widen all their bounds, and so the least of them.
        of_all = multiple * min(self._slack) * statistics.median(math.hypot(*one) for one in self._accepted)
        scale = of_all / max(math.hypot(*sizes), of_all)
        factors = [min(scale, limit / max(size, limit)) for size, limit in zip(sizes, limits, strict=True)]
        return () if min(factors) == 1 else tuple(map(_rounded, factors))

    def accept(self, sizes: Sequence[float], own: Factors, agreed: Factors) -> None:
        """Record a committed correction.

        Args:
          sizes: |c| of each array before it was scaled.
          own: the result of `factors`.
          agreed: the factors in use.
        """
        if self._accepted and len(self._accepted[-1]) != len(sizes):
            self._accepted.clear()
        if not self._accepted:
            self._slack = [1.0] * len(sizes)
        self._accepted.append([size * factor for size, factor in itertools.zip_longest(sizes, agreed, fillvalue=1.0)])
        own = own or (1.0,) * len(sizes)
        self._slack = [
            slack * GROWTH if factor < 1 else max(slack / GROWTH, 1.0)
            for slack, factor in zip(self._slack, own, strict=True)
        ]


class Distance(NamedTuple):
    """Distance from a peer whose corrections exceed the bounds by far.

    Attributes:
      count: consecutive exchanges in which it was far away, and no closer than before.
      whole: |c| over all arrays in the last one, before it was scaled.
    """

    count: int = 0
    whole: float = 0.0

    def after(self, sizes: Sequence[float], own: Factors) -> "Distance":
        """Return the distance after another exchange; arguments as those of `Bounds.accept`."""
        if min(own, default=1.0) >= FAR:
            return Distance()
        whole = math.hypot(*sizes)
        return Distance(1 if whole < CLOSER * self.whole else self.count + 1, whole)


def _rounded(factor: float) -> float:
    """Return three digits, which are enough, and short in a header."""
    return float(f"{factor:.3g}")


def takes_nothing(factors: Factors) -> bool:
    """Return True for the factors of an island that takes nothing from its partner."""
    return bool(factors) and not any(factors)


def agreed(own: Factors, other: Factors) -> Factors:
    """Return the factors that the island with the factors `own` applies.

    They are the smaller ones of both, at most 1; a missing one is 1. Where the other takes nothing, they are the own
    ones: the pair's mean moves, towards the island that most others agree with.
    """
    if takes_nothing(other):
        return own
    return tuple(min(*pair, 1.0) for pair in itertools.zip_longest(own, other, fillvalue=1.0))
