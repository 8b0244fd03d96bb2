"""Messages between islands: small headers, which travel as JSON and are checked on arrival.

Only `Windows`, `Message` and `State` are followed by arrays, which the transport checks. The first
header of a call is an opener: `Hello`, `StatusRequest`, `StateRequest` or `Leave`.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from noloco_jax.islands.protocol.bounds import Factors
from noloco_jax.islands.protocol.members import Certificate, Entry, News

# Version of this protocol: `tests/islands/test_released_form.py` says what may change within it.
VERSION = 5
LONGEST_TEXT = 256
_LONGEST_DIFFERENCE = 230  # leaves room in a text for the number of others
_ONE_VERSION = " (install one version of noloco_jax on both)"
_OPTIONAL = ("tokenizer", "first_weights")  # empty: fits any
MOST_FIELDS = 256
MOST_FACTORS = 8192
LONGEST_CERTIFICATE = 1024
MOST_ENTRIES = 64
DEFAULT = "the default"
PAST_INCARNATION = "a past incarnation"


class HeaderError(ValueError):
    """Header that no island of this version sends."""


class OtherProtocolError(HeaderError):
    """Header of another version of the protocol, in a form that this one does not know."""

    def __init__(self, version: int):
        super().__init__(f"protocol: {version} of the caller, {VERSION} of the island called{_ONE_VERSION}")


class Outcome(StrEnum):
    """Outcome of an exchange, as the answering island decided."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    FORGOTTEN = "forgotten"  # too long ago for its ledger


class ExchangeId(NamedTuple):
    """One attempt of two islands to exchange their messages; no other attempt, restart or round has the same.

    Attributes:
      round: the round whose messages are exchanged.
      dialler: the island that dialled.
      incarnation: the dialler's incarnation.
      attempt: the dialler's count of its attempts in this round.
    """

    round: int
    dialler: str
    incarnation: int
    attempt: int


@dataclass(frozen=True)
class Identity:
    """Values that must be equal for two islands to average.

    Attributes:
      run: the name in the roster.
      config: the common part of the configuration: the path of each field -> its value as JSON. Defaults are left out,
        so that a field of a newer version is no difference until it is used.
      model: digest of names, shapes and dtypes of the parameters.
      roster: digest of the roster.
      codec: the wire format of messages, and the number and layout of the parameters' fragments.
      pace: "steps", or "time" for islands that fit their inner steps to common rounds.
      tokenizer: the tokenizer's fingerprint; empty for an island that reads token ids, which fits any.
      first_weights: summary of the weights that a loop of one's own begins the run with; empty for the trainer, whose
        fields determine them, and for an island that has others, which fits any.
      protocol: version of the protocol.
    """

    run: str
    config: Mapping[str, str]
    model: str
    roster: str
    codec: str
    pace: str
    tokenizer: str = ""
    protocol: int = VERSION
    first_weights: str = ""

    def difference(self, other: "Identity", there: str, here: str = "here") -> str | None:
        """Return the first values that differ, such as "seed: 1 here, 2 at paris", or None.

        Args:
          other: the identity of another island.
          there: the other island's name.
          here: this one's place.
        """
        if self.protocol != other.protocol:  # nothing else compares
            return f"protocol: {self.protocol} {here}, {other.protocol} at {there}{_ONE_VERSION}"
        names = ("run", "roster", "tokenizer", "pace", "first_weights")
        pairs = [(name, str(getattr(self, name)), str(getattr(other, name))) for name in names]
        fields = sorted(self.config.keys() | other.config.keys())
        pairs += [(field, self.config.get(field, DEFAULT), other.config.get(field, DEFAULT)) for field in fields]
        found = [pair for pair in pairs if pair[1] != pair[2] and not (pair[0] in _OPTIONAL and "" in pair)]
        if not found:  # what follows from the fields, in another version of the program
            pairs = [(name, str(getattr(self, name)), str(getattr(other, name))) for name in ("model", "codec")]
            found = [pair for pair in pairs if pair[1] != pair[2]]
        lines = [f"{name}: {mine[:40]} {here}, {theirs[:40]} at {there}" for name, mine, theirs in found]
        if not lines:
            return None
        shown = lines[:1] if len("; ".join(lines[:2])) > _LONGEST_DIFFERENCE else lines[:2]
        more = len(lines) - len(shown)
        return "; ".join(shown)[:_LONGEST_DIFFERENCE] + (f"; and {more} more" if more else "")


@dataclass(frozen=True)
class Caller:
    """Caller and callee, sent with everything that changes state.

    Attributes:
      identity: values that must agree.
      sender, receiver: names of islands.
      incarnation: the sender's incarnation: larger after every start and every state taken from a donor.
      round: the last round that the sender has ended; -1 before the first.
    """

    identity: Identity
    sender: str
    receiver: str
    incarnation: int
    round: int


