"""Meeting of a round with its partner, and the exchange in it."""

from dataclasses import dataclass
from enum import StrEnum

from noloco_jax.islands.protocol.bounds import Factors
from noloco_jax.islands.protocol.context import Backoff
from noloco_jax.islands.protocol.events import Channel
from noloco_jax.islands.protocol.messages import ExchangeId
from noloco_jax.islands.protocol.peers import Peer


class Stage(StrEnum):
    """Stage of an exchange, seen from one side; afterwards the ledger has its outcome."""

    OFFERED = "offered"  # dialled, no answer yet
    STREAMING = "streaming"  # messages go both ways
    HELD = "held"  # the partner's message is here and good


@dataclass
class Exchange:
    """Attempt at a round's exchange.

    Attributes:
      xid: the attempt.
      peer: the partner.
      channel: the call that carries it.
      dials: True if this side dialled; the other one decides.
      stage: the stage reached.
      known: the round that its partner was known to have ended when it began.
      began: time of its beginning.
      deadline: time when it is given up.
      weight: w_j/(w_i + w_j), once the partner's tokens are known.
      approved: True once the partner has said that it holds this side's message.
      sizes: |c| of each array, once the partner's message is here.
      own_factors: what brings them within the own bounds; all 0: nothing is taken.
      factors: those heard of the partner; in the end those in use, see `bounds.agreed`.
    """

    xid: ExchangeId
    peer: Peer
    channel: Channel
    dials: bool
    stage: Stage
    known: int
    began: float
    deadline: float
    weight: float = 0.5
    approved: bool = False
    sizes: tuple[float, ...] = ()
    own_factors: Factors = ()
    factors: Factors = ()


@dataclass
class Meeting:
    """Pending exchange with a round's partner.

    Attributes:
      round: whose messages are exchanged.
      peer: the partner.
      tokens: this side's weight.
      norm: Euclidean, of this side's message.
      retry: time of the next dial.
      running: the exchange under way.
      attempts: made by this side.
      waits: True if it is to be dialled once the link is free.
    """

    round: int
    peer: Peer
    tokens: int
    norm: float
    retry: Backoff
    running: Exchange | None = None
    attempts: int = 0
    waits: bool = False

    def weight(self, tokens: int) -> float:
        """Return w_j/(w_i + w_j) for a partner of so many tokens: with it w_i c_i + w_j c_j = 0."""
        return tokens / (self.tokens + tokens) if self.tokens + tokens else 0.5
