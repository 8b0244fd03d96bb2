"""Islands in memory whose links have a rate: what a limited link means in tests of the protocol.

Every node has one link, of the same rate up and down. All of its exchanges share it: pieces pass the sender's uplink in
the order of their coming, and then the receiver's downlink. A stream has two pieces on the links at most, as buffers
are small beside a message; what has passed both arrives a latency later. Other frames take the latency alone: they are
small, and a network's queues are short. Frames of a stream keep their order.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.exchange import ConnectionLost
from support.island_world import NUMBERS, MemoryStream, Sea

MESSAGE_BYTES = 8 * NUMBERS
PIECE_BYTES = 2  # of the tests
IN_FLIGHT = 2


class LinkedStream(MemoryStream):
    """One end of a call over the links of both nodes."""

    _sea: "SlowSea"

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._room = asyncio.Semaphore(IN_FLIGHT)
        self._under_way: deque[pb.Frame | None] = deque()
        self._last = 0.0  # time when the last frame arrives

    async def send(self, frame: pb.Frame) -> None:
        self._check()
        sea, now = self._sea, asyncio.get_running_loop().time
        await sea.faults(self._me, self._peer, frame.WhichOneof("kind") or "")
        size = len(frame.piece.data)
        if size:
            await self._room.acquire()
            await asyncio.sleep(sea.up[self._me].pass_by(size, now()) - now())
            sea.sent[self._me] += size
        self._check()
        passed = sea.down[self._peer].pass_by(size, now()) if size else now()
        if size:
            asyncio.get_running_loop().call_at(passed, self._room.release)
        self._deliver(pb.Frame.FromString(frame.SerializeToString()), passed + sea.latency)

    def end(self) -> None:
        if not self.is_over:
            self.is_over = True
            self.arrived.put_nowait(None)
            self._deliver(None, asyncio.get_running_loop().time() + self._sea.latency)

    def _check(self) -> None:
        if self.is_over:
            raise ConnectionLost("the call is over")

    def _deliver(self, frame: pb.Frame | None, arrival: float) -> None:
        self._under_way.append(frame)
        self._last = max(self._last, arrival)
        asyncio.get_running_loop().call_at(self._last, self._arrive)

    def _arrive(self) -> None:
        frame = self._under_way.popleft()
        if not self.other.is_over:
            self.other.is_over = frame is None
            self.other.arrived.put_nowait(frame)


class _OneWay:
    """One direction of a node's link."""

    def __init__(self, rate: float):
        self._rate, self._free = rate, 0.0

    def pass_by(self, num_bytes: int, now: float) -> float:
        """Return when these bytes have passed."""
        self._free = max(self._free, now) + num_bytes / self._rate
        return self._free


class SlowSea(Sea):
    """Islands with links.

    Args:
      load: rounds that a message takes, on a link that carries nothing else.
      latency: seconds one way.
      **options: those of `Sea`.
    """

    stream = LinkedStream

    def __init__(self, names: Sequence[str], load: float, latency: float = 0.001, **options: Any):
        super().__init__(names, **options)
        rate = MESSAGE_BYTES / (load * self.step_seconds * self.steps_a_round) if load else float("inf")
        self.up = {name: _OneWay(rate) for name in names}
        self.down = {name: _OneWay(rate) for name in names}
        self.sent = dict.fromkeys(names, 0)
        self.latency, self.faults = latency, _no_faults


async def _no_faults(sender: str, receiver: str, kind: str) -> None:
    pass
