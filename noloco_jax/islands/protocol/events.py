"""Events and actions: everything that passes between the protocol and the world.

A channel is one call between two islands: the opener, then headers in both directions, each side's in order. Names of
channels are chosen by the world for incoming calls, and ("out", number) for those that the island opens.
"""

from collections.abc import Hashable
from typing import NamedTuple

from noloco_jax.islands.protocol.bounds import Factors
from noloco_jax.islands.protocol.members import Entry, News
from noloco_jax.islands.protocol.messages import Answer, ExchangeId, Header, Opener

Channel = Hashable


class Content(NamedTuple):
    """Arrays that came whole.

    Attributes:
      norm: Euclidean, over all; not finite if a value is not.
      differences: of a message: |m_j − m_i| of each array, the Euclidean norm.
    """

    norm: float
    differences: tuple[float, ...] = ()


class Start(NamedTuple):
    """Start of the process: it can be called."""


class Ready(NamedTuple):
    """Readiness to train: programs are compiled, and the own weights loaded if there are any."""


class RoundEnded(NamedTuple):
    """End of a round: its solo step is done and its message is kept; training continues.

    Attributes:
      round: the one after the last.
      tokens: trained on in the round: the island's weight.
      norm: Euclidean, of the message.
    """

    round: int
    tokens: int
    norm: float


class Opened(NamedTuple):
    """Incoming call; `peer` is the name in its certificate."""

    channel: Channel
    peer: str
    header: Opener


class Arrived(NamedTuple):
    """Arrival of a header, and with a `Message` or a `State` of all its arrays."""

    channel: Channel
    header: Header
    content: Content | None = None


class Broken(NamedTuple):
    """End of a channel: closed by the peer, lost, never established, or `corrupt`: the data were wrong."""

    channel: Channel
    corrupt: bool = False


class Tick(NamedTuple):
    """Passage of time: send it when `Island.next_deadline` has come."""


class Told(NamedTuple):
    """Membership entries from outside of a call: an island's own, or those that introduce a caller."""

    news: News


class Stop(NamedTuple):
    """End of the island: it says goodbye, and resolves open exchanges while it is given time.

    `finished`: True if it has taken all steps of the run.
    """

    finished: bool = False


Event = Start | Ready | RoundEnded | Opened | Arrived | Broken | Tick | Told | Stop


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
    """Admission: the peers do not refuse the island; it may compile, and report it by `Ready`."""


class Begin(NamedTuple):
    """Train, from the own checkpoint or from the run's beginning."""

    fresh: bool


class Keep(NamedTuple):
    """Keep the arrays of the `Arrived` at hand, the message of exchange `xid`; without this action they are dropped."""

    xid: ExchangeId


class KeepShare(NamedTuple):
    """Keep the arrays of the `Arrived` at hand, share `number` of a state to come; otherwise they are dropped."""

    number: int


class Apply(NamedTuple):
    """Apply the correction c_i = factor · weight (m_j − m_i) between two inner steps (design §12).

    Attributes:
      xid: the exchange; m_j are the arrays that were kept, m_i those of its round.
      peer: j.
      weight: w_j/(w_i + w_j), w the tokens of the round, so that Σ w c = 0.
      lag: rounds ended since the message's.
      factors: the factor of each array, see `bounds.agreed`.
    """

    xid: ExchangeId
    peer: str
    weight: float
    lag: int
    factors: Factors = ()


class Drop(NamedTuple):
    """End of a round's message without a correction.

    Attributes:
      round: the round of the message.
      peer: the partner.
      reason: a few words.
      one_sided: True if the partner may have applied its half. Only then may the mean of the islands move.
      exchanged: True if both messages came, and nothing of the partner's is taken.
    """

    round: int
    peer: str
    reason: str
    one_sided: bool = False
    exchanged: bool = False


class Heal(NamedTuple):
    """Continue from the shares kept, at the position of `peer` after `round`; keep the own position in the data.

    `lineage` is the state's, see `Status`.
    """

    peer: str
    round: int
    lineage: bool


class Refused(NamedTuple):
    """End with exit status 2: most peers refuse this island, or the run has ended without it."""

    line: str


class Learned(NamedTuple):
    """Entries that are new here: keep them with the checkpoints, and call and admit the members that they name."""

    entries: tuple[Entry, ...]


class Tell(NamedTuple):
    """Line for the log."""

    line: str


Action = Open | Send | Close | Admitted | Begin | Keep | KeepShare | Apply | Drop | Heal | Refused | Learned | Tell
