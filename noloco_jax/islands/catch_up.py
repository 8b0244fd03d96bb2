"""Catching up: an island that is far behind, new, or has lost its weights continues from those of one donor.

A donor that has finished gives its last weights: the island ends with them.

The donor's weights flow while it trains on. Once they have come it is asked where it is by then, so that a slow line
costs old weights, not rounds. Merges fetch weights by the same calls.

A donor is drawn at random from the peers near the median round, so that no island becomes everybody's donor by what it
claims. What comes is checked for its size, finite values and distance from the own weights; its position must be one
that a run can be at, and near the median when it has come.
"""

import asyncio
import contextlib
import random
import statistics
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.exchange import NOT_YET_SECONDS, PIECE_BYTES, ConnectionLost, ProtocolError
from noloco_jax.islands.interfaces import Network
from noloco_jax.islands.node import Node
from noloco_jax.islands.peer_table import PeerTable
from noloco_jax.islands.peers import ENDED, FINISHED, MAX_ROUND

REACH_SECONDS = 5.0  # behind by more than these and the patience: catch up
STUCK_SECONDS = 3.0  # behind by more than the patience, and no closer for as long: catch up
CHECK_SECONDS = 0.5  # between two questions to peers while behind
SILENT_DONOR_SECONDS = 20.0  # without a frame: it is left for another one
GIVE_SECONDS = 600.0  # for a donor's training to give a copy, between two of its inner steps
RETRY_SECONDS = 2.0
ASKED_AT_ONCE = 16
CATCH_UP = pb.WeightsRequest.CATCH_UP


class CaughtUp(NamedTuple):
    """State of a donor, from which training continues.

    Attributes:
      round: the last round that it has ended.
      step: its inner steps.
      leaves: numbers of the state's arrays -> arrays: weights, and what travels with them.
    """

    round: int
    step: int
    leaves: dict[int, Any]


class State(Protocol):
    """The training's state, as donors give it and as it is received."""

    def num_bytes(self, kind: int) -> int:
        """Return the bytes of the weights in a form."""
        ...

    async def weights(self, kind: int) -> bytes:
        """Return the encoded weights of a copy that the training takes between two steps."""
        ...

    async def position(self) -> pb.Position:
        """Return where the training is now, and the small arrays that travel with weights."""
        ...

    async def received(self, data: bytes, position: pb.Position) -> CaughtUp:
        """Return a received state; raise `ProtocolError` where it is not finite, or far from the own weights."""
        ...

    def take_state(self, state: CaughtUp, /) -> None:
        """Continue from this state between two later steps."""
        ...


async def give(table: PeerTable, state: State, request: pb.WeightsRequest) -> AsyncIterator[pb.WeightsFrame]:
    """Yield the frames for a peer or a command; raise `ConnectionLost` where there are no weights to give."""
    has_last = table.phase in FINISHED
    if not has_last and (request.last or table.phase != pb.Status.TRAINING):
        raise ConnectionLost("it has no weights to give yet" if table.phase not in ENDED else "it leaves")
    if request.position:
        locating = asyncio.ensure_future(state.position())
        async for frame in _until_done(locating):
            yield frame
        yield pb.WeightsFrame(position=locating.result())
        return
    copying = asyncio.ensure_future(state.weights(request.kind))
    async for frame in _until_done(copying):
        yield frame
    data = copying.result()
    yield pb.WeightsFrame(offer=pb.Offer(num_bytes=len(data), round=table.round))
    view = memoryview(data)
    for start in range(0, len(data), PIECE_BYTES):
        yield pb.WeightsFrame(piece=pb.Piece(data=bytes(view[start : start + PIECE_BYTES])))


async def _until_done(copying: asyncio.Future) -> AsyncIterator[pb.WeightsFrame]:
    """Yield a sign of life every few seconds until the training, whose steps may be long, has given its copy."""
    try:
        while not (await asyncio.wait([copying], timeout=NOT_YET_SECONDS))[0]:
            yield pb.WeightsFrame(not_yet=pb.NotYet())
    finally:
        copying.cancel()


