"""Islands in memory on a virtual clock: their real protocol, streams with faults, and a training of a few numbers."""

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.catch_up import CatchUp, CaughtUp, give
from noloco_jax.islands.exchange import ConnectionLost, ProtocolError
from noloco_jax.islands.interfaces import Plan, Read, RoundOutcome
from noloco_jax.islands.node import Node
from noloco_jax.islands.pace import Pace
from noloco_jax.islands.roster import Address, Member, Roster
from noloco_jax.islands.start import begin
from noloco_jax.optim.pairing import RandomPairing

NUMBERS = 4  # of a fragment of a model
Faults = Callable[[str, str, str], Any]  # (sender, receiver, kind of frame) -> awaitable, may raise `ConnectionLost`


async def no_faults(sender: str, receiver: str, kind: str) -> None:
    await asyncio.sleep(0.001)


class Numbers:
    """Codec of a message of a few numbers."""

    sizes: Sequence[int] = (8 * NUMBERS,)

    def part(self, own: np.ndarray, number: int, theirs: Sequence[bytes]) -> bytes:
        return own.tobytes()

    def read(self, own: np.ndarray, theirs: Sequence[bytes]) -> Read:
        values = np.frombuffer(theirs[0])
        with np.errstate(all="ignore"):  # what is not finite is refused
            return Read(values, float(np.linalg.norm(values)), float(np.linalg.norm(values - own)))

    def correction(self, own: np.ndarray, read: Read, weight: float) -> np.ndarray:
        return weight * (read.arrays - own)


class Delivered(ConnectionLost):
    """Fault after which a frame has arrived, but its sender does not know it."""


class MemoryStream:
    """One end of a call in memory."""

    def __init__(self, me: str, peer: str, sea: "Sea"):
        self._me, self._peer, self._sea = me, peer, sea
        self.arrived: asyncio.Queue[pb.Frame | None] = asyncio.Queue()
        self.other: MemoryStream = self
        self.is_over = False

    async def send(self, frame: pb.Frame) -> None:
        if self.is_over:
            raise ConnectionLost("the call is over")
        try:
            await self._sea.faults(self._me, self._peer, frame.WhichOneof("kind") or "")
        except Delivered:
            self.other.arrived.put_nowait(pb.Frame.FromString(frame.SerializeToString()))
            raise
        if self.is_over or self.other.is_over:
            raise ConnectionLost("the call is over")
        self.other.arrived.put_nowait(pb.Frame.FromString(frame.SerializeToString()))

    async def receive(self) -> pb.Frame:
        frame = await self.arrived.get()
        if frame is None:
            self.arrived.put_nowait(None)
            raise ConnectionLost("the call is over")
        return frame

    def end(self) -> None:
        for one in (self, self.other):
            one.is_over = True
            one.arrived.put_nowait(None)


class _Network:
    def __init__(self, me: str, sea: "Sea"):
        self._me, self._sea = me, sea

    @contextlib.asynccontextmanager
    async def exchange(self, peer: str):
        there = self._sea.reach(self._me, peer)
        mine, theirs = self._sea.stream(self._me, peer, self._sea), self._sea.stream(peer, self._me, self._sea)
        mine.other, theirs.other = theirs, mine

        async def serve() -> None:
            try:
                await there.node.meetings.called(self._me, theirs)
            except ConnectionLost:
                pass
            finally:
                theirs.end()

        serving = asyncio.ensure_future(serve())
        there.calls.add(serving)
        serving.add_done_callback(there.calls.discard)
        try:
            yield mine
        finally:
            mine.end()
            await asyncio.sleep(0.001)  # the other end hears of it a little later
            serving.cancel()

    async def greet(self, peer: str, greeting: pb.Greeting, seconds: float) -> pb.Status:
        there = self._sea.reach(self._me, peer)
        await asyncio.sleep(0.001)
        try:
            async with asyncio.timeout(seconds):
                return await there.node.greeted(self._me, greeting)
        except TimeoutError:
            raise ConnectionLost(f"no answer in {seconds:g} s") from None

    async def weights(self, peer: str, request: pb.WeightsRequest):
        there = self._sea.reach(self._me, peer)
        async for frame in there.give(request):
            await asyncio.sleep(self._sea.seconds_a_piece)
            self._sea.reach(self._me, peer)
            yield frame

    def follow(self, roster: Roster) -> None:
        pass


