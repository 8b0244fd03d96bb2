from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Frame(_message.Message):
    __slots__ = ("hello", "accept", "not_yet", "no", "done", "piece", "received", "commit")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_FIELD_NUMBER: _ClassVar[int]
    NOT_YET_FIELD_NUMBER: _ClassVar[int]
    NO_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    accept: Accept
    not_yet: NotYet
    no: No
    done: Done
    piece: Piece
    received: Received
    commit: Commit
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., accept: _Optional[_Union[Accept, _Mapping]] = ..., not_yet: _Optional[_Union[NotYet, _Mapping]] = ..., no: _Optional[_Union[No, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., piece: _Optional[_Union[Piece, _Mapping]] = ..., received: _Optional[_Union[Received, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ...) -> None: ...

class Timing(_message.Message):
    __slots__ = ("ago", "round_seconds")
    AGO_FIELD_NUMBER: _ClassVar[int]
    ROUND_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ago: float
    round_seconds: float
    def __init__(self, ago: _Optional[float] = ..., round_seconds: _Optional[float] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("round", "incarnation", "identity", "tokens", "timing", "roster_version", "num_held", "held_of")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    ROSTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_FIELD_NUMBER: _ClassVar[int]
    HELD_OF_FIELD_NUMBER: _ClassVar[int]
    round: int
    incarnation: int
    identity: int
    tokens: int
    timing: Timing
    roster_version: int
    num_held: int
    held_of: int
    def __init__(self, round: _Optional[int] = ..., incarnation: _Optional[int] = ..., identity: _Optional[int] = ..., tokens: _Optional[int] = ..., timing: _Optional[_Union[Timing, _Mapping]] = ..., roster_version: _Optional[int] = ..., num_held: _Optional[int] = ..., held_of: _Optional[int] = ...) -> None: ...

class Accept(_message.Message):
    __slots__ = ("incarnation", "tokens", "timing", "roster_version", "num_held")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    ROSTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    tokens: int
    timing: Timing
    roster_version: int
    num_held: int
    def __init__(self, incarnation: _Optional[int] = ..., tokens: _Optional[int] = ..., timing: _Optional[_Union[Timing, _Mapping]] = ..., roster_version: _Optional[int] = ..., num_held: _Optional[int] = ...) -> None: ...

class NotYet(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class No(_message.Message):
    __slots__ = ("reason", "text", "round", "roster_version")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OTHER: _ClassVar[No.Reason]
        WRONG: _ClassVar[No.Reason]
        NOT_TRAINING: _ClassVar[No.Reason]
        OVER_BEFORE: _ClassVar[No.Reason]
    OTHER: No.Reason
    WRONG: No.Reason
    NOT_TRAINING: No.Reason
    OVER_BEFORE: No.Reason
    REASON_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ROSTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    reason: No.Reason
    text: str
    round: int
    roster_version: int
    def __init__(self, reason: _Optional[_Union[No.Reason, str]] = ..., text: _Optional[str] = ..., round: _Optional[int] = ..., roster_version: _Optional[int] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("factor",)
    FACTOR_FIELD_NUMBER: _ClassVar[int]
    factor: float
    def __init__(self, factor: _Optional[float] = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class Received(_message.Message):
    __slots__ = ("good", "factor")
    GOOD_FIELD_NUMBER: _ClassVar[int]
    FACTOR_FIELD_NUMBER: _ClassVar[int]
    good: bool
    factor: float
    def __init__(self, good: bool = ..., factor: _Optional[float] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("factor",)
    FACTOR_FIELD_NUMBER: _ClassVar[int]
    factor: float
    def __init__(self, factor: _Optional[float] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("id", "name", "address", "from_round", "until_round", "issued")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FROM_ROUND_FIELD_NUMBER: _ClassVar[int]
    UNTIL_ROUND_FIELD_NUMBER: _ClassVar[int]
    ISSUED_FIELD_NUMBER: _ClassVar[int]
    id: int
    name: str
    address: str
    from_round: int
    until_round: int
    issued: int
    def __init__(self, id: _Optional[int] = ..., name: _Optional[str] = ..., address: _Optional[str] = ..., from_round: _Optional[int] = ..., until_round: _Optional[int] = ..., issued: _Optional[int] = ...) -> None: ...

class Roster(_message.Message):
    __slots__ = ("run", "version", "members", "num_founders")
    RUN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    NUM_FOUNDERS_FIELD_NUMBER: _ClassVar[int]
    run: str
    version: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    num_founders: int
    def __init__(self, run: _Optional[str] = ..., version: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., num_founders: _Optional[int] = ...) -> None: ...

class SignedRoster(_message.Message):
    __slots__ = ("roster", "signature")
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    roster: bytes
    signature: bytes
    def __init__(self, roster: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Greeting(_message.Message):
    __slots__ = ("identity", "incarnation", "roster_version", "roster", "wants_roster", "wants_details", "hold_seconds", "phase", "about")
    class IdentityEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROSTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    WANTS_ROSTER_FIELD_NUMBER: _ClassVar[int]
    WANTS_DETAILS_FIELD_NUMBER: _ClassVar[int]
    HOLD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    ABOUT_FIELD_NUMBER: _ClassVar[int]
    identity: _containers.ScalarMap[str, str]
    incarnation: int
    roster_version: int
    roster: SignedRoster
    wants_roster: bool
    wants_details: bool
    hold_seconds: float
    phase: Status.Phase
    about: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, identity: _Optional[_Mapping[str, str]] = ..., incarnation: _Optional[int] = ..., roster_version: _Optional[int] = ..., roster: _Optional[_Union[SignedRoster, _Mapping]] = ..., wants_roster: bool = ..., wants_details: bool = ..., hold_seconds: _Optional[float] = ..., phase: _Optional[_Union[Status.Phase, str]] = ..., about: _Optional[_Iterable[str]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("every_seconds",)
    EVERY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    every_seconds: float
    def __init__(self, every_seconds: _Optional[float] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("phase", "incarnation", "round", "step", "has_averaged", "due", "committed", "one_sided", "steps_late", "partner", "roster_version", "num_members", "round_seconds", "wrong", "roster", "details", "figures", "peers", "notices", "num_rounds")
    class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STARTING: _ClassVar[Status.Phase]
        READY: _ClassVar[Status.Phase]
        TRAINING: _ClassVar[Status.Phase]
        FINISHED: _ClassVar[Status.Phase]
        LEAVING: _ClassVar[Status.Phase]
        MERGED: _ClassVar[Status.Phase]
        GONE: _ClassVar[Status.Phase]
    STARTING: Status.Phase
    READY: Status.Phase
    TRAINING: Status.Phase
    FINISHED: Status.Phase
    LEAVING: Status.Phase
    MERGED: Status.Phase
    GONE: Status.Phase
    class FiguresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    PHASE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    HAS_AVERAGED_FIELD_NUMBER: _ClassVar[int]
    DUE_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    ONE_SIDED_FIELD_NUMBER: _ClassVar[int]
    STEPS_LATE_FIELD_NUMBER: _ClassVar[int]
    PARTNER_FIELD_NUMBER: _ClassVar[int]
    ROSTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_MEMBERS_FIELD_NUMBER: _ClassVar[int]
    ROUND_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WRONG_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    NOTICES_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    phase: Status.Phase
    incarnation: int
    round: int
    step: int
    has_averaged: bool
    due: int
    committed: int
    one_sided: int
    steps_late: float
    partner: str
    roster_version: int
    num_members: int
    round_seconds: float
    wrong: str
    roster: SignedRoster
    details: str
    figures: _containers.ScalarMap[str, float]
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    notices: _containers.RepeatedScalarFieldContainer[str]
    num_rounds: int
    def __init__(self, phase: _Optional[_Union[Status.Phase, str]] = ..., incarnation: _Optional[int] = ..., round: _Optional[int] = ..., step: _Optional[int] = ..., has_averaged: bool = ..., due: _Optional[int] = ..., committed: _Optional[int] = ..., one_sided: _Optional[int] = ..., steps_late: _Optional[float] = ..., partner: _Optional[str] = ..., roster_version: _Optional[int] = ..., num_members: _Optional[int] = ..., round_seconds: _Optional[float] = ..., wrong: _Optional[str] = ..., roster: _Optional[_Union[SignedRoster, _Mapping]] = ..., details: _Optional[str] = ..., figures: _Optional[_Mapping[str, float]] = ..., peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ..., notices: _Optional[_Iterable[str]] = ..., num_rounds: _Optional[int] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("name", "fault", "phase")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    name: str
    fault: str
    phase: Status.Phase
    def __init__(self, name: _Optional[str] = ..., fault: _Optional[str] = ..., phase: _Optional[_Union[Status.Phase, str]] = ...) -> None: ...

class WeightsRequest(_message.Message):
    __slots__ = ("kind", "last", "position")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        EXACT: _ClassVar[WeightsRequest.Kind]
        CATCH_UP: _ClassVar[WeightsRequest.Kind]
    EXACT: WeightsRequest.Kind
    CATCH_UP: WeightsRequest.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    kind: WeightsRequest.Kind
    last: bool
    position: bool
    def __init__(self, kind: _Optional[_Union[WeightsRequest.Kind, str]] = ..., last: bool = ..., position: bool = ...) -> None: ...

class WeightsFrame(_message.Message):
    __slots__ = ("offer", "piece", "position", "not_yet")
    OFFER_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    NOT_YET_FIELD_NUMBER: _ClassVar[int]
    offer: Offer
    piece: Piece
    position: Position
    not_yet: NotYet
    def __init__(self, offer: _Optional[_Union[Offer, _Mapping]] = ..., piece: _Optional[_Union[Piece, _Mapping]] = ..., position: _Optional[_Union[Position, _Mapping]] = ..., not_yet: _Optional[_Union[NotYet, _Mapping]] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("num_bytes", "round")
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    round: int
    def __init__(self, num_bytes: _Optional[int] = ..., round: _Optional[int] = ...) -> None: ...

class Position(_message.Message):
    __slots__ = ("round", "step", "has_averaged", "small")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    HAS_AVERAGED_FIELD_NUMBER: _ClassVar[int]
    SMALL_FIELD_NUMBER: _ClassVar[int]
    round: int
    step: int
    has_averaged: bool
    small: bytes
    def __init__(self, round: _Optional[int] = ..., step: _Optional[int] = ..., has_averaged: bool = ..., small: _Optional[bytes] = ...) -> None: ...
