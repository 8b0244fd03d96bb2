"""A call under way, as the protocol sees it: headers to send are queued, and what comes is handed on."""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from noloco_jax.islands.channel import Channel
from noloco_jax.islands.frames import Frame
from noloco_jax.islands.protocol.messages import Answer, to_json

_LAST_WORDS_SECONDS = 10.0  # for what was sent before an end to be read

# What a conversation does next: send, look at what has come, or end.
_LOOK, _END = object(), object()


class Conversation:
    """Carries headers and arrays both ways through a channel, in the thread that calls `run`.

    Args:
      key: its name in the protocol.
      arrived: is given every frame.

    Attributes:
      ended_here: whether this side was told to end it.
    """

    def __init__(self, key: Any, arrived: Callable[["Conversation", Frame], None]):
        self.key = key
        self.ended_here = False
        self._arrived = arrived
        self._todo: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._channel: Channel | None = None
        self._cancelled = False

    def send(
        self, header: Answer, arrays: Sequence[np.ndarray] | Callable[[], Sequence[np.ndarray]] | None = None
    ) -> None:
        """Sends a header when those before it are sent, and the arrays behind it, or those that are made then."""
        self._todo.put((header, arrays))

    def end(self) -> None:
        """Ends the call after what was sent; by force where the other side does not read it."""
        self.ended_here = True
        self._todo.put(_END)
        overdue = threading.Timer(_LAST_WORDS_SECONDS, self.cancel)
        overdue.daemon = True
        overdue.start()

    def cancel(self) -> None:
        """Ends the call at once."""
        self._cancelled = True
        if self._channel is not None:
            self._channel.cancel()
        self._todo.put(_END)

    def run(self, channel: Channel) -> None:
        """Until the end; raises `PeerError` if the other side or the network ends it first."""
        self._channel = channel
        if self._cancelled:
            channel.cancel()
        channel.when_ready(self._look)
        while (item := self._todo.get()) is not _END:
            if item is _LOOK:
                frame = channel.receive()
                channel.when_ready(self._look)
                self._arrived(self, frame)
            else:
                header, arrays = item
                made: Any = arrays() if callable(arrays) else arrays
                channel.send(to_json(header), made)

    def _look(self) -> None:
        self._todo.put(_LOOK)
