"""Relay between two islands that can only dial out: any member that can be dialled passes their bytes on.

The called island keeps a call open at some relays, by which they tell it of callers. A caller asks a relay for the
island by name; that opens a second call, and the relay pumps bytes between both. What they carry is a TCP connection
between the caller's Flight client and the called island's Flight server, so that TLS is between these two: the relay
holds neither's keys and can read or change nothing.

    caller's client ─ RelayedPort ─ call "relay" ─▶ Relay ◀─ call "accept" ─ RelayedServer ─ server of the called island
"""

import contextlib
import json
import queue
import secrets
import socket
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import pyarrow as pa
from pyarrow import flight

from noloco_jax.islands.client import Client
from noloco_jax.islands.peer_errors import BusyError, PeerError, RefusedError
from noloco_jax.islands.roster import Address

RELAY, AWAIT, ACCEPT = CALLS = ("relay", "await", "accept")
MOST_TUNNELS, MOST_OF_A_MEMBER = 16, 8  # through one relay at once; from or to one member
MOST_AWAITING = 64  # islands that wait for callers at one relay, which costs it a thread each
MOST_BYTES = 16 << 30  # of a tunnel, each way
TUNNEL_SECONDS = 3600.0
RELAYS = 2  # at which an island waits for callers
_TRIED = 4  # relays that a caller tries
_PIECE_BYTES = 64 << 10
_ANSWER_SECONDS = 10.0  # for the called island to accept
_PING_SECONDS = 15.0  # routers forget silent connections after a minute or later
_AWAIT_SECONDS = 600.0  # of one call that waits for callers
_RETRY_SECONDS, _CLOSE_SECONDS = 1.0, 5.0
_PING, _READY = b".", b"ready"  # an empty message would end its stream
_ERRORS = (flight.FlightError, pa.ArrowException, OSError, PeerError, StopIteration)


class Pipe(Protocol):
    """One end of a tunnel. `read` returns nothing at its end; one thread reads, one writes, any closes."""

    def read(self) -> bytes: ...

    def write(self, piece: bytes) -> None: ...

    def close(self) -> None: ...


T = TypeVar("T", bound=Pipe)


class CallPipe:
    """Bytes through a call's streams, in messages of metadata.

    Args:
      reader: reader of the call's Flight stream.
      writer: writer of the call's Flight stream, begun.
      cancel: ends the call at once.
    """

    def __init__(self, reader: Any, writer: Any, cancel: Callable[[], None]):
        self._reader, self._writer, self._cancel = reader, writer, cancel

    def read(self) -> bytes:
        message = self._reader.read_chunk()
        if message.data is not None or message.app_metadata is None or message.app_metadata.size > _PIECE_BYTES:
            raise RefusedError("a tunnel carries pieces of bytes alone")
        return message.app_metadata.to_pybytes()

    def write(self, piece: bytes) -> None:
        self._writer.write_metadata(piece)

    def close(self) -> None:
        self._cancel()


class SocketPipe:
    """Bytes through a connection of this machine."""

    def __init__(self, connection: socket.socket):
        self._connection = connection

    def read(self) -> bytes:
        return self._connection.recv(_PIECE_BYTES)

    def write(self, piece: bytes) -> None:
        self._connection.sendall(piece)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)


def pump(source: Pipe, sink: Pipe) -> None:
    """Pass bytes on until either end closes, then close both."""
    left = MOST_BYTES
    try:
        while left > 0 and (piece := source.read()):
            sink.write(piece)
            left -= len(piece)
    except _ERRORS:
        pass  # however a connection ends, the tunnel ends with it
    finally:
        sink.close()
        source.close()


def join(one: Pipe, other: Pipe) -> None:
    """Pass bytes on both ways until an end closes."""
    back = threading.Thread(target=pump, args=(other, one), daemon=True)
    back.start()
    pump(one, other)
    back.join()


def relays_of(name: str, members: Iterable[str]) -> list[str]:
    """Return the members that can be dialled in the order in which an island, and those who call it, try them."""
    return sorted(members, key=lambda member: zlib.crc32(f"{name} {member}".encode()))


@dataclass
class _Tunnel:
    """Tunnel that the called island has not accepted yet, or that is open."""

    caller: str
    called: str
    pipe: Pipe
    other: Pipe | None = None
    is_taken: bool = False  # the called island's end is there, or about to be
    is_over: bool = False  # the caller's end is gone
    is_open: threading.Event = field(default_factory=threading.Event)
    # A stream is freed when its call ends: both calls wait until nobody writes to the other's any more.
    caller_is_over: threading.Event = field(default_factory=threading.Event)
    called_is_over: threading.Event = field(default_factory=threading.Event)


