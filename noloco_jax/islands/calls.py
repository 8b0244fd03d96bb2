"""Calls under way between an island and its peers, in both directions, each in a thread of its own."""

import itertools
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from noloco_jax.islands.channel import Channel
from noloco_jax.islands.client import Client
from noloco_jax.islands.frames import ArraySpec, Expects, Frame
from noloco_jax.islands.payload import Arrays
from noloco_jax.islands.peer_errors import EndedError, PeerError, RefusedError
from noloco_jax.islands.protocol.events import Arrived, Broken, Content, Open, Opened
from noloco_jax.islands.protocol.messages import (
    Answer,
    ExchangeId,
    Header,
    HeaderError,
    Hello,
    Leave,
    Message,
    Opener,
    OtherProtocolError,
    Share,
    State,
    StateRequest,
    StatusRequest,
    Windows,
    Wrong,
    from_json,
    to_json,
)

Specs = Callable[[int], Mapping[str, Sequence[ArraySpec]]]
ShareSpecs = Callable[[Share], Sequence[ArraySpec]]
_CALL_SECONDS = 3600.0  # the protocol ends calls long before
_LAST_WORDS_SECONDS = 10.0  # for the peer to read everything sent before the end

# Items of a call's queue beside headers to send: read an arrived frame, or end.
_LOOK, _END = object(), object()


class Call:
    """One call: carries headers and arrays both ways through a channel, in the thread that calls `run`.

    Args:
      key: the channel's name in the protocol.
      arrived: called with every frame.

    Attributes:
      ended_here: True once this side was told to end it.
      is_corrupt: True once the peer has sent damaged data, or what does not belong to this call.
    """

    def __init__(self, key: Any, arrived: Callable[["Call", Frame], None]):
        self.key = key
        self.ended_here = False
        self.is_corrupt = False
        self._arrived = arrived
        self._todo: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._channel: Channel | None = None
        self._cancelled = False

    def send(
        self, header: Answer, arrays: Sequence[np.ndarray] | Callable[[], Sequence[np.ndarray]] | None = None
    ) -> None:
        """Queue a header, and arrays to send behind it or a function that makes them when its turn comes."""
        self._todo.put((header, arrays))

    def end(self) -> None:
        """End the call after everything queued is sent; by force if the peer does not read it in time."""
        self.ended_here = True
        self._todo.put(_END)
        overdue = threading.Timer(_LAST_WORDS_SECONDS, self.cancel)
        overdue.daemon = True
        overdue.start()

    def cancel(self) -> None:
        """End the call at once."""
        self._cancelled = True
        if self._channel is not None:
            self._channel.cancel()
        self._todo.put(_END)

    def run(self, channel: Channel) -> None:
        """Carry the call to its end.

        Raises `PeerError` if the peer or the network ends it first.
        """
        self._channel = channel
        if self._cancelled:
            channel.cancel()
        channel.when_ready(self._look)
        while (item := self._todo.get()) is not _END:
            if item is _LOOK:
                try:
                    frame = channel.receive()
                    channel.when_ready(self._look)
                    self._arrived(self, frame)
                except RefusedError:
                    self.is_corrupt = True
                    raise
                finally:
                    self.is_corrupt |= channel.is_corrupt
            else:
                header, arrays = item
                made: Any = arrays() if callable(arrays) else arrays
                channel.send(to_json(header), made)

    def _look(self) -> None:
        self._todo.put(_LOOK)


@dataclass(frozen=True)
class Listener:
    """Callbacks of calls, called by their threads.

    Attributes:
      happened: called under the lock with an event and the arrays that came with it.
      ended: called under the lock with the channel of a call that is over.
      read: maps a header and its arrays to the protocol's `Content` and the arrays to keep.
      report: called with lines for people.
    """

    happened: Callable[[Opened | Arrived | Broken, Arrays | None], None]
    ended: Callable[[Any], None]
    read: Callable[[Header, Arrays], tuple[Content, Arrays]]
    report: Callable[[str], None]


