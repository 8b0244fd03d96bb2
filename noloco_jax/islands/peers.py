"""Knowledge of an island about its peers, and checks of what they tell."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.bounds import Distance
from noloco_jax.islands.exchange import MAX_TOKENS, ProtocolError

PROTOCOL = "10"  # islands of two protocols refuse each other
MAX_ROUND = 2**40
BROKEN_IN_A_ROW, QUARANTINE_ROUNDS = 3, 16
MAX_VALUES, MAX_TEXT = 512, 4096  # of an identity
FAULTS, LINES = 8, 3  # in a status: of so many peers, and the latest lines
MAX_ABOUT = 1000  # islands that one greeting is about
FIRST_WEIGHTS = "first weights"  # of islands that begin a run
FINISHED = (pb.Status.FINISHED, pb.Status.MERGED)  # phases of an island that has taken its last step
ENDED = (*FINISHED, pb.Status.LEAVING, pb.Status.GONE)  # phases of an island that begins no exchange
_COMPARED_FIRST = ("protocol", "run", "roster")
_HINTS = {
    "protocol": " (install one version of noloco_jax on both)",
    "roster": " (copy one file to all, and restart all)",
    FIRST_WEIGHTS: " (give all islands the same first weights, from one seed)",
}


@dataclass
class Peer:
    """A member as seen from one island.

    Attributes:
      round: the last round that it told to have ended; -1: unknown.
      incarnation: the newest one that it told.
      phase: the last one that it told, of this incarnation.
      silent: questions in a row that it did not answer, since it was last heard.
      wrong: the reason for which one of the two refuses the other.
      broken: broken messages in a row.
      quarantined_until: the round from which on exchanges with it begin again after them.
      distance: see `bounds.Distance`.
      last_exchanged: the last round that was exchanged with it.
      left_out: True while nothing is taken from it.
      asked_for_roster: time when it was last asked for its roster, or about it.
      told_roster: time when it was last sent this island's.
      delay: seconds that a message takes to it or back, as of its last answer; 0 while it was never dialled.
    """

    name: str
    round: int = -1
    incarnation: int = 0
    phase: int = pb.Status.STARTING
    silent: int = 0
    wrong: str = ""
    broken: int = 0
    quarantined_until: int = 0
    distance: Distance = field(default_factory=Distance)
    last_exchanged: int = -1
    left_out: bool = False
    asked_for_roster: float = -math.inf
    told_roster: float = -math.inf
    delay: float = 0.0

    def count_broken(self, round: int) -> bool:
        """Count a broken message; return True after several in a row, which leave it out for a while."""
        self.broken = (self.broken + 1) % BROKEN_IN_A_ROW
        if not self.broken:
            self.quarantined_until = round + 1 + QUARANTINE_ROUNDS
        return not self.broken

    def absence(self, round: int) -> str:
        """Return the reason for which a message of a round is not exchanged with it, or an empty text."""
        if self.quarantined_until > round:
            return "the partner is in quarantine"
        if self.phase in ENDED:
            return "the partner has finished" if self.phase in FINISHED else "the partner has left"
        return "the two refuse each other" if self.wrong else ""

    def fault(self, round: int) -> str:
        """Return the reason for which nothing is exchanged with it, for people, or an empty text."""
        if self.wrong:
            return self.wrong
        if self.quarantined_until > max(round, 0):
            return f"sent broken messages: nothing is exchanged with it before round {self.quarantined_until + 1}"
        return "is far away, and nothing is taken from it" if self.left_out else ""


def digest(identity: Mapping[str, str]) -> int:
    """Return 64 bits that stand for the values that all islands have at any time."""
    text = json.dumps(sorted((name, value) for name, value in identity.items() if name != FIRST_WEIGHTS))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def difference(own: Mapping[str, str], other: Mapping[str, str], peer: str) -> str:
    """Return the first values that differ, for people; an empty text where all are equal."""
    for name in sorted({*own, *other}, key=lambda name: (name not in _COMPARED_FIRST, name)):
        if name == FIRST_WEIGHTS and not (name in own and name in other):
            continue  # one of the two resumes, or was invited
        if own.get(name) != other.get(name):
            here, there = own.get(name, "the default"), other.get(name, "the default")
            return f"{name}: {here} here, {there} at {peer}{_HINTS.get(name, '')}"
    return ""


def check_round(round: int) -> None:
    """Raise `ProtocolError` for a last round that no run has."""
    if not -1 <= round < MAX_ROUND:
        raise ProtocolError("an impossible round")


def check_hello(hello: pb.Hello) -> None:
    """Raise `ProtocolError` for a Hello that no honest island sends."""
    if not (hello.round < MAX_ROUND and 0 < hello.tokens <= MAX_TOKENS):
        raise ProtocolError("a Hello of impossible values")
    check_timing(hello.timing)


def check_timing(timing: pb.Timing) -> None:
    """Raise `ProtocolError` for a timing that is none."""
    if not (0 <= timing.ago < math.inf and 0 <= timing.round_seconds < math.inf):
        raise ProtocolError("a timing of impossible values")


def check_greeting(greeting: pb.Greeting) -> None:
    """Raise `ProtocolError` for a greeting that no honest island or command sends."""
    texts = (*greeting.identity.keys(), *greeting.identity.values())
    if len(greeting.identity) > MAX_VALUES or any(len(text) > MAX_TEXT for text in texts):
        raise ProtocolError("an identity of too many values")
    if not 0 <= greeting.hold_seconds <= 600:
        raise ProtocolError("a time to hold that is none")
    if len(greeting.about) > MAX_ABOUT:
        raise ProtocolError(f"a greeting about more than {MAX_ABOUT} islands")


def check_watch(request: pb.WatchRequest) -> None:
    """Raise `ProtocolError` for an interval of watching that would keep an island busy, or is no number."""
    if not 0.2 <= request.every_seconds <= 3600:
        raise ProtocolError("an interval of watching that is none: 0.2 to 3600 seconds")


def check_status(status: pb.Status) -> None:
    """Raise `ProtocolError` for a status that no honest island tells."""
    check_round(status.round)
    if not (status.step < MAX_ROUND and 0 <= status.round_seconds < math.inf):
        raise ProtocolError("a status of impossible values")