class Relay:
    """Relay's side: who waits for callers, and the tunnels, within limits of number, bytes and time."""

    def __init__(self):
        self._awaiting: dict[str, queue.SimpleQueue[bytes | None]] = {}
        self._tunnels: dict[str, _Tunnel] = {}  # token -> not accepted yet
        self._running: Counter[str] = Counter()  # tunnels of each member
        self._open = 0
        self._lock = threading.Lock()

    def call(self, kind: str, caller: str, body: Mapping[str, Any], pipe: CallPipe) -> None:
        """Handle a member's call to its end, in the thread of the call. Raises `PeerError`."""
        if kind == RELAY:
            pipe.write(_PING)  # its streams are there before the called island is asked
            with self.tunnel(caller, str(body.get("to"))[:80], pipe) as other:
                pipe.write(_READY)
                pump(pipe, other)
        elif kind == ACCEPT:
            self._accept(caller, str(body.get("token"))[:80], pipe)
        else:
            self._await(caller, pipe)

    @contextlib.contextmanager
    def tunnel(self, caller: str, called: str, pipe: Pipe) -> Iterator[Pipe]:
        """Ask a waiting island for its end of a tunnel, and yield that; what comes from it is written to `pipe`.

        Raises `BusyError` where the island does not wait here, does not answer, or there are too many tunnels.
        """
        token = secrets.token_hex(16)
        tunnel = _Tunnel(caller, called, pipe)
        with self._lock:
            if (waiting := self._awaiting.get(called)) is None:
                raise BusyError(f"{called} does not wait for callers here")
            most = max(self._running[caller], self._running[called])
            if self._open >= MOST_TUNNELS or most >= MOST_OF_A_MEMBER:
                raise BusyError(f"{self._open} connections are relayed here already")
            self._open += 1
            self._running.update((caller, called))
            self._tunnels[token] = tunnel
        try:
            waiting.put(json.dumps({"token": token}).encode())
            if not tunnel.is_open.wait(_ANSWER_SECONDS):
                raise BusyError(f"{called} does not answer")
            assert tunnel.other is not None
            yield tunnel.other
        finally:
            with self._lock:
                self._tunnels.pop(token, None)
                self._open -= 1
                self._running.subtract((caller, called))
                tunnel.is_over, other = True, tunnel.other
            pipe.close()
            if other is not None:
                other.close()
            tunnel.caller_is_over.set()
            if tunnel.is_taken:
                tunnel.called_is_over.wait()

    @property
    def is_in_use(self) -> bool:
        """True while an island waits for callers here."""
        return bool(self._awaiting)

    def close(self) -> None:
        """End the calls that wait for callers."""
        with self._lock:
            for waiting in self._awaiting.values():
                waiting.put(None)

    def _await(self, caller: str, pipe: CallPipe) -> None:
        own: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        with self._lock:
            if caller not in self._awaiting and len(self._awaiting) >= MOST_AWAITING:
                raise BusyError(f"{MOST_AWAITING} islands wait for callers here already")
            if (former := self._awaiting.get(caller)) is not None:
                former.put(None)
            self._awaiting[caller] = own
        try:
            pipe.write(_PING)
            while True:
                try:
                    told = own.get(timeout=_PING_SECONDS)
                except queue.Empty:
                    told = _PING
                if told is None:
                    return
                pipe.write(told)
        finally:
            with self._lock:
                if self._awaiting.get(caller) is own:
                    del self._awaiting[caller]

    def _accept(self, caller: str, token: str, pipe: CallPipe) -> None:
        with self._lock:
            tunnel = self._tunnels.get(token)
            if tunnel is None or tunnel.called != caller:
                raise RefusedError("nobody waits for this end of a tunnel any more")
            del self._tunnels[token]
            tunnel.is_taken = True
        try:
            pipe.write(_PING)
            with self._lock:
                if tunnel.is_over:
                    return
                tunnel.other = pipe
            tunnel.is_open.set()
            pump(pipe, tunnel.pipe)
        finally:
            tunnel.called_is_over.set()
            tunnel.caller_is_over.wait()


class _Tunnels:
    """Threads of an island's tunnels, and their calls, which all end with it."""

    def __init__(self):
        self._pipes: set[Pipe] = set()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self.closing = threading.Event()

    def start(self, act: Callable[..., None], *arguments: Any) -> bool:
        """Run a function in a thread, in which an error of a connection is an end like any other.

        Returns False where all have been ended, and the function is not called.
        """

        def run() -> None:
            with contextlib.suppress(*_ERRORS):
                act(*arguments)

        thread = threading.Thread(target=run, daemon=True, name="tunnel")
        with self._lock:
            if self.closing.is_set():
                return False
            self._threads = [other for other in self._threads if other.is_alive()] + [thread]
            thread.start()
        return True

    @contextlib.contextmanager
    def held(self, pipe: T) -> Iterator[T]:
        """End a pipe with the others."""
        with self._lock:
            self._pipes.add(pipe)
        if self.closing.is_set():
            pipe.close()
        try:
            yield pipe
        finally:
            with self._lock:
                self._pipes.discard(pipe)

    def close(self) -> None:
        """End all, and wait for the threads, as an interpreter that ends breaks calls under way."""
        with self._lock:
            self.closing.set()
            pipes = list(self._pipes)
        for pipe in pipes:
            pipe.close()
        for thread in self._threads:
            thread.join(_CLOSE_SECONDS)


