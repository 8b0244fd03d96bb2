"""A world for islands: virtual time, a network that does what a tape of faults says, numbers in place of messages.

The world keeps its own account of what every island's weights have seen; `check` holds the islands to it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from noloco_jax.islands.protocol.context import Settings
from noloco_jax.islands.protocol.events import (
    Admitted,
    Apply,
    Begin,
    Close,
    Drop,
    Heal,
    Keep,
    Learned,
    Open,
    Ready,
    Refused,
    Send,
    Start,
    Stop,
    Tell,
    Tick,
)
from noloco_jax.islands.protocol.island import Island, Journal
from noloco_jax.islands.protocol.members import Members
from noloco_jax.islands.protocol.messages import Identity, Outcome
from support.island_nodes import (
    FRAME_FAULTS,
    IDENTITY,
    MOMENTS,
    NODE_FAULTS,
    ROUND,
    Fault,
    Node,
    circle,
    differing,
)
from support.island_training import Training

__all__ = [
    "FRAME_FAULTS",
    "IDENTITY",
    "MOMENTS",
    "NODE_FAULTS",
    "ROUND",
    "Fault",
    "Node",
    "World",
    "all_points",
    "differing",
]


class World(Training):
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
        super().__init__(faults, seed, quiet_after)
        self.settings = settings or Settings(answer_seconds=3.0, state_seconds=30.0)
        self.names = [f"i{number}" for number in range(count)]
        self.identities = dict(zip(self.names, identities or [IDENTITY] * count, strict=True))
        durations = durations or [ROUND * (1 + 0.02 * number) for number in range(count)]
        preparing = preparing or [0.0] * count
        self.nodes = {node[0]: Node(*node) for node in zip(self.names, durations, preparing, strict=True)}
        self.downtime = downtime
        self.save_every = save_every
        self.island = island
        self.steps = steps
        starts = starts or [0.1 * number for number in range(count)]
        for start, node in zip(starts, self.nodes.values(), strict=True):
            self.at(start, self.start, node, node.process)

    def finish(self) -> "World":
        """Nobody ends a round any more; what is under way comes to its end, and the books are checked."""
        self.finishing = True
        self.run(self.now + 4 * ROUND)
        self.check()
        return self

    def partner(self, name: str) -> Callable[[int], str | None]:
        return circle(self.names, name)

    # Processes.

    def start(self, node: Node, process: int) -> None:
        if node.process != process or node.machine is not None:
            return
        node.process += 1
        node.silent = False
        journal, weights = node.disk or (None, {})
        node.weights = dict(weights)
        node.incarnation += 1
        members = self.members_of(node)
        others = [name for name in members.founders if name != node.name]
        node.machine = self.island(
            node.name,
            others,
            self.identities[node.name],
            self.partner(node.name),
            node.incarnation,
            self.settings,
            journal and Journal.from_json(journal.to_json()),
            began_before=node.began,
            members=members,
        )
        node.round = journal.round if journal else -1
        self.handle(node, Start())

    def members_of(self, node: Node) -> Members:
        """Return the members as a node knows them when it starts."""
        del node
        return Members(self.names)

    def _ready(self, node: Node, process: int) -> None:
        if node.process != process or node.machine is None:
            return
        if node.stopped_until > self.now:
            self.at(node.stopped_until, self._ready, node, process)
            return
        self.handle(node, Ready())

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
            self.hang_up(call, side)
        node.calls.clear()
        if self.downtime is not None:
            self.at(self.now + self.downtime, self.start, node, node.process)

    def stop(self, node: Node) -> None:
        """SIGTERM: the island leaves, saves and ends after a while."""
        assert node.machine is not None
        node.disturbed = True
        self.handle(node, Stop())

    # Events and actions.

    def handle(self, node: Node, event: Any) -> None:
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
        self.handle(node, Tick())

    def _carry_out(self, node: Node, action: Any) -> None:
        match action:
            case Open():
                self.open(node, action)
            case Send():
                self.point(node, type(action.header).__name__, self.send_header, action)
            case Close():
                call, side = node.calls.pop(action.channel, (None, 0))
                if call is not None:
                    self.hang_up(call, side)
            case Keep():
                assert node.arriving is not None
                node.received[action.xid] = node.arriving
            case Apply():
                self.point(node, "Apply", self._apply, action)
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
                self.train(node)
            case Heal():
                node.began = True
                node.lost |= node.weights.keys()
                node.weights = {}
                node.open.clear()
                node.messages.clear()
                node.heals.append(action)
                started, node.round = node.round, action.round
                assert started < action.round
                self.train(node)
            case Refused():
                node.refused = action.line
            case Learned():
                node.entries = [*node.entries, *action.entries]
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


def all_points(world: World) -> list[tuple[str, int]]:
    """Every header that a world without faults has sent, and every application."""
    return [(kind, nth) for kind, count in sorted(world.sent.items()) for nth in range(count)]