class Sim:
    """One island: its protocol, and a training that pulls a few numbers to a target."""

    def __init__(
        self,
        sea: "Sea",
        name: str,
        *,
        step_seconds: float | None = None,
        by_time: bool = False,
        parse: Callable[[bytes], Roster] | None = None,
        **plan: Any,
    ):
        self.sea, self.name = sea, name
        self.step_seconds = sea.step_seconds if step_seconds is None else step_seconds
        self.slow, self.momentum = np.zeros((2, sea.fragments * NUMBERS))
        self.step = self.inner_steps = 0
        self.calls: set[asyncio.Task] = set()
        self.outcomes: list[RoundOutcome] = []
        self.lines: list[str] = []
        self.inbox: list[Any] = []
        self.applied: list[tuple[int, np.ndarray]] = []
        self.stopped_until = self.began_at = self.finished_at = 0.0
        self.target = np.random.default_rng([ord(letter) for letter in name]).normal(size=self.slow.size)
        self.tamper: Callable[[np.ndarray], np.ndarray] = lambda message: message
        fields: dict[str, Any] = {
            "roster": sea.roster,
            "identity": {"run": "simulation"},
            "pairing": sea.pairing,
            "codec": Numbers(),
            "incarnation": 1,
            "sync_every": sea.steps_a_round * sea.fragments,
            "num_fragments": sea.fragments,
        }
        network, pace = _Network(name, sea), Pace(sea.steps_a_round, by_time)
        self.node = Node(Plan(name=name, **(fields | plan)), network, self, pace, parse)
        self.round = self.node.table.round  # of these weights

    # As `World`.

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        await asyncio.sleep(0)
        return function(*arguments)

    def deliver(self, round: int, correct: Callable[[], Any]) -> None:
        self.inbox.append((round, correct()))

    def outcome(self, outcome: RoundOutcome) -> None:
        self.outcomes.append(outcome)

    def log(self, line: str) -> None:
        self.lines.append(line)

    def keep(self, roster: Roster) -> None:
        pass

    @property
    def num_steps(self) -> int:
        return self.inner_steps

    # As `State`.

    def num_bytes(self, kind: int) -> int:
        return self.slow.nbytes

    async def weights(self, kind: int) -> bytes:
        return self.slow.tobytes()

    async def position(self) -> pb.Position:
        return pb.Position(round=self.round, step=self.step, has_averaged=self.node.table.has_averaged)

    async def received(self, data: bytes, position: pb.Position) -> CaughtUp:
        values = np.frombuffer(data)
        if not np.isfinite(values).all():
            raise ProtocolError("weights that are not finite")
        return CaughtUp(position.round, position.step, {0: values})

    def take_state(self, state: CaughtUp) -> None:
        self.inbox = [state]

    async def give(self, request: pb.WeightsRequest):
        async for frame in give(self.node.table, self, request):
            yield frame

    # The training.

    def apply(self) -> None:
        inbox, self.inbox = self.inbox, []
        for item in inbox:
            self.node.applied(item.round if isinstance(item, CaughtUp) else item[0])
            if isinstance(item, CaughtUp):
                self.slow, self.momentum = item.leaves[0].copy(), np.zeros_like(self.slow)
                self.round, self.step = item.round, item.step
            else:
                self.momentum[self._fragment(item[0])] += item[1]
                self.slow[self._fragment(item[0])] += item[1]
                self.applied.append(item)

    def end_round(self) -> None:
        """Take a local step, of which the message waits for the partner's."""
        self.round += 1
        part = self._fragment(self.round)
        delta = 0.1 * (self.target[part] - self.slow[part])
        honest = 0.7 * delta + 0.7 * self.slow[part]
        message, norm = self.tamper(honest), float(np.linalg.norm(honest))
        self.momentum[part] = 0.5 * self.momentum[part] + 0.7 * delta
        self.slow[part] += self.momentum[part]
        self.node.round_ended(self.round, self.step, message, norm, 100)

    def _fragment(self, round: int) -> slice:
        start = round % self.sea.fragments * NUMBERS
        return slice(start, start + NUMBERS)

    async def stop(self, after: float, seconds: float) -> None:
        """Stop the training for a while, after so many seconds."""
        await asyncio.sleep(after)
        self.stopped_until = asyncio.get_running_loop().time() + seconds

    async def train(
        self, num_steps: int, has_weights: bool = False, began_before: bool = False, after: float = 0.0
    ) -> None:
        """Start as an island does, after so many seconds, and train."""
        await asyncio.sleep(after)
        await begin(self.node.table, CatchUp(self.node, self), has_weights, began_before)
        await self.go_on(num_steps)

    async def go_on(self, num_steps: int) -> None:
        now, steps_a_round = asyncio.get_running_loop().time, self.sea.steps_a_round
        self.began_at = now()
        while self.step < num_steps and not self.node.table.is_removed:
            self.apply()
            if self.step >= num_steps:  # these weights are the last ones
                break
            await asyncio.sleep(self.node.table.pace.pause())
            stride = self.node.table.pace.stride(now(), steps_a_round - self.step % steps_a_round)
            self.inner_steps += 1
            await asyncio.sleep(max(self.step_seconds, self.stopped_until - now()))
            self.step += stride
            if self.step % steps_a_round == 0:
                self.end_round()
        self.finished_at = now()
        self.node.leave(pb.Status.FINISHED if self.step >= num_steps else pb.Status.LEAVING)

    def kill(self) -> None:
        """End everything without a word."""
        for task in [*self.calls, *self.node.table._tasks]:
            task.cancel()
        self.sea.islands.pop(self.name, None)


