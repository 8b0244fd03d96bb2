"""A listener on a loopback port with an answering stub behind it, and diallers to it, with keys of a run."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.exchange import ConnectionLost
from noloco_jax.islands.keys import Credentials, load_keys, make_keys
from noloco_jax.islands.roster import Address, Member, Roster
from noloco_jax.islands.transport import Dialler, Listener

NAMES = ("paris", "berlin", "rome")


def roster_at(ports: dict[str, int], run: str = "served", **fields: Any) -> Roster:
    rows = [Member(i, name, Address("127.0.0.1", ports.get(name, 1))) for i, name in enumerate(NAMES)]
    return Roster(run, tuple(rows), len(rows), **fields)


def keys_in(folder: Path, run: str = "served") -> dict[str, Credentials]:
    """Make keys of a run, and return those of its islands."""
    make_keys(roster_at({}, run), folder, 30)
    return {name: load_keys(folder / name, name) for name in NAMES}


class Echo:
    """Stands for a node: sends every piece back, and counts what came."""

    def __init__(self) -> None:
        self.callers: list[str] = []
        self.frames = 0
        self.greetings: list[pb.Greeting] = []
        self.is_silent = False
        self.pieces, self.piece_bytes = 1, 3
        self.ended = asyncio.Event()  # of a call for weights
        self.meetings = self.table = self

    def end_of(self, name: str) -> str:
        return ""

    async def called(self, name: str, stream: Any) -> None:
        self.callers.append(name)
        while True:
            frame = await stream.receive()
            self.frames += 1
            if not self.is_silent:
                await stream.send(frame)

    async def greeted(self, name: str, greeting: pb.Greeting) -> pb.Status:
        self.callers.append(name)
        self.greetings.append(greeting)
        return pb.Status(round=7)

    async def watched(self, request: pb.WatchRequest) -> AsyncGenerator[pb.Status, None]:
        while True:
            yield pb.Status(round=7)
            await asyncio.sleep(request.every_seconds)

    async def give(self, request: pb.WeightsRequest) -> AsyncIterator[pb.WeightsFrame]:
        if request.last:
            raise ConnectionLost("it has not finished")
        try:
            yield pb.WeightsFrame(offer=pb.Offer(num_bytes=3))
            for _ in range(self.pieces):
                yield pb.WeightsFrame(piece=pb.Piece(data=bytes(self.piece_bytes)))
        finally:
            self.ended.set()


@contextlib.asynccontextmanager
async def served(
    credentials: Credentials | None, node: Any = None, roster: Roster | None = None
) -> AsyncIterator[tuple[Any, int]]:
    """Serve as paris, by the node's roster; give the node and the port."""
    node = node or Echo()
    node.roster = roster or roster_at({})
    listener = Listener(node, node.give, credentials)
    port = await listener.open(Address("127.0.0.1", 0))
    try:
        yield node, port
    finally:
        await listener.close()


@contextlib.asynccontextmanager
async def dialler(name: str, credentials: Credentials | None, port: int, **fields: Any) -> AsyncIterator[Dialler]:
    made = Dialler(name, credentials, roster_at({"paris": port}, **fields))
    try:
        yield made
    finally:
        await made.close()


async def echoed(one: Dialler, data: bytes, seconds: float = 60.0) -> bytes:
    async with asyncio.timeout(seconds), one.exchange("paris") as stream:
        await stream.send(pb.Frame(piece=pb.Piece(data=data)))
        return (await stream.receive()).piece.data