async def receive(network: Network, donor: str, request: pb.WeightsRequest, size: int) -> bytes:
    """Return a donor's weights; raise as `receive_into`."""
    pieces: list[bytes] = []
    await receive_into(network, donor, request, size, pieces.append)
    return b"".join(pieces)


async def receive_into(
    network: Network, donor: str, request: pb.WeightsRequest, size: int, write: Callable[[bytes], object]
) -> int:
    """Call `write` with the pieces of a donor's weights; return its last round when it sent them.

    Raises:
      ConnectionLost: if the donor refuses, or is silent for too long.
      ProtocolError: if what comes is not of this size.
    """
    async with contextlib.aclosing(network.weights(donor, request)) as frames:
        offered = await _next_frame(frames, "offer")
        if offered.num_bytes != size or not -1 <= offered.round < MAX_ROUND:
            raise ProtocolError(f"weights of {offered.num_bytes} bytes, where {size} are needed")
        missing = size
        while missing:
            piece = (await _next_frame(frames, "piece")).data
            if len(piece) != min(PIECE_BYTES, missing):
                raise ProtocolError(f"a piece of {len(piece)} bytes, where {missing} of {size} are missing")
            missing -= len(piece)
            write(piece)
    return offered.round


async def locate(network: Network, donor: str) -> pb.Position:
    """Return where a donor's training is now, and its small arrays; raise as `receive`."""
    async with contextlib.aclosing(network.weights(donor, pb.WeightsRequest(position=True))) as frames:
        position = await _next_frame(frames, "position")
    if not -1 <= position.round < MAX_ROUND or position.step >= MAX_ROUND:
        raise ProtocolError("weights of an impossible round")
    return position


async def _next_frame(frames: AsyncIterator[pb.WeightsFrame], kind: str) -> Any:
    """Return the content of the next frame; raise `ProtocolError` where it is of another kind."""
    frame = pb.WeightsFrame(not_yet=pb.NotYet())
    try:
        async with asyncio.timeout(GIVE_SECONDS):
            while frame.HasField("not_yet"):
                async with asyncio.timeout(SILENT_DONOR_SECONDS):
                    frame = await anext(frames)
    except TimeoutError:
        raise ConnectionLost(f"no answer in {SILENT_DONOR_SECONDS:g} s") from None
    except StopAsyncIteration:
        raise ConnectionLost("it ended the call early") from None
    if frame.WhichOneof("kind") != kind:
        raise ProtocolError(f"{frame.WhichOneof('kind')} in the place of {kind}")
    return getattr(frame, kind)


def sample(table: PeerTable, count: int = ASKED_AT_ONCE, last: Collection[str] = ()) -> list[str]:
    """Return peers to ask, at random, those in `last` only if others are few."""
    names = sorted(table.peers)
    random.Random(f"{table.name} {table.incarnation} {table.round} {len(last)}").shuffle(names)
    return sorted(names, key=lambda name: name in last)[:count]


def with_weights(statuses: Iterable[pb.Status]) -> list[pb.Status]:
    """Return the statuses of islands that train or have finished: they can give weights."""
    return [status for status in statuses if status.phase in (pb.Status.TRAINING, *FINISHED) and status.round >= 0]