class Sea:
    """All islands, and the network between them."""

    stream: type[MemoryStream] = MemoryStream

    def __init__(
        self,
        names: Sequence[str],
        *,
        step_seconds: float = 0.1,
        steps_a_round: int = 10,
        seed: int = 0,
        fragments: int = 1,
    ):
        self.names, self.fragments = tuple(names), fragments
        self.pairing = RandomPairing(len(names))
        rows = [Member(i, name, Address("127.0.0.1", 7000 + i)) for i, name in enumerate(names)]
        self.roster = Roster("simulation", tuple(rows), len(rows))
        self.random = random.Random(seed)
        self.step_seconds, self.steps_a_round = step_seconds, steps_a_round
        self.faults: Faults = no_faults
        self.seconds_a_piece = 0.01
        self.islands: dict[str, Sim] = {}
        self.cut: Callable[[str, str], bool] = lambda one, other: False

    def add(self, name: str, **options: Any) -> Sim:
        self.islands[name] = Sim(self, name, **options)
        return self.islands[name]

    def reach(self, me: str, peer: str) -> Sim:
        if peer not in self.islands or me not in self.islands or self.cut(me, peer):
            raise ConnectionLost("nobody listens there")
        return self.islands[peer]


def participation(sim: Sim, since: int = 0) -> float:
    """Return the share of an island's rounds, of `since` and later, in which it exchanged."""
    outcomes = [
        outcome.outcome in ("met", "late")
        for outcome in sim.outcomes
        if outcome.round >= since and outcome.outcome != "caught up"
    ]
    return sum(outcomes) / max(len(outcomes), 1)
