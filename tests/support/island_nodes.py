"""Parts of a world of islands: processes with disks and books, calls, and faults."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from noloco_jax.islands.protocol.island import Island, Journal
from noloco_jax.islands.protocol.messages import Identity

IDENTITY = Identity("run", {"seed": "1"}, "model", "roster", "codec", "pace", "bytes", first_weights="norm 1")
ROUND = 10.0  # seconds
LATENCY = 0.05
TRANSFER = 1.0  # of a message
FRAME_FAULTS = (
    "drop",
    "duplicate",
    "delay",
    "delay for rounds",
    "reorder",
    "truncate",
    "flip",
    "nan",
    "wild",
    "nan behind",
)
NORM = 1000.0  # of a message
FAR = 3.0  # distance of some messages; of others 1
NODE_FAULTS = ("kill", "vanish", "stop", "lose disk")
MOMENTS = ("before it is sent", "after it is sent", "before it arrives", "after it arrived")


def differing(identity: Identity, field: str) -> Identity:
    """Return an identity that differs in a field."""
    value: Any = {"protocol": 9, "config": {**identity.config, "seed": "2"}}.get(field, "other")
    return dataclasses.replace(identity, **{field: value})


def circle(names: Sequence[str], name: str) -> Callable[[int], str | None]:
    """Return partners by the circle method: everybody meets everybody; one is alone where the number is odd."""
    me, count = names.index(name), len(names) + len(names) % 2

    def partner_of(round: int) -> str | None:
        turn = round % (count - 1)
        if me == count - 1:
            other = next(i for i in range(count - 1) if 2 * i % (count - 1) == turn)
        else:
            other = (turn - me) % (count - 1)
            other = count - 1 if other == me else other
        return names[other] if other < len(names) else None

    return partner_of


class Fault(NamedTuple):
    """Fault at the `nth` header of a kind, or at its sender or receiver; "Apply" is a point too."""

    kind: str
    nth: int
    action: str
    moment: str = ""


@dataclass
class Call:
    """A channel: each side has its own name for it, and stops listening when it closes."""

    sides: tuple["Node", "Node"]
    channels: tuple[Any, Any]
    incarnations: tuple[int, int]
    open: list[bool] = field(default_factory=lambda: [True, True])
    free_at: list[float] = field(default_factory=lambda: [0.0, 0.0])  # when the next header to that side may arrive


@dataclass
class Node:
    """An island's process, disk and books."""

    name: str
    duration: float
    preparing: float = 0.0
    machine: Island | None = None
    process: int = 0  # counts starts
    incarnation: int = 0
    silent: bool = False  # the machine is off, not only the process dead: nobody says that connections are lost
    stopped_until: float = 0.0
    disk: tuple[Journal, dict] | None = None
    began: bool = False
    round: int = -1
    training: int = 0  # counts what its steps begin from
    position: int = 0  # in the schedule of steps
    steps: int = 0  # inner steps of this round
    all_steps: int = 0
    jitter: float = 0.1  # of an inner step's duration, to either side
    paused: float = 0.0  # seconds
    ends: dict = field(default_factory=dict)  # round -> time
    calls: dict = field(default_factory=dict)
    tick_at: float | None = None
    messages: dict = field(default_factory=dict)  # round -> (number, tokens)
    received: dict = field(default_factory=dict)  # xid -> number
    arriving: float | None = None  # number of the message at hand
    had_partner: set = field(default_factory=set)  # rounds
    open: set = field(default_factory=set)  # due, and neither applied nor dropped
    weights: dict = field(default_factory=dict)  # xid -> (tokens, correction, peer): what the weights have seen
    one_sided: set = field(default_factory=set)  # rounds logged as such
    lost: set = field(default_factory=set)  # xids whose halves, applied or not, went down with weights
    drops: list = field(default_factory=list)
    applied: list = field(default_factory=list)
    heals: list = field(default_factory=list)
    lines: list = field(default_factory=list)
    entries: list = field(default_factory=list)  # of members, on its disk
    refused: str | None = None
    disturbed: bool = False
