"""Exchange of one round's messages between two islands: two coroutines, over any stream and any asyncio loop.

    offer                                 answer
    Hello(round, tokens, timing)    ->
                                    <-    NotYet, repeated while the answering side has not ended the round
                                    <-    Accept(tokens, timing), or No(reason), or Done(factor)
    Piece ...                       <->   Piece ...          both at once; with a modulo format first the windows
    Received(factor)                ->                       from here on the exchange may have been committed
                                    <-    Commit(factor)     committed: each side applies the smaller factor

Whatever breaks before `Received` has changed nothing: the offering side dials again. Hello and Accept say how much of
the partner's message has come in earlier calls, and the rest follows. What breaks after `Received` is dialled again
with the same round and incarnation, and answered by `Done` if the answering side has committed. A side that has sent
all sends `NotYet` while it receives, as its partner may have minutes of data in buffers.
"""

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable
from typing import Any

from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.bounds import LARGEST
from noloco_jax.islands.interfaces import Codec, Read, Stream

PIECE_BYTES = 128 << 10  # at most: 1 s at 1 Mbit/s, which several calls share
PIECES, SMALLEST_BYTES = 16, 16 << 10  # of a smaller message, so that one sees how far it has come
SILENT_SECONDS = 15.0  # without a frame: the call is given up
NOT_YET_SECONDS = 4.0  # between two `NotYet`
MAX_TOKENS = 2**48


class ConnectionLost(Exception):
    """End of a call without an answer: the peer is away, stopped, or the network is down."""


class ProtocolError(Exception):
    """A frame or a message that no honest peer sends."""


class Refused(Exception):
    """There will be no exchange; `answer` has the reason."""

    def __init__(self, answer: pb.No):
        super().__init__(answer.text)
        self.answer = answer