class CatchUp:
    """Catching up of one island.

    Args:
      node: the island.
      state: its training's state.
    """

    def __init__(self, node: Node, state: State):
        self._table, self._adopt, self._state = node.table, node.adopt, state
        self._stuck: tuple[float, int] | None = None  # since when it is behind, and the smallest lag since
        self._tries = 0

    async def watch(self) -> None:
        """Catch up whenever the island is too far behind, for as long as it trains."""
        table, patience = self._table, self._table.patience
        while True:
            await table.until(lambda: any(peer.round - table.round >= patience for peer in table.peers.values()))
            if table.phase == pb.Status.TRAINING:
                statuses = await table.ask(sample(table))
                round = table.round
                if self.is_behind(statuses.values()):
                    await self.from_one_of(statuses)
                    self._stuck = None
                elif self._stuck is None:  # most are not so far: who tells it is asked again after a round
                    await table.until(lambda: table.round > round or table.phase != pb.Status.TRAINING)  # noqa: B023
            elif table.phase != pb.Status.STARTING:
                return
            await asyncio.sleep(CHECK_SECONDS)

    def is_behind(self, statuses: Iterable[pb.Status], has_trained: bool = True) -> bool:
        """Return whether the own weights are too late to meet most others, and come no closer."""
        table, now = self._table, asyncio.get_running_loop().time()
        found = with_weights(statuses)
        lag = statistics.median_low(status.round - table.round for status in found) if found else 0
        if lag <= table.patience:
            self._stuck = None
            return False
        if not has_trained or lag * self._round_seconds(found) > REACH_SECONDS:
            return True
        if self._stuck is None or lag < self._stuck[1]:
            self._stuck = now, lag
        return now - self._stuck[0] >= STUCK_SECONDS

    async def from_one_of(self, statuses: dict[str, pb.Status]) -> bool:
        """Take the weights of one of the peers with these statuses; return whether one gave them."""
        table = self._table
        found = {name: one for name, one in statuses.items() if with_weights([one])}
        for name in self._donors(found):
            if name not in table.peers:
                continue
            table.log(f"catches up from {name}, at round {found[name].round + 1}; here it is round {table.round + 1}")
            try:
                size = self._state.num_bytes(CATCH_UP)
                data = await receive(table.network, name, pb.WeightsRequest(kind=CATCH_UP), size)
                position, others = await asyncio.gather(locate(table.network, name), table.ask([*sample(table), name]))
                self._check(position, others)
                state = await self._state.received(data, position)
            except (ConnectionLost, ProtocolError) as error:
                table.log(f"takes no weights from {name}: {error}")
                continue
            self._adopt(name, state.round, position.step, position.has_averaged)
            self._state.take_state(state)
            return True
        return False

    def _donors(self, found: dict[str, pb.Status]) -> Sequence[str]:
        """Return the peers near the median round, in a random order."""
        if not found:
            return []
        self._tries += 1
        median, reach = self._median(found.values())
        names = [name for name in sorted(found) if abs(found[name].round - median) <= reach]
        random.Random(f"{self._table.name} {self._table.incarnation} {self._tries}").shuffle(names)
        return sorted(names, key=lambda name: not found[name].has_averaged)

    def _check(self, position: pb.Position, statuses: dict[str, pb.Status]) -> None:
        """Raise `ProtocolError` for a position that a run cannot be at, or that is far from where most are by now."""
        table = self._table
        if position.round < 0 or not table.fits(position.round, position.step):
            raise ProtocolError(f"step {position.step} after round {position.round + 1}, which do not belong together")
        if position.round <= table.round:
            raise ProtocolError("weights that are no newer")
        if found := with_weights(statuses.values()):
            median, reach = self._median(found)
            if position.round > median + reach:
                raise ProtocolError(f"weights of round {position.round + 1}, where most are at {median + 1}")

    def _median(self, found: Iterable[pb.Status]) -> tuple[int, float]:
        """Return the median round, and how far from it an island still is near."""
        found = list(found)
        seconds = self._round_seconds(found)
        reach = max(self._table.patience, REACH_SECONDS / seconds if seconds else 0)
        return statistics.median_low(status.round for status in found), reach

    def _round_seconds(self, found: Iterable[pb.Status]) -> float:
        """Return the usual duration of a round: the own one, or what most tell."""
        told = [one.round_seconds for one in found if one.round_seconds > 0]
        return self._table.pace.round_seconds() or (statistics.median(told) if told else 0.0)