@dataclass(frozen=True)
class Speed:
    """Speed of island `name` in a round: the median seconds of its inner steps."""

    name: str
    seconds: float
    round: int


@dataclass(frozen=True)
class Timing:
    """Timing of a round, from which islands adapt their pace to each other.

    Attributes:
      ago: seconds since the end of the round whose messages are exchanged, by the sender's clock.
      own: the sender's speed, once it is known.
      fastest: the fastest of those that have told it their speed lately, and its own.
    """

    ago: float
    own: Speed | None
    fastest: Speed | None


@dataclass(frozen=True)
class Hello:
    """Opener of an exchange. `tokens` is the sender's weight: the tokens it trained on in the round."""

    caller: Caller
    xid: ExchangeId
    tokens: int
    timing: Timing | None = None
    news: News | None = None


@dataclass(frozen=True)
class Accept:
    """Answer to `Hello`: both stream now. Attributes as those of `Caller` and `Hello`."""

    incarnation: int
    round: int
    tokens: int
    timing: Timing | None = None
    news: News | None = None


@dataclass(frozen=True)
class Busy:
    """Answer to `Hello` or `StateRequest`: try again in so many seconds."""

    seconds: float


@dataclass(frozen=True)
class AtRound:
    """Answer to `Hello`: no message of that round is here; `round` is the last one that was ended."""

    round: int
    timing: Timing | None = None


@dataclass(frozen=True)
class NotPartner:
    """Answer to `Hello` or `StateRequest`: no exchange in this round or with this caller, and why."""

    reason: str
    news: News | None = None


@dataclass(frozen=True)
class Wrong:
    """Answer to any opener: the values that differ, as its receiver sees them. What followed was not read."""

    what: str


@dataclass(frozen=True)
class Done:
    """Answer to `Hello`: this exchange has ended, with this outcome."""

    outcome: Outcome


@dataclass(frozen=True)
class Message:
    """Header of a message's arrays."""

    xid: ExchangeId


@dataclass(frozen=True)
class Windows:
    """Header of the windows that a modulo message needs ahead of it; the protocol's state machine ignores it."""

    xid: ExchangeId


@dataclass(frozen=True)
class Received:
    """Verdict on the partner's message: good if it came whole, finite and of a plausible size.

    `factors` bring the correction within the sender's bounds, see `bounds.py`.
    """

    xid: ExchangeId
    good: bool
    factors: Factors = ()


@dataclass(frozen=True)
class Commit:
    """Decision of the answering island: both apply; `factors` are those that it uses, see `bounds.agreed`."""

    xid: ExchangeId
    factors: Factors = ()


@dataclass(frozen=True)
class StatusRequest:
    """Request for an island's status, and with `xid` for that exchange's outcome. Without identity: an observer.

    With `until_ready` an island that still compiles answers twice: now, and when it is ready. `factors` are those of
    the sender's `Received`. With `before` it asks for the entries before that place in their order.
    """

    identity: Identity | None = None
    xid: ExchangeId | None = None
    until_ready: bool = False
    factors: Factors = ()
    news: News | None = None
    before: int | None = None


@dataclass(frozen=True)
class Status:
    """Status of an island.

    Attributes:
      incarnation, round: see `Caller`.
      training: True if it has weights and trains; not while it starts, waits for others, or leaves.
      lineage: True if a committed exchange is in the past of its weights, through checkpoints and donors.
      committed, due: messages exchanged, and messages that had a partner, since the start.
      lag: mean rounds between a message and its correction.
      partner: the partner of the last round; empty: alone.
      outcome: outcome of the requested exchange.
      factors: of its commit.
      starting: True until it is ready to train.
      finished: True once it has taken all steps and only serves its weights.
      yours: the latest incarnation of the asking island that is known; -1: none.
      news: its entries.
      view: digest of all of them.
      members: active members in its last round, as it knows them.
    """

    incarnation: int
    round: int
    training: bool
    lineage: bool
    committed: int
    due: int
    lag: float
    partner: str
    outcome: Outcome | None = None
    factors: Factors = ()
    starting: bool = False
    finished: bool = False
    yours: int = -1
    news: News | None = None
    view: str = ""
    members: int = 0


@dataclass(frozen=True)
class Share:
    """Share of a state, see `islands.state_shares`; number 0 is the position. `whole`: moments and φ travel too."""

    number: int
    whole: bool


@dataclass(frozen=True)
class StateRequest:
    """Request for a share of an island's state, to continue from. `lineage`: accept only a state with a lineage.

    Earlier versions ask for no share, and get none.
    """

    caller: Caller
    lineage: bool
    share: Share | None = None


@dataclass(frozen=True)
class State:
    """Header of the arrays of a share of an island's state after `round`."""

    round: int
    lineage: bool
    share: Share | None = None


@dataclass(frozen=True)
class Leave:
    """Goodbye, so that nobody dials in vain. `finished`: the sender has taken all steps of the run."""

    caller: Caller
    finished: bool = False


