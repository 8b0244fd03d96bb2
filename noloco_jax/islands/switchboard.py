"""Calls under way between an island and the others, in and out: each in a thread, told to one listener."""

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from noloco_jax.islands.channel import Channel
from noloco_jax.islands.client import Client
from noloco_jax.islands.conversation import Conversation
from noloco_jax.islands.frames import ArraySpec, Expects, Frame
from noloco_jax.islands.payload import Arrays
from noloco_jax.islands.peer_errors import EndedError, PeerError, RefusedError
from noloco_jax.islands.protocol.events import Arrived, Broken, Content, Open, Opened
from noloco_jax.islands.protocol.messages import (
    Answer,
    Header,
    HeaderError,
    Hello,
    Leave,
    Opener,
    StateRequest,
    StatusRequest,
    from_json,
    to_json,
)

_CALL_SECONDS = 3600.0  # the protocol ends calls long before


@dataclass(frozen=True)
class Listener:
    """Who is told of calls, by their threads.

    Attributes:
      happened: what it is, and the arrays that came with it; under the lock.
      ended: a call's name, when nothing more can come of it; under the lock.
      read: from a header and its arrays to what the protocol is to know of them, and what is kept of them.
      report: lines for people.
    """

    happened: Callable[[Opened | Arrived | Broken, Arrays | None], None]
    ended: Callable[[Any], None]
    read: Callable[[Header, Arrays], tuple[Content, Arrays]]
    report: Callable[[str], None]


class Switchboard:
    """Calls by the names that the protocol has for them.

    Args:
      clients: for calls to each of the others.
      specs: the arrays that may come behind a header, by its kind.
      answer_seconds: for calls of a question and an answer.
      lock: under which the listener is told, and calls are begun, sent through and ended.
      listener: is told.
    """

    def __init__(
        self,
        clients: Mapping[str, Client],
        specs: Mapping[str, Sequence[ArraySpec]],
        answer_seconds: float,
        lock: threading.Condition,
        listener: Listener,
    ):
        self._clients, self._specs, self._answer_seconds = clients, specs, answer_seconds
        self._lock, self._listener = lock, listener
        self._conversations: dict[Any, Conversation] = {}
        self._numbers = itertools.count()

    def dial(self, action: Open) -> None:
        """Calls another island."""
        conversation = self._conversations[action.channel] = Conversation(action.channel, self._arrived)
        arguments = (conversation, action.peer, action.header)
        threading.Thread(target=self._run, args=arguments, daemon=True, name=f"to-{action.peer}").start()

    def send(self, channel: Any, header: Answer, arrays: Arrays | Callable[[], Arrays] | None) -> None:
        """Sends through a call, if it is still there; arrays may be made by its thread."""
        if (conversation := self._conversations.get(channel)) is not None:
            conversation.send(header, arrays)

    def end(self, channel: Any) -> None:
        """Ends a call behind what was sent."""
        if (conversation := self._conversations.get(channel)) is not None:
            conversation.end()

    def hang_up(self, seconds: float) -> None:
        """Waits that long for calls to end, and ends those that are left."""
        deadline = time.monotonic() + seconds
        while self._conversations and time.monotonic() < deadline:
            time.sleep(0.02)
        for conversation in list(self._conversations.values()):
            conversation.cancel()

    def called(self, caller: str, hello: Mapping[str, Any], connect: Callable[[Expects], Channel]) -> None:
        """Another island calls: until the end of it, in the thread of the call."""
        try:
            header = from_json(dict(hello))
        except HeaderError as error:
            raise RefusedError(str(error)) from None
        if not isinstance(header, Hello | StatusRequest | StateRequest | Leave):
            raise RefusedError(f"a call does not begin with {type(header).__name__}")
        key = ("in", next(self._numbers))
        conversation = Conversation(key, self._arrived)
        channel = connect(self._expects)
        with self._lock:
            self._conversations[key] = conversation
            self._listener.happened(Opened(key, caller, header), None)
        try:
            conversation.run(channel)
        except EndedError:
            pass  # the caller has what it called for
        except PeerError:
            if not conversation.ended_here:
                raise
        finally:
            self._over(conversation)

    def _run(self, conversation: Conversation, peer: str, header: Opener) -> None:
        is_long = isinstance(header, Hello | StateRequest) or (isinstance(header, StatusRequest) and header.until_ready)
        seconds = _CALL_SECONDS if is_long else self._answer_seconds
        try:
            with self._clients[peer].exchange(to_json(header), self._expects, seconds) as channel:
                conversation.run(channel)
        except PeerError as error:
            if isinstance(error, RefusedError):
                self._listener.report(str(error))
        finally:
            self._over(conversation)

    def _over(self, conversation: Conversation) -> None:
        with self._lock:
            self._conversations.pop(conversation.key, None)
            self._listener.ended(conversation.key)
            if not conversation.ended_here:
                self._listener.happened(Broken(conversation.key), None)

    def _expects(self, header: Mapping[str, Any]) -> Sequence[ArraySpec] | None:
        return self._specs.get(str(header.get("kind")))

    def _arrived(self, conversation: Conversation, frame: Frame) -> None:
        try:
            header = from_json(frame.header)
        except HeaderError as error:
            raise RefusedError(str(error)) from None
        content, arrays = (None, None) if frame.arrays is None else self._listener.read(header, frame.arrays)
        with self._lock:
            if not conversation.ended_here:
                self._listener.happened(Arrived(conversation.key, header, content), arrays)