class Attempt:
    """One island's part in an exchange: its message, and what it makes of the partner's.

    It lives until the exchange ends, over all of its calls.

    Args:
      codec: form of messages.
      run: calls a function that takes long beside the loop.
      own: the message, as the training gave it.
      norm: Euclidean, of it.
      tokens: its weight.
      bound: maps |c| to the factor that brings a correction into the bounds.

    Attributes:
      incarnation: of the partner whose message this is; 0: nothing has come yet.
      num_calls: in which the messages flow now.
      flowed: time when they last did.
      read: the partner's message, once it has come.
      weight, size, factor: its share, |c| before it is scaled, and the result of `bound`.
    """

    def __init__(
        self, codec: Codec, run: Callable[..., Any], own: Any, norm: float, tokens: int, bound: Callable[[float], float]
    ):
        self._codec, self._run, self._bound = codec, run, bound
        self.own, self.norm, self.tokens = own, norm, tokens
        self.weight = self.size = self.factor = 0.0
        self.read: Read | None = None
        self._piece_bytes = min(max(sum(codec.sizes) // PIECES, SMALLEST_BYTES), PIECE_BYTES)
        self.incarnation = self.num_calls = 0
        self.flowed = -math.inf
        self._num_sent = 0  # bytes of the own message
        self._parts: list[bytes] = []  # of it, as they were encoded for this partner
        self._theirs: list[bytes] = []  # whole parts of the partner's
        self._pieces: list[bytes] = []  # of the next one

    @property
    def backlog(self) -> float:
        """Share of the messages that is still to flow; 0 while no call is under way."""
        size = sum(self._codec.sizes)
        return 1 - min(self.num_held, self._num_sent) / size if self.num_calls else 0.0

    @property
    def num_held(self) -> int:
        """Bytes of the partner's message that have come."""
        return sum(map(len, (*self._theirs, *self._pieces)))

    def keep_from(self, incarnation: int) -> None:
        """Keep what has come if it came from this incarnation of the partner; its other ones have other messages."""
        if incarnation != self.incarnation:
            self.forget()
            self.incarnation = incarnation

    def forget(self) -> None:
        """Begin anew: all of the partner's message is missing."""
        self.incarnation, self.read, self._num_sent = 0, None, 0
        self._parts, self._theirs, self._pieces = [], [], []

    async def swap(self, stream: Stream, num_sent: int) -> None:
        """Send the own message, but for the bytes that the partner holds, and receive what is missing of the partner's.

        Each part may depend on the partner's earlier ones.
        """
        self.num_calls, self._num_sent = self.num_calls + 1, num_sent
        try:
            for number, size in enumerate(self._codec.sizes):
                if number == len(self._parts):
                    self._parts.append(await self._run(self._codec.part, self.own, number, tuple(self._theirs)))
                await self._swap_part(stream, number, size, num_sent)
                num_sent = max(num_sent - size, 0)
        finally:
            self.num_calls -= 1
            self.flowed = asyncio.get_running_loop().time()

    async def _swap_part(self, stream: Stream, number: int, size: int, num_sent: int) -> None:
        is_whole = asyncio.Event()

        async def receive() -> None:
            if number == len(self._theirs):
                await _receive_pieces(stream, self._pieces, size, self._piece_bytes)
                self._theirs.append(b"".join(self._pieces))
                self._pieces.clear()
            is_whole.set()

        sending = self._send_part(stream, self._parts[number], num_sent, is_whole)
        both = [asyncio.ensure_future(one) for one in (sending, receive())]
        try:
            await asyncio.gather(*both)
        finally:
            for one in both:
                one.cancel()
            await asyncio.gather(*both, return_exceptions=True)
            del both, one  # the traceback of one that failed holds this frame: a cycle would keep all arrays

    async def _send_part(self, stream: Stream, data: bytes, num_sent: int, is_done: asyncio.Event) -> None:
        """Send a part, but for its first bytes, and then signs of life until the partner's has come."""
        view = memoryview(data)
        for start in range(num_sent, len(data), self._piece_bytes):
            piece = bytes(view[start : start + self._piece_bytes])
            await send(stream, pb.Frame(piece=pb.Piece(data=piece)))
            self._num_sent += len(piece)
        while not is_done.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(is_done.wait(), NOT_YET_SECONDS)
                return
            await send(stream, pb.Frame(not_yet=pb.NotYet()))

    async def judge(self, tokens: int) -> float:
        """Decode the partner's message and return its factor; raise `ProtocolError` for no message at all."""
        try:
            read: Read = await self._run(self._codec.read, self.own, tuple(self._theirs))
        except (ValueError, TypeError, IndexError, ArithmeticError) as error:
            self.forget()
            raise ProtocolError(f"a message that cannot be decoded: {error}") from None
        if not read.norm <= LARGEST * self.norm or not math.isfinite(read.difference):  # NaN neither
            self.forget()
            raise ProtocolError(f"a message of norm {read.norm:.3g}, where the own one has {self.norm:.3g}")
        self.weight = tokens / (tokens + self.tokens)
        self.read, self.size = read, self.weight * read.difference
        self.factor = self._bound(self.size)
        return self.factor


async def offer(
    stream: Stream,
    hello: pb.Hello,
    side: Attempt,
    hear: Callable[[pb.Frame], None],
    hold: Callable[[], None],
) -> float:
    """Exchange as the dialling side; return the partner's factor: the exchange is committed.

    Args:
      stream: a call that was just opened.
      hello: the first frame.
      side: the own part.
      hear: called with every answer up to the one that ends the wait.
      hold: called just before the partner may commit.

    Raises:
      Refused: if there will be no exchange.
      ConnectionLost: if the call ended.
      ProtocolError: if the partner sent what no honest peer sends.
    """
    await send(stream, pb.Frame(hello=hello))
    while (kind := (frame := await _receive(stream)).WhichOneof("kind")) == "not_yet":
        hear(frame)
    if kind == "no":
        hear(frame)
        raise Refused(frame.no)
    if kind == "done":
        return checked_factor(frame.done.factor)
    accept = _expect(frame, "accept").accept
    check_tokens(accept.tokens)
    hear(frame)
    side.keep_from(accept.incarnation)
    await side.swap(stream, accept.num_held)
    try:
        own = await side.judge(accept.tokens)
    except ProtocolError:
        await send(stream, pb.Frame(received=pb.Received(good=False)))
        raise
    hold()
    await send(stream, pb.Frame(received=pb.Received(good=True, factor=own)))
    return checked_factor((await _receive_next(stream, "commit")).factor)


async def answer(
    stream: Stream, accept: pb.Accept, hello: pb.Hello, side: Attempt, commit: Callable[[float], float]
) -> None:
    """Exchange as the answering side, which has read the Hello and accepts it.

    Args:
      stream: the call.
      accept: the answer, but for `num_held`.
      hello: the dialler's.
      side: the own part.
      commit: maps the partner's factor to the own one, and commits.

    Raises `ConnectionLost` and `ProtocolError` as `offer`.
    """
    side.keep_from(hello.incarnation)
    accept.num_held = side.num_held
    await send(stream, pb.Frame(accept=accept))
    await side.swap(stream, hello.num_held if hello.held_of == accept.incarnation else 0)
    await side.judge(hello.tokens)
    received = await _receive_next(stream, "received")
    if not received.good:
        raise ConnectionLost("it refuses this island's message")
    own = commit(checked_factor(received.factor))
    await send(stream, pb.Frame(commit=pb.Commit(factor=own)))


async def receive_hello(stream: Stream) -> pb.Hello:
    """Return the first frame of a call; raise `ConnectionLost` where none comes, or another one."""
    frame = await _receive(stream)
    if frame.WhichOneof("kind") != "hello":
        raise ConnectionLost("it begins without a Hello")
    return frame.hello


async def hold_until(ready: Awaitable[None], stream: Stream) -> None:
    """Wait for the own round's end, and tell the dialler that the call is held."""
    waiting = asyncio.ensure_future(ready)
    try:
        while not waiting.done():
            await send(stream, pb.Frame(not_yet=pb.NotYet()))
            await asyncio.wait([waiting], timeout=NOT_YET_SECONDS)
    finally:
        waiting.cancel()


def checked_factor(factor: float) -> float:
    """Return a partner's factor; raise `ProtocolError` where it is none. NaN is none."""
    if not 0.0 <= factor <= 1.0:
        raise ProtocolError(f"a factor of {factor}")
    return factor


def check_tokens(tokens: int) -> None:
    """Raise `ProtocolError` for a weight that no round has."""
    if not 0 < tokens <= MAX_TOKENS:
        raise ProtocolError(f"a round of {tokens} tokens")


async def _receive_pieces(stream: Stream, pieces: list[bytes], size: int, piece_bytes: int) -> None:
    """Receive a part; raise `ProtocolError` once it is not of its size. `pieces` has those of earlier calls."""
    missing = size - sum(map(len, pieces))
    while missing:
        piece = (await _receive_next(stream, "piece")).data
        if len(piece) != min(piece_bytes, missing):  # small ones, slowly, would hold this island for as long
            raise ProtocolError(f"a piece of {len(piece)} bytes, where {missing} of {size} are missing")
        missing -= len(piece)
        pieces.append(piece)


async def send(stream: Any, frame: Any) -> None:
    """Send a frame; raise `ConnectionLost` where the peer takes nothing."""
    try:
        async with asyncio.timeout(SILENT_SECONDS):
            await stream.send(frame)
    except TimeoutError:
        raise ConnectionLost(f"takes nothing for {SILENT_SECONDS:g} s") from None


async def _receive(stream: Stream) -> pb.Frame:
    try:
        async with asyncio.timeout(SILENT_SECONDS):
            return await stream.receive()
    except TimeoutError:
        raise ConnectionLost(f"no answer in {SILENT_SECONDS:g} s") from None


async def _receive_next(stream: Stream, kind: str) -> Any:
    """Return the content of the next frame but for signs of life; raise `ProtocolError` where it is of another kind."""
    while (frame := await _receive(stream)).WhichOneof("kind") == "not_yet":
        pass
    return getattr(_expect(frame, kind), kind)


def _expect(frame: pb.Frame, kind: str) -> pb.Frame:
    if frame.WhichOneof("kind") != kind:
        raise ProtocolError(f"{frame.WhichOneof('kind')} in the place of {kind}")
    return frame
