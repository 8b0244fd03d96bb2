"""A world for islands: virtual time, a network that does what a tape of faults says, numbers in place of messages.

The world keeps its own account of what every island's weights have seen; `check` holds the islands to it.
"""

import dataclasses
import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from noloco_jax.islands.protocol.context import Settings
from noloco_jax.islands.protocol.events import (
    Admitted,
    Apply,
    Arrived,
    Begin,
    Broken,
    Close,
    Content,
    Drop,
    Heal,
    Keep,
    Open,
    Opened,
    Ready,
    Refused,
    RoundEnded,
    Send,
    Start,
    Stop,
    Tell,
    Tick,
)
from noloco_jax.islands.protocol.island import Island, Journal
from noloco_jax.islands.protocol.messages import Identity, Message, Outcome, State

IDENTITY = Identity("run", {"seed": "1"}, "model", "roster", "codec", "pace", "bytes")
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
    open: set = field(default_factory=set)  # due, and neither applied nor dropped
    weights: dict = field(default_factory=dict)  # xid -> (tokens, correction, peer): what the weights have seen
    one_sided: set = field(default_factory=set)  # rounds logged as such
    lost: set = field(default_factory=set)  # xids whose halves, applied or not, went down with weights
    drops: list = field(default_factory=list)
    applied: list = field(default_factory=list)
    heals: list = field(default_factory=list)
    lines: list = field(default_factory=list)
    refused: str | None = None
    disturbed: bool = False