class RelayedServer:
    """Called island's side: calls kept open at some relays, and the tunnels that callers ask for.

    Args:
      name: this island.
      clients: name -> client of a member.
      relays: returns the members that can be dialled.
      server: where this island's server listens.
    """

    def __init__(self, name: str, clients: Mapping[str, Client], relays: Callable[[], Iterable[str]], server: Address):
        self._name, self._clients, self._relays, self._server = name, clients, relays, server
        self._at: set[str] = set()  # relays where it waits
        self._lock = threading.Lock()
        self._accepting = threading.BoundedSemaphore(MOST_TUNNELS)
        self._tunnels = _Tunnels()
        for _ in range(RELAYS):
            self._tunnels.start(self._wait)

    def close(self) -> None:
        self._tunnels.close()

    def _wait(self) -> None:
        while not self._tunnels.closing.is_set():
            for relay in relays_of(self._name, self._relays()):
                with self._lock:
                    if relay in self._at:
                        continue
                    self._at.add(relay)
                has_waited = self._wait_at(relay)
                with self._lock:
                    self._at.discard(relay)
                if self._tunnels.closing.is_set():
                    return
                if has_waited:
                    break  # begin with the first again, as callers do
            self._tunnels.closing.wait(_RETRY_SECONDS)

    def _wait_at(self, relay: str) -> bool:
        """Wait for callers at a relay until the call ends; return False where it never began."""
        has_waited = False
        with contextlib.suppress(*_ERRORS, ValueError, AttributeError):  # the latter two: a word that is none
            call = self._clients[relay].tunnel(AWAIT, {}, _AWAIT_SECONDS)
            with call as streams, self._tunnels.held(CallPipe(*streams)) as pipe:
                while True:
                    told = pipe.read()
                    has_waited = True
                    if told != _PING:
                        self._tunnels.start(self._accept, relay, str(json.loads(told).get("token")))
        return has_waited

    def _accept(self, relay: str, token: str) -> None:
        if self._accepting.acquire(blocking=False):
            try:
                self._serve(relay, token)
            finally:
                self._accepting.release()

    def _serve(self, relay: str, token: str) -> None:
        call = self._clients[relay].tunnel(ACCEPT, {"token": token}, TUNNEL_SECONDS)
        with call as streams, self._tunnels.held(CallPipe(*streams)) as pipe:
            pipe.read()
            with socket.create_connection(self._server, timeout=_ANSWER_SECONDS) as server:
                server.settimeout(None)
                join(SocketPipe(server), pipe)


class RelayedPort:
    """Caller's side: a port of this machine behind which an island is that only dials out.

    Args:
      caller: this island.
      called: the island behind it.
      clients: name -> client of a member.
      relays: returns the members that can be dialled, but for this one.
      own: this island's own relay, asked first.
    """

    def __init__(
        self,
        caller: str,
        called: str,
        clients: Mapping[str, Client],
        relays: Callable[[], Iterable[str]],
        own: Relay,
    ):
        self._caller, self._called = caller, called
        self._clients, self._relays, self._own = clients, relays, own
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self._listener.getsockname()[1])
        self._tunnels = _Tunnels()
        self._tunnels.start(self._listen)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._tunnels.close()
        self._listener.close()

    def _listen(self) -> None:
        while not self._tunnels.closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed, or no file is free
                self._tunnels.closing.wait(_RETRY_SECONDS)
                continue
            if not self._tunnels.start(self._enter, connection):
                connection.close()

    def _enter(self, connection: socket.socket) -> None:
        with connection, self._tunnels.held(SocketPipe(connection)) as pipe:
            with contextlib.suppress(BusyError), self._own.tunnel(self._caller, self._called, pipe) as other:
                pump(pipe, other)
                return
            for relay in relays_of(self._called, self._relays())[:_TRIED]:
                with contextlib.suppress(*_ERRORS):
                    self._pass_on(relay, pipe)
                    return

    def _pass_on(self, relay: str, pipe: SocketPipe) -> None:
        """Pass a connection on through a relay; raise where that cannot reach the island."""
        call = self._clients[relay].tunnel(RELAY, {"to": self._called}, TUNNEL_SECONDS)
        with call as streams, self._tunnels.held(CallPipe(*streams)) as other:
            while (said := other.read()) == _PING:
                pass
            if said != _READY:
                raise RefusedError(f"{relay} is of another version")
            join(pipe, other)
