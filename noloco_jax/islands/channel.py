"""Channel of one call between two islands, in which both send frames to each other at the same time."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import flight

from noloco_jax.islands.frames import Expects, Frame, drain, read_frame, write_frame
from noloco_jax.islands.peer_errors import (
    BrokenError,
    BusyError,
    DamagedError,
    EndedError,
    LateError,
    PeerError,
    RefusedError,
)

_GRACE_SECONDS = 5.0  # for the peer to report an error, or to read ours
_LEAST_SECONDS = 0.05  # for a goodbye

# The errors that one island tells another, by name.
_TOLD: dict[str, type[PeerError]] = {kind.__name__: kind for kind in (RefusedError, BusyError, BrokenError)}
_TOLD[DamagedError.__name__] = BrokenError  # the data that the other side has read were fine


class Channel:
    """One call's two streams of frames.

    A thread of its own reads one frame ahead: if both sides wrote everything before reading, both would wait for ever
    once the buffers between them are full. One thread may send and receive, any may `cancel`.

    Attributes:
      peer: the other island's name.
      deadline: end of the whole call, in seconds of `time.monotonic()`.
      is_corrupt: True once the peer has sent damaged data, or arrays that do not belong here.
    """

    def __init__(
        self,
        peer: str,
        reader: Any,
        writer: Any,
        expects: Expects,
        deadline: float,
        cancel: Callable[[], None],
        why_unreachable: Callable[[], PeerError] | None = None,
    ):
        """Start to read.

        Args:
          peer: the other island.
          reader: reader of the call's Flight stream.
          writer: writer of the call's Flight stream, begun.
          expects: maps a header to the specs of its arrays.
          deadline: end of the whole call, in seconds of `time.monotonic()`.
          cancel: ends the call at once.
          why_unreachable: finds out why no connection came about, for the side that made the call.
        """
        self.peer = peer
        self.deadline = deadline
        self._reader = reader
        self._writer = writer
        self._expects = expects
        self._cancel = cancel
        self._why_unreachable = why_unreachable
        self.is_corrupt = False
        self._heard = False
        self._failed = False
        self._closed = self._over = False
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"from-{peer}")
        self._next: Future[Frame] = self._thread.submit(self._read)

    def send(self, header: Mapping[str, Any], arrays: Sequence[np.ndarray] | None = None) -> None:
        """Send a frame; return once it is written, which waits for the peer to read.

        Raises:
          PeerError: if the call has ended, by the other side, the network or the deadline.
          ValueError: for a header above 64 KiB or arrays that are not of plain numbers.
        """
        try:
            write_frame(self._writer, "frame", header, arrays)
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            with contextlib.suppress(TimeoutError):
                self._next.result(_GRACE_SECONDS)  # the peer's last words explain more than this error
            raise from_flight(self.peer, error) from None

    def receive(self) -> Frame:
        """Return the next frame, whole and checked, by the call's deadline.

        Raises:
          PeerError: a kind for each way in which no frame comes; see `peer_errors`.
        """
        left = max(self.deadline - time.monotonic(), 0.0)
        try:
            frame = self._next.result(left)
        except TimeoutError:
            raise LateError(f"{self.peer} sent nothing whole within {left:.3g} s") from None
        except PeerError:
            self._failed = True
            raise
        self._next = self._thread.submit(self._read)
        return frame

    def when_ready(self, call: Callable[[], None]) -> None:
        """Call `call` once `receive` would not wait: now, or in the thread that reads."""
        self._next.add_done_callback(lambda _: call())

    def cancel(self) -> None:
        """End the call at once, on both sides; after its end nothing, as its connection may carry the next call."""
        with self._lock:
            if not self._over:
                self._cancel()

    def close(self, error: BaseException | None = None) -> None:
        """Say goodbye, and wait for the peer's goodbye until the deadline, so that nothing sent is lost.

        Args:
          error: the reason, None if all went well. The peer is sent it and gets some seconds to read it; after a
            timeout, or when this process is to stop, the call ends at once.

        Raises `RefusedError` if all went well here, and the peer reports at last that it did not there.
        """
        if self._closed:
            return
        self._closed = True
        patience = max(self.deadline - time.monotonic(), 0.0)
        if error is not None:
            hopeless = isinstance(error, LateError) or not isinstance(error, Exception)
            patience = 0.0 if hopeless else min(patience, _GRACE_SECONDS)
        overdue = threading.Timer(patience, self.cancel)
        overdue.daemon = True
        overdue.start()
        # A writer that is done just when its reader fails, as it does at the deadline, makes gRPC abort the process.
        if patience > _LEAST_SECONDS:
            goodbye = ("end", {}) if error is None else ("error", describe(error))
            with contextlib.suppress(Exception):  # whatever has happened to the call, it is over
                write_frame(self._writer, *goodbye)
            with contextlib.suppress(Exception):
                self._writer.done_writing()  # exists on the caller's side only
        # The reading thread must end first: Flight frees the stream as soon as the call is over.
        self._thread.submit(self._read_rest)
        self._thread.shutdown(wait=True)
        with self._lock:
            self._over = True
        overdue.cancel()
        with contextlib.suppress(Exception):
            self._writer.close()
        if error is None and not self._failed and isinstance(refusal := self._next.exception(), RefusedError):
            raise refusal

    def _read(self) -> Frame:
        """Read the peer's next frame, in the reading thread."""
        try:
            read = read_frame(self._reader, self._expects)
        except flight.FlightUnavailableError as error:
            if self._why_unreachable is None or self._heard:
                raise from_flight(self.peer, error) from None
            raise self._why_unreachable() from None
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            raise from_flight(self.peer, error) from None
        except PeerError as error:
            self.is_corrupt = isinstance(error, DamagedError | RefusedError)
            raise type(error)(f"{self.peer}: {error}") from None
        self._heard = True
        if read is None:
            raise BrokenError(f"{self.peer} went away in the middle of the call")
        kind, frame = read
        if kind == "frame":
            return frame
        if kind == "end":
            raise EndedError(f"{self.peer} ended the call, and more was expected")
        raise told(self.peer, frame.header)

    def _read_rest(self) -> None:
        with contextlib.suppress(Exception):
            drain(self._reader)


