"""What comes of an island's meetings: corrections and states for the training, and what became of each message."""

from concurrent.futures import Future
from dataclasses import dataclass

from noloco_jax.islands.payload import Arrays


@dataclass(frozen=True)
class Correction:
    """What an exchange came to: to be entered between two inner steps.

    Attributes:
      round: whose message it corrects.
      arrays: c = w_j/(w_i + w_j) (m_j − m_i), once they are computed.
    """

    round: int
    arrays: Future[Arrays]


@dataclass(frozen=True)
class Healed:
    """Another island's state, to go on from.

    Attributes:
      peer: whose.
      round: the last one that it has ended.
      arrays: as the other's `Agent.give` was given them.
    """

    peer: str
    round: int
    arrays: Arrays


@dataclass(frozen=True)
class Met:
    """What became of a round's message.

    Attributes:
      round: which.
      partner: whom it was to be exchanged with; empty: nobody.
      outcome: "met" in its round, "late" in a later one, or "alone"; "healed": of no message, the partner's state, that
        of after this round, is gone on from.
      lag: rounds by which it was late.
      reason: why alone, in a few words.
      one_sided: whether the partner may have applied its half.
    """

    round: int
    partner: str
    outcome: str
    lag: int = 0
    reason: str = ""
    one_sided: bool = False