Opener = Hello | StatusRequest | StateRequest | Leave
Answer = Accept | Busy | AtRound | NotPartner | Wrong | Done | Windows | Message | Received | Commit | Status | State
Header = Opener | Answer

KINDS: dict[str, type] = {kind.__name__: kind for kind in (*typing.get_args(Opener), *typing.get_args(Answer))}


def to_json(header: Header) -> dict[str, Any]:
    """Convert a header to its kind and fields, in JSON types alone."""
    return {"kind": type(header).__name__, **dataclasses.asdict(header)}


def from_json(values: Any) -> Header:
    """Parse a header.

    Raises:
      HeaderError: if the kind is unknown, or a field without a default is missing, or one is of another type or out of
        range: `OtherProtocolError` where the sender says that it speaks another version. Fields of newer versions are
        ignored.
    """
    if not isinstance(values, Mapping):
        raise HeaderError("no header of a known kind")
    kind = values.get("kind")
    try:
        if not isinstance(kind, str) or kind not in KINDS:
            raise HeaderError("no header of a known kind")
        return _made(KINDS[kind], {name: value for name, value in values.items() if name != "kind"}, kind)
    except HeaderError:
        version = _told_version(values)
        if version in (None, VERSION):
            raise
        raise OtherProtocolError(version) from None


def _told_version(header: Mapping[str, Any]) -> int | None:
    """Return the version of the protocol in an opener of any version; None where there is none."""
    caller = header.get("caller")
    identity = caller.get("identity") if isinstance(caller, Mapping) else header.get("identity")
    version = identity.get("protocol") if isinstance(identity, Mapping) else None
    return version if type(version) is int else None


def entry_from_json(values: Any) -> Entry:
    """Parse a membership entry; raise `HeaderError` for anything else."""
    return _made(Entry, values, "entry")


def identity_from_json(values: Any) -> Identity:
    """Parse an identity; raise `HeaderError` for anything else."""
    return _made(Identity, values, "identity")


def _made(kind: type, values: Any, where: str) -> Any:
    types_of = typing.get_type_hints(kind)
    if kind is ExchangeId and isinstance(values, list | tuple) and len(values) == len(types_of):
        values = dict(zip(types_of, values, strict=True))
    if not isinstance(values, Mapping) or not _required(kind) <= set(values):
        raise HeaderError(f"{where} must have the fields {', '.join(types_of)}")
    known = {name: type_ for name, type_ in types_of.items() if name in values}
    return kind(**{name: _value(type_, values[name], f"{where}.{name}") for name, type_ in known.items()})


def _required(kind: type) -> set[str]:
    if not dataclasses.is_dataclass(kind):
        return set(typing.get_type_hints(kind))
    return {field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING}


def _value(type_: Any, value: Any, where: str) -> Any:
    if isinstance(type_, types.UnionType):  # X | None
        return None if value is None else _value(typing.get_args(type_)[0], value, where)
    if typing.get_origin(type_) is Mapping:  # of texts to texts
        if not isinstance(value, Mapping) or len(value) > MOST_FIELDS:
            raise HeaderError(f"{where} must be an object of at most {MOST_FIELDS} fields")
        return {_value(str, name, where): _value(str, text, where) for name, text in value.items()}
    if dataclasses.is_dataclass(type_) or type_ is ExchangeId:
        return _made(typing.cast(type, type_), value, where)
    if type_ == Factors:
        if not isinstance(value, list | tuple) or len(value) > MOST_FACTORS:
            raise HeaderError(f"{where} must be a list of up to {MOST_FACTORS} numbers")
        return tuple(_value(float, one, where) for one in value)
    if type_ == tuple[Entry, ...]:
        if not isinstance(value, list | tuple) or len(value) > MOST_ENTRIES:
            raise HeaderError(f"{where} must be a list of up to {MOST_ENTRIES} entries")
        return tuple(_made(Entry, one, where) for one in value)
    if type_ is Certificate:
        if not isinstance(value, str) or len(value) > LONGEST_CERTIFICATE:
            raise HeaderError(f"{where} must have at most {LONGEST_CERTIFICATE} characters")
        return Certificate(value)
    if type_ is Outcome:
        if value not in list(Outcome):
            raise HeaderError(f"{where} must be one of {', '.join(Outcome)}")
        return Outcome(value)
    if type_ is float and type(value) is int:
        value = float(value) if abs(value) < 2**53 else math.inf
    if type(value) is not type_:
        raise HeaderError(f"{where} must be of type {type_.__name__}")
    if type_ is str and len(value) > LONGEST_TEXT:
        raise HeaderError(f"{where} must have at most {LONGEST_TEXT} characters")
    if type_ is int and not -1 <= value < 2**63:
        raise HeaderError(f"{where} must be from -1 to 2**63 - 1")
    if type_ is float and not 0 <= value < math.inf:
        raise HeaderError(f"{where} must be a finite number of 0 or more")
    return value
