"""Virtual time, and a network of calls that does what a tape of faults says."""

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Self

from noloco_jax.islands.protocol.events import Arrived, Broken, Content, Open, Opened, Send
from noloco_jax.islands.protocol.messages import Message, State
from support.island_nodes import LATENCY, MOMENTS, NORM, ROUND, TRANSFER, Call, Fault, Node


class Network:
    """Calls between nodes, and when what happens.

    Args:
      faults: what goes wrong, by headers.
      seed: of latencies, tokens and messages.
      quiet_after: seconds after which nothing goes wrong any more.
    """

    def __init__(self, faults: Sequence[Fault], seed: int, quiet_after: float):
        self.faults, self.quiet_after = list(faults), quiet_after
        self.random = random.Random(seed)
        self.nodes: dict[str, Node] = {}
        self.now = 0.0
        self.transfer = TRANSFER
        self.sent: Counter[str] = Counter()
        self.cuts: list[tuple[float, float, frozenset[str]]] = []  # partitions: from, to, who is on one side
        self._queue: list[tuple[float, int, Callable[..., None], tuple]] = []
        self._order = itertools.count()

    # What a world adds.

    def crash(self, node: Node, action: str) -> None:
        raise NotImplementedError

    def handle(self, node: Node, event: Any) -> None:
        raise NotImplementedError

    def norm(self, message: Any) -> float:
        raise NotImplementedError

    def distances(self, own: Any, other: Any) -> tuple[float, ...]:
        raise NotImplementedError

    def admits(self, node: Node, caller: str, header: Any) -> bool:
        """Return whether a node's transport lets a call in."""
        del node, caller, header
        return True

    # Time.

    def at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._queue, (time, next(self._order), action, arguments))

    def run(self, until: float) -> Self:
        while self._queue and self._queue[0][0] <= until:
            self.now, _, action, arguments = heapq.heappop(self._queue)
            action(*arguments)
        self.now = until
        return self

    # Calls.

    def point(self, node: Node, kind: str, act: Callable[[Node, Any, int], None], action: Any) -> None:
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

    def open(self, node: Node, action: Open) -> None:
        kind = type(action.header).__name__
        other = self.nodes[action.peer]
        incarnations = node.process, other.process
        call = Call((node, other), (action.channel, ("in", next(self._order))), incarnations)
        node.calls[action.channel] = call, 0

        def send(node: Node, action: Open, nth: int) -> None:
            self._transmit(call, 1, action.header, nth, opener=True)

        self.point(node, kind, send, action)

    def send_header(self, node: Node, action: Send, nth: int) -> None:
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

    def hang_up(self, call: Call, side: int) -> None:
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
                self.hang_up(call, side)  # connection refused
            return
        if node.stopped_until > self.now:
            self.at(node.stopped_until, self._deliver, call, side, event, nth)
            return
        if event is None:
            if call.open[side] and channel in node.calls:
                del node.calls[channel]
                call.open[side] = False
                if nth >= 0:  # what came was wrong: the transport ends the call
                    self.hang_up(call, side)
                self.handle(node, Broken(channel, corrupt=nth >= 0))
            return
        header, number, norm, opener = event
        kind = type(header).__name__
        self._strike(node, kind, nth, MOMENTS[2])
        if node.machine is None or node.stopped_until > self.now:
            return
        if opener:
            if not self.admits(node, call.sides[1 - side].name, header):
                self.hang_up(call, side)
                return
            if channel in node.calls or not call.open[side]:  # a second time: a call that nobody listens to
                channel = ("ghost", next(self._order))
                ghost = Call(call.sides, (None, channel), call.incarnations, [False, True])
                node.calls[channel] = ghost, side
            else:
                call.incarnations = call.incarnations[0], node.process
                node.calls[channel] = call, side
            self.handle(node, Opened(channel, call.sides[1 - side].name, header))
        elif call.open[side] and channel in node.calls:
            node.arriving = number
            content = Content(norm) if isinstance(header, Message | State) else None
            if isinstance(header, Message) and header.xid.round in node.messages:
                content = Content(norm, self.distances(node.messages[header.xid.round][0], number))
            self.handle(node, Arrived(channel, header, content))
        else:
            return
        self._strike(node, kind, nth, MOMENTS[3])
