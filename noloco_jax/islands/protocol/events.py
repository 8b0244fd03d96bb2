"""What happens to an island, and what it is to do: everything between the protocol and the world.

A channel is one call between two islands: the opener, then headers in both directions, each side's in order. Names of
channels are the world's for calls that come in, and ("out", number) for those that the island opens.
"""

from collections.abc import Hashable
from typing import NamedTuple

from noloco_jax.islands.protocol.messages import Answer, ExchangeId, Header, Opener

Channel = Hashable


class Content(NamedTuple):
    """What is known of arrays that came whole: their Euclidean norm; not finite if a value is not."""

    norm: float


class Start(NamedTuple):
    """The process is up and can be called."""


class Ready(NamedTuple):
    """Its programs are compiled, and its own weights are there if it has any: it can train from now on."""


class RoundEnded(NamedTuple):
    """The solo step of a round is done and its message is kept; the island trains on.

    Attributes:
      round: the one after the last.
      tokens: trained on in the round: the island's weight.
      norm: Euclidean, of the message.
    """

    round: int
    tokens: int
    norm: float


class Opened(NamedTuple):
    """Another island calls; `peer` is the name in its certificate."""

    channel: Channel
    peer: str
    header: Opener


class Arrived(NamedTuple):
    """A header came, and with a `Message` or a `State` all of its arrays."""

    channel: Channel
    header: Header
    content: Content | None = None


class Broken(NamedTuple):
    """A channel is at its end: closed by the other side, lost, never established, or `corrupt`: what came was wrong."""

    channel: Channel
    corrupt: bool = False


class Tick(NamedTuple):
    """Time passed: to be sent when `Island.next_deadline` has come."""


class Stop(NamedTuple):
    """The island is to end. It says goodbye, and settles what it is in doubt about as long as it is let.

    `finished`: whether it has taken all steps of the run.
    """

    finished: bool = False


Event = Start | Ready | RoundEnded | Opened | Arrived | Broken | Tick | Stop


class Open(NamedTuple):
    """Call another island with this opener."""

    channel: Channel
    peer: str
    header: Opener


class Send(NamedTuple):
    """Send a header; behind a `Message` the arrays of its round, behind a `State` those of the state."""

    channel: Channel
    header: Answer


class Close(NamedTuple):
    """End a channel, after what was sent."""

    channel: Channel


class Admitted(NamedTuple):
    """The others have been heard, and do not refuse the island: it may make itself ready, and say so by `Ready`."""


class Begin(NamedTuple):
    """Train, from the own checkpoint or from the run's beginning."""

    fresh: bool


class Apply(NamedTuple):
    """Apply the correction c_i = weight (m_j − m_i) between two inner steps (design §12).

    Attributes:
      xid: the exchange; m_j are the arrays that came with it, m_i those of its round.
      peer: j.
      weight: w_j/(w_i + w_j), w the tokens of the round, so that Σ w c = 0.
      lag: rounds ended since the message's.
    """

    xid: ExchangeId
    peer: str
    weight: float
    lag: int


class Drop(NamedTuple):
    """A round's message gets no correction.

    Attributes:
      round: which.
      peer: the partner.
      reason: a few words.
      one_sided: whether the partner may have applied its half. Only then may the mean of the islands move.
    """

    round: int
    peer: str
    reason: str
    one_sided: bool = False


class Heal(NamedTuple):
    """Go on from the state that came from `peer`, after `round`; keep the own position in the data.

    `lineage` is the state's, see `Status`.
    """

    peer: str
    round: int
    lineage: bool


class Refused(NamedTuple):
    """End with exit status 2: most of the peers say that this island does not belong to them."""

    line: str


class Tell(NamedTuple):
    """A line for the log."""

    line: str


Action = Open | Send | Close | Admitted | Begin | Apply | Drop | Heal | Refused | Tell
