"""Bounds on the corrections of one island: how far one member may move another.

There is no majority in a pair, so no rule proves a message honest. But honest corrections resemble each other, and one
member of many cannot move the median of their sizes: |c|, over the whole message, is clipped at a multiple of it. Both
islands of a pair scale by the smaller of their two factors, so that the weighted sum of their corrections stays zero.

Replicas that were apart for long have large honest differences: the bound grows with every exchange that it clips, and
shrinks with every one that it does not. A member that most others disagree with meets bounds that stay, and the halves
of a partition meet bounds that open.

A small push that always points the same way adds up. Of honest islands that were apart both apply their corrections, so
that they come closer from exchange to exchange. From a peer that is far away and comes no closer (`Distance`) an island
takes nothing, unless most peers are far away. It still sends its own message, so that the peer may come closer.
"""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

MULTIPLE = 2.0  # of the median; 4 let one of eight drive the others apart
EARLY = 4.0  # of the median of fewer than KEPT: corrections grow while learning rates warm up
KEPT = 16  # exchanges
NEEDED = 3  # exchanges until a median is known
FIRST = 0.1  # bound of |c| until then, as a share of the own message's norm
GROWTH = 1.1  # of the bound, with an exchange that it clips
FAR = 0.5  # factor below which a peer is far away
CLOSER = 0.9  # of the former distance, or less: the two have come closer
FAR_IN_A_ROW = 2  # exchanges with a peer that is far and came no closer, before nothing is taken from it
LARGEST = 10.0  # norm of a message, in multiples of the own one's: beyond it is no message of this model


class Bounds:
    """Bound of |c|, from the sizes of the last accepted corrections.

    Args:
      saved: the result of `to_json`, to continue from.
    """

    def __init__(self, saved: Mapping[str, Any] | None = None):
        self._accepted: deque[float] = deque(saved["accepted"] if saved else (), maxlen=KEPT)
        self._slack: float = saved["slack"] if saved else 1.0

    def to_json(self) -> dict[str, Any]:
        return {"accepted": list(self._accepted), "slack": self._slack}

    def factor(self, size: float, norm: float) -> float:
        """Return the factor that brings a correction within the bound.

        Args:
          size: |c|, finite.
          norm: Euclidean, of the own message.
        """
        if len(self._accepted) < NEEDED:
            bound = FIRST * norm
        else:
            multiple = MULTIPLE if len(self._accepted) == KEPT else EARLY
            bound = multiple * self._slack * statistics.median(self._accepted)
        return 1.0 if size <= bound or not bound else bound / size

    def accept(self, size: float, own: float, agreed: float) -> None:
        """Record a committed correction: |c| before it was scaled, the result of `factor`, and the factor in use."""
        self._accepted.append(size * agreed)
        self._slack = self._slack * GROWTH if own < 1 else max(self._slack / GROWTH, 1.0)


class Distance(NamedTuple):
    """Distance from a peer whose corrections exceed the bound by far.

    Attributes:
      count: consecutive exchanges in which it was far away, and no closer than before.
      size: |c| in the last one, before it was scaled.
    """

    count: int = 0
    size: float = 0.0

    def after(self, size: float, own: float) -> "Distance":
        """Return the distance after another exchange; arguments as those of `Bounds.accept`."""
        if own >= FAR:
            return Distance()
        return Distance(1 if size < CLOSER * self.size else self.count + 1, size)


def is_ignored(distance: Distance, others: Sequence[Distance]) -> bool:
    """Return whether nothing is taken from a peer: it is far away and came no closer, and most others are not far.

    Where most are far, the run drifts apart or this island was alone: to take nothing would make it worse.

    Args:
      distance: from the peer, after its exchange.
      others: from all others that were exchanged with lately.
    """
    num_far = sum(other.count > 0 for other in others)
    return distance.count >= FAR_IN_A_ROW and 1 + num_far <= len(others) - num_far


def damping(lacks: float) -> float:
    """Return the share of a correction that is applied where its message lacks so many others.

    Exchanges that overlap correct one difference several times. In full that diverges: with a momentum of 0.5 the
    difference of two islands grows by a tenth in every round. Scaled like this it is stable up to a momentum of 0.7.
    """
    return (1 + lacks) ** -1.5


def agreed(own: float, other: float) -> float:
    """Return the factor that the island with the factor `own` applies.

    It is the smaller one of both. Where the other takes nothing, it is the own one: the pair's mean moves, towards the
    island that most others agree with.
    """
    return own if other == 0.0 else min(own, other)