def describe(error: BaseException) -> dict[str, str]:
    """Describe an error for the peer."""
    if type(error).__name__ in _TOLD:
        return {"error": type(error).__name__, "line": str(error)}
    return {"error": BrokenError.__name__, "line": "it failed: see its log"}


def told(peer: str, description: Mapping[str, Any]) -> PeerError:
    """Return the error that the peer described."""
    line = "".join(c for c in str(description.get("line", "")) if c.isprintable())
    return _TOLD.get(str(description.get("error")), BrokenError)(f"{peer} says: {line[:300]}")


def from_flight(peer: str, error: Exception) -> PeerError:
    """Convert an error of Arrow Flight in a call with `peer` to a `PeerError`."""
    if described := getattr(error, "extra_info", None):
        with contextlib.suppress(ValueError, AttributeError):  # the error of another program
            return told(peer, json.loads(described))
    if isinstance(error, flight.FlightTimedOutError):
        return LateError(f"{peer}: the call's deadline passed before all was there")
    if isinstance(error, flight.FlightCancelledError):
        return BrokenError(f"{peer}: the call was cancelled")
    if isinstance(error, flight.FlightUnavailableError):
        return BrokenError(f"{peer} went away in the middle of the call")
    return BrokenError(f"{peer}: the call failed ({str(error).splitlines()[0][:160]})")


MAX_OPENING_BYTES = 64 << 10
MAX_ACTION_BYTES = 1 << 20
MAX_SECONDS = 86400.0


class Opening(NamedTuple):
    """Opening of a call: who calls whom, for what.

    Attributes:
      call: "exchange", "state", or the name of an action.
      caller: the calling island; its certificate must bear the same name.
      callee: the island that it means to call.
      seconds: the limit of the whole call.
      body: an exchange's hello, a request for state, or an action's argument.
    """

    call: str
    caller: str
    callee: str
    seconds: float
    body: dict[str, Any]


def encode(opening: Opening) -> bytes:
    """Encode an opening as JSON."""
    return json.dumps(opening._asdict(), allow_nan=False).encode()


def decode(content: bytes | None, limit: int = MAX_OPENING_BYTES) -> Opening:
    """Decode an opening.

    Raises `RefusedError` for anything else, and for more than `limit` bytes.
    """
    if content is None or len(content) > limit:
        raise RefusedError(f"a call's opening is JSON of up to {limit} bytes")
    try:
        fields = json.loads(content)
        opening = Opening(**fields)
        seconds = float(opening.seconds)
        right = isinstance(opening.body, dict) and 0 < seconds <= MAX_SECONDS
        right = right and all(isinstance(x, str) for x in (opening.call, opening.caller, opening.callee))
    except (ValueError, TypeError, RecursionError):
        right = False
    if not right:
        raise RefusedError(
            "a call opens with name, caller, callee, seconds and body: it is of another version or program"
        )
    return opening