class Calls:
    """Calls of an island, by the channel names of its protocol.

    Args:
      clients: a client for each peer.
      specs: round of an exchange -> kind of header -> specs of the arrays behind it.
      share_specs: share of a state -> specs of its arrays.
      answer_seconds: the limit of calls with one request and one answer.
      lock: held while the listener is called, and while calls begin, send and end.
      listener: the callbacks.
    """

    def __init__(
        self,
        clients: Mapping[str, Client],
        specs: Specs,
        share_specs: ShareSpecs,
        answer_seconds: float,
        lock: threading.Condition,
        listener: Listener,
    ):
        self._clients, self._answer_seconds = clients, answer_seconds
        self._specs, self._share_specs = specs, share_specs
        self._lock, self._listener = lock, listener
        self._under_way: dict[Any, Call] = {}
        self._numbers = itertools.count()
        self._refusals: dict[str, str] = {}  # peer -> the refusal reported last, until a call of it succeeds

    def dial(self, action: Open) -> None:
        """Dial a peer, in a thread of its own."""
        call = self._under_way[action.channel] = Call(action.channel, self._arrived)
        arguments = (call, action.peer, action.header)
        threading.Thread(target=self._run, args=arguments, daemon=True, name=f"to-{action.peer}").start()

    def send(self, channel: Any, header: Answer, arrays: Arrays | Callable[[], Arrays] | None) -> None:
        """Send through a call, if it still exists; `arrays` may be a function, called in the call's thread."""
        if (call := self._under_way.get(channel)) is not None:
            call.send(header, arrays)

    def end(self, channel: Any) -> None:
        """End a call after everything queued is sent."""
        if (call := self._under_way.get(channel)) is not None:
            call.end()

    def hang_up(self, seconds: float) -> None:
        """Wait up to `seconds` for calls to end, and cancel the rest."""
        deadline = time.monotonic() + seconds
        while self._under_way and time.monotonic() < deadline:
            time.sleep(0.02)
        for call in list(self._under_way.values()):
            call.cancel()

    def called(self, caller: str, hello: Mapping[str, Any], connect: Callable[[Expects], Channel]) -> None:
        """Serve a peer's call to its end, in the thread of the call."""
        try:
            header = from_json(dict(hello))
        except OtherProtocolError as error:  # told as other differences are, so that the caller does not go on dialling
            self._listener.report(f"{caller} was refused: {error}")
            connect(lambda _: None).send(to_json(Wrong(str(error))))
            return
        except HeaderError as error:
            raise RefusedError(str(error)) from None
        if not isinstance(header, Hello | StatusRequest | StateRequest | Leave):
            raise RefusedError(f"a call does not begin with {type(header).__name__}")
        key = ("in", next(self._numbers))
        call = Call(key, self._arrived)
        channel = connect(_Expected(self._specs, self._share_specs, header, dialled_here=False))
        with self._lock:
            self._under_way[key] = call
            self._listener.happened(Opened(key, caller, header), None)
        try:
            call.run(channel)
        except EndedError:
            pass  # the caller has its answer
        except PeerError:
            if not call.ended_here:
                raise
        finally:
            self._over(call)

    def _run(self, call: Call, peer: str, header: Opener) -> None:
        is_long = isinstance(header, Hello | StateRequest) or (isinstance(header, StatusRequest) and header.until_ready)
        seconds = _CALL_SECONDS if is_long else self._answer_seconds
        try:
            expects = _Expected(self._specs, self._share_specs, header, dialled_here=True)
            with self._clients[peer].exchange(to_json(header), expects, seconds) as channel:
                call.run(channel)
            self._refusals.pop(peer, None)
        except PeerError as error:
            # A fault of keys refuses every call, about one a second: its line is for people once.
            if isinstance(error, RefusedError) and self._refusals.get(peer) != str(error):
                self._refusals[peer] = str(error)
                self._listener.report(str(error))
        finally:
            self._over(call)

    def _over(self, call: Call) -> None:
        with self._lock:
            self._under_way.pop(call.key, None)
            self._listener.ended(call.key)
            if not call.ended_here:
                self._listener.happened(Broken(call.key, call.is_corrupt), None)

    def _arrived(self, call: Call, frame: Frame) -> None:
        try:
            header = from_json(frame.header)
        except HeaderError as error:
            raise RefusedError(str(error)) from None
        content, arrays = (None, None) if frame.arrays is None else self._listener.read(header, frame.arrays)
        with self._lock:
            if not call.ended_here:
                self._listener.happened(Arrived(call.key, header, content), arrays)


class _Expected:
    """Arrays that may still come through a call, once: a message of the exchange, or the share, that it is opened for.

    Args:
      specs, share_specs: see `Calls`.
      opener: the call's first header.
      dialled_here: True if this side sent it.
    """

    def __init__(self, specs: Specs, share_specs: ShareSpecs, opener: Opener, *, dialled_here: bool):
        self._xid: ExchangeId | None = opener.xid if isinstance(opener, Hello) else None
        self._specs = dict(specs(0 if self._xid is None else self._xid.round))
        self._specs[State.__name__] = ()  # arrays behind a state are expected, and none unless they are asked for
        self._left: set[str] = set()
        if isinstance(opener, Hello):
            self._left = {Windows.__name__, Message.__name__}
        elif isinstance(opener, StateRequest) and opener.share is not None and dialled_here:
            self._left = {State.__name__}
            self._specs[State.__name__] = share_specs(opener.share)

    def __call__(self, header: Mapping[str, Any]) -> Sequence[ArraySpec] | None:
        """Return the specs of the arrays behind a header; raise `RefusedError` before any of them is read."""
        kind = str(header.get("kind"))
        if kind not in self._specs:
            return None
        if kind not in self._left:
            raise RefusedError(f"it sends a {kind} that does not belong to this call, or a second one")
        if self._xid is not None and header.get("xid") != list(self._xid):
            raise RefusedError(f"it sends a {kind} of another exchange: {str(header.get('xid'))[:80]}")
        self._left.remove(kind)
        return self._specs[kind]