class World:
    """Islands for some rounds.

    Args:
      count: number of islands.
      faults: what goes wrong, by headers.
      seed: of latencies, tokens and messages.
      settings: of the islands.
      durations: seconds of a round of each island, in which it takes every inner step.
      preparing: seconds that each island compiles when it starts; None: no time.
      starts: seconds after which each island starts; None: a tenth of a second apart.
      steps: inner steps of a round, for islands that keep pace; None: they end rounds after their durations.
      downtime: seconds until a dead island starts again; None: never.
      save_every: rounds between checkpoints.
      identities: of each island.
      quiet_after: seconds after which nothing goes wrong any more.
      island: what makes an island.
    """

    def __init__(
        self,
        count: int,
        faults: Sequence[Fault] = (),
        *,
        seed: int = 0,
        settings: Settings | None = None,
        durations: Sequence[float] | None = None,
        downtime: float | None = 1.3 * ROUND,
        save_every: int = 1,
        identities: Sequence[Identity] | None = None,
        quiet_after: float = math.inf,
        island: Callable[..., Island] = Island,
        steps: int | None = None,
        preparing: Sequence[float] | None = None,
        starts: Sequence[float] | None = None,
    ):
        self.settings = settings or Settings(answer_seconds=3.0, state_seconds=30.0)
        self.random = random.Random(seed)
        self.names = [f"i{number}" for number in range(count)]
        self.identities = dict(zip(self.names, identities or [IDENTITY] * count, strict=True))
        durations = durations or [ROUND * (1 + 0.02 * number) for number in range(count)]
        preparing = preparing or [0.0] * count
        self.nodes = {node[0]: Node(*node) for node in zip(self.names, durations, preparing, strict=True)}
        self.faults = list(faults)
        self.downtime = downtime
        self.save_every = save_every
        self.quiet_after = quiet_after
        self.island = island
        self.steps = steps
        self.now = 0.0
        self.finishing = False
        self.transfer = TRANSFER
        self.sent: Counter[str] = Counter()
        self.cuts: list[tuple[float, float, frozenset[str]]] = []  # partitions: from, to, who is on one side
        self.log: list[str] = []
        self._queue: list[tuple[float, int, Callable[..., None], tuple]] = []
        self._order = itertools.count()
        starts = starts or [0.1 * number for number in range(count)]
        for start, node in zip(starts, self.nodes.values(), strict=True):
            self.at(start, self._start, node, node.process)

    # Time.

    def at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._queue, (time, next(self._order), action, arguments))

    def run(self, until: float) -> "World":
        while self._queue and self._queue[0][0] <= until:
            self.now, _, action, arguments = heapq.heappop(self._queue)
            action(*arguments)
        self.now = until
        return self

    def finish(self) -> "World":
        """Nobody ends a round any more; what is under way comes to its end, and the books are checked."""
        self.finishing = True
        self.run(self.now + 4 * ROUND)
        self.check()
        return self

    def partner(self, name: str) -> Callable[[int], str | None]:
        """The circle method: everybody meets everybody; one is alone where the number is odd."""
        me, count = self.names.index(name), len(self.names) + len(self.names) % 2

        def partner_of(round: int) -> str | None:
            turn = round % (count - 1)
            if me == count - 1:
                other = next(i for i in range(count - 1) if 2 * i % (count - 1) == turn)
            else:
                other = (turn - me) % (count - 1)
                other = count - 1 if other == me else other
            return self.names[other] if other < len(self.names) else None

        return partner_of

    # Processes.

    def _start(self, node: Node, process: int) -> None:
        if node.process != process or node.machine is not None:
            return
        node.process += 1
        node.silent = False
        journal, weights = node.disk or (None, {})
        node.weights = dict(weights)
        node.incarnation += 1
        others = [name for name in self.names if name != node.name]
        node.machine = self.island(
            node.name,
            others,
            self.identities[node.name],
            self.partner(node.name),
            node.incarnation,
            self.settings,
            journal and Journal.from_json(journal.to_json()),
            began_before=node.began,
        )
        node.round = journal.round if journal else -1
        self._handle(node, Start())

    def _ready(self, node: Node, process: int) -> None:
        if node.process != process or node.machine is None:
            return
        if node.stopped_until > self.now:
            self.at(node.stopped_until, self._ready, node, process)
            return
        self._handle(node, Ready())

    def crash(self, node: Node, action: str) -> None:
        machine = node.machine
        node.disturbed = True
        if action == "stop":
            node.stopped_until = self.now + 2.5 * ROUND
            return
        if machine is None:
            return
        journal = machine.journal()
        committed = {xid for xid, outcome in journal.outcomes.items() if outcome is Outcome.COMMITTED}
        if action == "lose disk":
            node.disk = None
        saved = node.disk[1] if node.disk else {}
        node.lost |= ({xid for xid, _ in journal.unresolved} | committed) - saved.keys()
        node.incarnation = machine.incarnation
        node.machine, node.tick_at = None, None
        node.silent = action == "vanish"
        node.weights = dict(saved)
        for dictionary in (node.messages, node.received, node.open):
            dictionary.clear()
        for call, side in list(node.calls.values()):
            self._hang_up(call, side)
        node.calls.clear()
        if self.downtime is not None:
            self.at(self.now + self.downtime, self._start, node, node.process)

    def stop(self, node: Node) -> None:
        """SIGTERM: the island leaves, saves and ends after a while."""
        assert node.machine is not None
        node.disturbed = True
        self._handle(node, Stop())

    def _end_round(self, node: Node, process: int, round: int) -> None:
        if node.process != process or node.machine is None or node.round != round - 1 or self.finishing:
            return
        if node.stopped_until > self.now:
            self.at(node.stopped_until, self._end_round, node, process, round)
            return
        if round % self.save_every == 0:
            node.disk = node.machine.journal(), dict(node.weights)
        node.round = round
        number, tokens = self.message(node)
        if self.steps is not None:
            tokens, node.steps = node.steps, 0
        node.messages[round] = number, tokens
        if self.partner(node.name)(round) is not None:
            node.open.add(round)
        if self.steps is None:
            self._train(node)
        node.ends[round] = self.now
        self._handle(node, RoundEnded(round, tokens, self.norm(number)))
        late = [key for key in node.open if key < round - self.settings.patience]
        assert not late, f"{node.name} still waits for {late} in round {round}"
        for key in [key for key in node.messages if key < round - self.settings.patience]:
            del node.messages[key]

    # What islands exchange; numbers, unless a subclass has something else.

    def message(self, node: Node) -> tuple[Any, int]:
        """Train for a round, and return its message and tokens."""
        tokens = self.random.randrange(0, 5)
        return 1000.0 + self.random.random(), tokens

    def norm(self, message: Any) -> float:
        del message
        return NORM

    def distances(self, own: Any, other: Any) -> tuple[float, ...]:
        """Return what both sides are told of their distance: some are farther apart, so that bounds clip them."""
        if not math.isfinite(other):
            return (math.nan,)
        return (FAR if int(1e6 * abs(other - own)) % 5 == 0 else 1.0,)

    def correction(self, node: Node, own: Any, other: Any, action: Apply) -> Any:
        return action.weight * min(action.factors, default=1.0) * (other - own)

    def _train(self, node: Node) -> None:
        """Goes on after the last round."""
        if self.steps is None:  # a round is one inner step
            assert node.machine is not None
            pause = node.machine.pause()
            node.paused += pause
            node.machine.stride(self.now + pause, 1)
            self.at(self.now + pause + node.duration, self._end_round, node, node.process, node.round + 1)
            return
        node.training += 1
        node.position, node.steps = (node.round + 1) * self.steps, 0
        self._step(node, node.process, node.training, self.steps)

    def _step(self, node: Node, process: int, training: int, steps: int) -> None:
        """Ends the rounds that the last inner step has come to, and takes another."""
        if self.finishing:
            return
        if node.stopped_until > self.now:
            self.at(node.stopped_until, self._step, node, process, training, steps)
            return
        while node.machine is not None and (node.process, node.training) == (process, training):
            if node.position < (node.round + 2) * steps:
                pause = node.machine.pause()
                node.paused += pause
                node.position += node.machine.stride(self.now + pause, 4 * steps)
                node.steps += 1
                node.all_steps += 1
                seconds = node.duration / steps * (1 - node.jitter + 2 * node.jitter * self.random.random())
                self.at(self.now + pause + seconds, self._step, node, process, training, steps)
                return
            self._end_round(node, process, node.round + 1)

    # Events and actions.

    def _handle(self, node: Node, event: Any) -> None:
        process, machine = node.process, node.machine
        assert machine is not None
        for action in machine.handle(event, self.now):
            if node.process != process or node.machine is None:
                return  # a fault in between
            self._carry_out(node, action)
        if node.machine is None:
            return
        deadline = machine.next_deadline()
        if deadline is not None and (node.tick_at is None or deadline < node.tick_at):
            assert not isinstance(event, Tick) or deadline > self.now, "it was just told what time it is"
            node.tick_at = deadline
            self.at(deadline, self._tick, node, process, deadline)

    def _tick(self, node: Node, process: int, time: float) -> None:
        if node.process != process or node.machine is None or node.tick_at != time:
            return
        if node.stopped_until > self.now:
            self.at(node.stopped_until, self._tick, node, process, time)
            return
        node.tick_at = None
        self._handle(node, Tick())

    def _carry_out(self, node: Node, action: Any) -> None:
        match action:
            case Open():
                self._open(node, action)
            case Send():
                self._point(node, type(action.header).__name__, self._send, action)
            case Close():
                call, side = node.calls.pop(action.channel, (None, 0))
                if call is not None:
                    self._hang_up(call, side)
            case Keep():
                assert node.arriving is not None
                node.received[action.xid] = node.arriving
            case Apply():
                self._point(node, "Apply", self._apply, action)
            case Drop():
                key = action.round
                assert key in node.open or key not in node.messages, f"{node.name} drops {key} twice: {action}"
                node.open.discard(key)
                node.drops.append(action)
                if action.one_sided:
                    node.one_sided.add(key)
            case Admitted():
                self.at(self.now + node.preparing, self._ready, node, node.process)
            case Begin():
                assert action.fresh is (node.disk is None)
                node.began = True
                self._train(node)
            case Heal():
                node.began = True
                node.lost |= node.weights.keys()
                node.weights = {}
                node.open.clear()
                node.messages.clear()
                node.heals.append(action)
                started, node.round = node.round, action.round
                assert started < action.round
                self._train(node)
            case Refused():
                node.refused = action.line
            case Tell():
                node.lines.append(action.line)
            case _:
                raise AssertionError(action)

    def _apply(self, node: Node, action: Apply, nth: int) -> None:
        key = action.xid.round
        assert key not in {xid.round for xid in node.weights}, f"{node.name} applies {key} twice"
        assert key in node.open, f"{node.name} applies {key}, which was applied or dropped"
        node.open.remove(key)
        own, tokens = node.messages[key]
        correction = self.correction(node, own, node.received[action.xid], action)
        node.weights[action.xid] = tokens, correction, action.peer
        node.applied.append(action)

    # The network.

    def _point(self, node: Node, kind: str, act: Callable[[Node, Any, int], None], action: Any) -> None:
        """A point at which a process may fail, before and after what it does."""
        nth = self.sent[kind]
        self.sent[kind] += 1
        process = node.process
        self._strike(node, kind, nth, MOMENTS[0])
        if node.machine is not None and node.process == process:
            act(node, action, nth)
            self._strike(node, kind, nth, MOMENTS[1])

    def _strike(self, node: Node, kind: str, nth: int, moment: str) -> None:
        for fault in self.faults if self.now < self.quiet_after else ():
            if fault[:2] == (kind, nth) and fault.moment == moment:
                self.crash(node, fault.action)

    def _open(self, node: Node, action: Open) -> None:
        kind = type(action.header).__name__
        other = self.nodes[action.peer]
        incarnations = node.process, other.process
        call = Call((node, other), (action.channel, ("in", next(self._order))), incarnations)
        node.calls[action.channel] = call, 0

        def send(node: Node, action: Open, nth: int) -> None:
            self._transmit(call, 1, action.header, nth, opener=True)

        self._point(node, kind, send, action)

    def _send(self, node: Node, action: Send, nth: int) -> None:
        call, side = node.calls.get(action.channel, (None, 0))
        if call is not None:
            self._transmit(call, 1 - side, action.header, nth)

    def _transmit(self, call: Call, side: int, header: Any, nth: int, opener: bool = False) -> None:
        """A header on its way to a side of a call, with what the tape says of it."""
        kind = type(header).__name__
        heavy = isinstance(header, Message | State)
        wait = LATENCY * (0.5 + self.random.random()) + (self.transfer if heavy else 0)
        number = None
        if isinstance(header, Message):
            number = call.sides[1 - side].messages[header.xid.round][0]
        sound = NORM if number is None else self.norm(number)
        event: Any = header, number, sound, opener
        copies, behind = 1, None
        for fault in self.faults if self.now < self.quiet_after else ():
            if fault[:2] != (kind, nth) or fault.moment:
                continue
            match fault.action:
                case "drop":
                    copies = 0
                case "duplicate":
                    copies = 2
                case "delay":
                    wait += 0.3 * ROUND
                case "delay for rounds":
                    wait += 2.2 * ROUND
                case "reorder":  # what follows overtakes it
                    self.at(self.now + wait + 0.2, self._deliver, call, side, event, nth)
                    copies = 0
                case "truncate" | "flip":
                    event = None
                case "nan":
                    event = header, number, float("nan"), opener
                case "wild":
                    event = header, number, 1e9, opener
                case "nan behind" if heavy:  # a second message of the same exchange, right behind the first
                    behind = header, math.nan, math.nan, opener
        for copy in range(copies):
            call.free_at[side] = max(call.free_at[side], self.now + wait)
            self.at(call.free_at[side] + copy * 0.4, self._deliver, call, side, event, nth)
        if behind is not None:
            self.at(call.free_at[side], self._deliver, call, side, behind, nth)

    def _hang_up(self, call: Call, side: int) -> None:
        """A side ends the call, or its process: the other side hears of it after what was sent."""
        call.open[side] = False
        if not call.sides[side].silent:
            time = max(call.free_at[1 - side], self.now + LATENCY)
            self.at(time, self._deliver, call, 1 - side, None, -1)

    def _is_cut(self, call: Call) -> bool:
        a, b = (node.name for node in call.sides)
        return any(begin <= self.now < end and (a in side) != (b in side) for begin, end, side in self.cuts)

    def _deliver(self, call: Call, side: int, event: Any, nth: int) -> None:
        node, channel = call.sides[side], call.channels[side]
        if self._is_cut(call):
            return
        if node.machine is None or (node.process != call.incarnations[side] and not (event and event[3])):
            if event is not None and not node.silent and event[3]:
                self._hang_up(call, side)  # connection refused
            return
        if node.stopped_until > self.now:
            self.at(node.stopped_until, self._deliver, call, side, event, nth)
            return
        if event is None:
            if call.open[side] and channel in node.calls:
                del node.calls[channel]
                call.open[side] = False
                if nth >= 0:  # what came was wrong: the transport ends the call
                    self._hang_up(call, side)
                self._handle(node, Broken(channel, corrupt=nth >= 0))
            return
        header, number, norm, opener = event
        kind = type(header).__name__
        self._strike(node, kind, nth, MOMENTS[2])
        if node.machine is None or node.stopped_until > self.now:
            return
        if opener:
            if channel in node.calls or not call.open[side]:  # a second time: a call that nobody listens to
                channel = ("ghost", next(self._order))
                ghost = Call(call.sides, (None, channel), call.incarnations, [False, True])
                node.calls[channel] = ghost, side
            else:
                call.incarnations = call.incarnations[0], node.process
                node.calls[channel] = call, side
            self._handle(node, Opened(channel, call.sides[1 - side].name, header))
        elif call.open[side] and channel in node.calls:
            node.arriving = number
            content = Content(norm) if isinstance(header, Message | State) else None
            if isinstance(header, Message) and header.xid.round in node.messages:
                content = Content(norm, self.distances(node.messages[header.xid.round][0], number))
            self._handle(node, Arrived(channel, header, content))
        else:
            return
        self._strike(node, kind, nth, MOMENTS[3])

    # The books.

    def check(self) -> None:
        """Σ w c = 0 for every exchange, but for halves that were logged, or that went down with the weights."""
        for node in self.nodes.values():
            for xid, (tokens, correction, peer) in node.weights.items():
                other = self.nodes[peer]
                if xid in other.weights:
                    their_tokens, theirs, _ = other.weights[xid]
                    total = tokens * correction + their_tokens * theirs
                    assert abs(total) < 1e-9, f"{xid}: {correction} and {theirs} do not cancel"
                    assert tokens + their_tokens > 0 or abs(correction + theirs) < 1e-9
                else:
                    known = xid in other.lost or xid.round in other.one_sided
                    assert known, f"{xid}: {node.name} has applied it, {peer} has not, and nobody says so"

    def participation(self, first: int, last: int) -> float:
        """Applied of all messages that were due in these rounds."""
        due = [
            (node, round)
            for node in self.nodes.values()
            for round in range(first, last)
            if self.partner(node.name)(round) is not None
        ]
        return sum(key in {action.xid.round for action in node.applied} for node, key in due) / len(due)


def all_points(world: World) -> list[tuple[str, int]]:
    """Every header that a world without faults has sent, and every application."""
    return [(kind, nth) for kind, count in sorted(world.sent.items()) for nth in range(count)]
