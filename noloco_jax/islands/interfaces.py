"""Interfaces of an island's protocol: its plan and outcomes, the form of messages, the network and the training."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.roster import Roster
from noloco_jax.optim.pairing import Pairing

PATIENCE = 2  # rounds, for each fragment, for which a message waits for its partner's


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Fixed facts of an island.

    Attributes:
      name: its name in the roster.
      roster: the members as they are known at the start.
      identity: values that must equal those of the others.
      pairing: of the islands that the run began with, in the order of their ids; the same everywhere.
      codec: form of messages.
      incarnation: larger than in every earlier start.
      sync_every, num_fragments: inner steps between two messages of a fragment, and fragments of a model.
      fits: (round, step) -> True where a run can be at both at once.
      saved: the protocol's state in the checkpoint to resume from: `Node.to_json`.
      details: JSON of what commands ask for.
      num_rounds: of the whole run; 0: unknown.
    """

    name: str
    roster: Roster
    identity: Mapping[str, str]
    pairing: Pairing
    codec: "Codec"
    incarnation: int
    sync_every: int
    num_fragments: int = 1
    fits: Callable[[int, int], bool] = lambda round, step: True
    saved: Mapping[str, Any] | None = None
    details: str = ""
    num_rounds: int = 0

    @property
    def patience(self) -> int:
        """Rounds for which a message waits for its partner's."""
        return PATIENCE * self.num_fragments


class RoundOutcome(NamedTuple):
    """Outcome of a round's message.

    Attributes:
      round: the round of the message.
      partner: the island to exchange it with; empty: nobody.
      outcome: "met" in its round, "late" in a later one, or "alone"; "caught up": no message; training continues
        from the partner's weights after this round.
      lag: rounds by which it was late.
      reason: the reason for "alone", in a few words.
      one_sided: True if the partner may have applied its half.
      factor: of the correction, below 1 where bounds clipped it or it came late; 0: nothing of the partner's is taken.
      steps_late: inner steps begun from the end of its round until its exchange was committed; None where it was not.
    """

    round: int
    partner: str
    outcome: str
    lag: int = 0
    reason: str = ""
    one_sided: bool = False
    factor: float = 1.0
    steps_late: int | None = None


class Read(NamedTuple):
    """A partner's message, decoded.

    Attributes:
      arrays: argument of `Codec.correction`.
      norm: Euclidean, of what the message stands for; not finite where a value is not.
      difference: |m_j − m_i|.
    """

    arrays: Any
    norm: float
    difference: float


class Codec(Protocol):
    """Form of messages. `own` is a message as the training gave it. Methods may take long: `TrainerCallbacks.run`."""

    @property
    def sizes(self) -> Sequence[int]:
        """Return the bytes of each part of a message."""
        ...

    def part(self, own: Any, number: int, theirs: Sequence[bytes]) -> bytes: ...

    def read(self, own: Any, theirs: Sequence[bytes]) -> Read: ...

    def correction(self, own: Any, read: Read, weight: float) -> Any: ...


class Stream(Protocol):
    """One call with a peer. Both methods raise `ConnectionLost` once it has ended."""

    async def send(self, frame: pb.Frame) -> None: ...

    async def receive(self) -> pb.Frame: ...


class Network(Protocol):
    """Calls to other islands. They raise `ConnectionLost`, with the reason in words."""

    def exchange(self, peer: str) -> AbstractAsyncContextManager[Stream]: ...

    async def greet(self, peer: str, greeting: pb.Greeting, seconds: float) -> pb.Status: ...

    def weights(self, peer: str, request: pb.WeightsRequest) -> Any:
        """Return an asynchronous iterator over the frames of a donor."""
        ...

    def follow(self, roster: Roster) -> None:
        """Dial the members of a roster."""
        ...


class TrainerCallbacks(Protocol):
    """The training, as the protocol sees it."""

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that takes long beside the loop."""
        ...

    def deliver(self, round: int, correct: Callable[[], Any]) -> None:
        """Apply the correction that `correct` computes, between two later inner steps."""
        ...

    def outcome(self, outcome: RoundOutcome) -> None: ...

    def log(self, line: str) -> None: ...

    def keep(self, roster: Roster) -> None:
        """Keep a new roster on disk."""
        ...

    @property
    def num_steps(self) -> int:
        """Inner steps begun since the start."""
        ...
