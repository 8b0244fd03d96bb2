"""Doorkeeper of an island's port: ends connections that never become calls, before they take all files or memory.

Flight tells nobody of a connection before its first call has come whole, gives no way to limit one, and takes messages
of any size. So a thread looks at the process's sockets: connections without a call end after some seconds, when there
are too many of them, or when they have sent more than any opening has; and those with a call when they have sent more
than a message may have, and nothing could be read.
"""

import contextlib
import os
import resource
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from urllib.parse import unquote

from noloco_jax.islands.frames import PIECE_BYTES

_EVERY_SECONDS, _AT_REST = 0.02, 10  # interval of counting files; of looking at each without a call, in intervals
_HANDSHAKE_SECONDS = 10.0  # of TLS and the opening of the first call
_MOST_STRANGERS = 256
_MOST_BYTES = 4 << 20  # of an opening, at most 1 MiB, with whatever TLS adds
_MOST_UNREAD = (
    8 * PIECE_BYTES
)  # of a call, since its last message was read; honest ones had up to 40 MiB on a busy machine
_BYTES_RECEIVED = struct.Struct("=128xQ")  # of Linux's struct tcp_info: tcpi_bytes_received


def raise_open_files() -> int:
    """Raise the limit of open files as far as this process may, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class Doorkeeper:
    """Thread that ends strangers' connections to one port, until `close`.

    Args:
      port: the island's port.
      calling: returns the connections with a call under way, as gRPC writes their addresses, and the number of
        messages that were read of each.
    """

    def __init__(self, port: int, calling: Callable[[], Mapping[str, int]]):
        self._port, self._calling = port, calling
        self._most = min(_MOST_STRANGERS, raise_open_files() // 4)
        self._seen: dict[str, tuple[float, int]] = {}  # without a call: connection -> since when, bytes before
        self._known: set[str] = set()  # connections that have had a call
        self._read: dict[str, tuple[int, int]] = {}  # with a call: connection -> messages read, bytes before the next
        self._closing = threading.Event()
        if os.path.isdir("/dev/fd"):
            threading.Thread(target=self._watch, daemon=True, name="doorkeeper").start()

    def close(self) -> None:
        self._closing.set()

    def _watch(self) -> None:
        before, rest = 0, 0
        while not self._closing.is_set():
            time.sleep(_EVERY_SECONDS)  # half the CPU time of a wait for the event
            with contextlib.suppress(OSError):
                count, rest = number_of_descriptors(), (rest + 1) % _AT_REST
                if count > before + 16 or rest == 0 or self._calling():  # a call fills memory at the link's speed
                    before = count
                    self._sweep(time.monotonic())

    def _sweep(self, now: float) -> None:
        calling = {unquote(connection): count for connection, count in self._calling().items()}
        self._known |= calling.keys()
        read: dict[str, tuple[int, int]] = {}
        found: dict[str, tuple[float, int]] = {}
        for descriptor, peer, received in connections(self._port):
            if peer in calling:
                count, before = self._read.get(peer, (-1, 0))
                read[peer] = calling[peer], before if count == calling[peer] else received
                if received - read[peer][1] > _MOST_UNREAD:
                    end(descriptor, peer)
                continue
            since, before = found[peer] = self._seen.get(peer, (now, received if peer in self._known else 0))
            late = peer not in self._known and now - since > _HANDSHAKE_SECONDS
            if late or received - before > _MOST_BYTES:
                end(descriptor, peer)
        self._known &= found.keys() | calling.keys()
        strangers = sorted((since, peer) for peer, (since, _) in found.items() if peer not in self._known)
        if len(strangers) > self._most:
            excess = {peer for _, peer in strangers[: len(strangers) - self._most]}
            for descriptor, peer, _ in connections(self._port):
                if peer in excess:
                    end(descriptor, peer)
        self._seen, self._read = found, read


def connections(port: int) -> Iterator[tuple[int, str, int]]:
    """Yield this process's accepted connections at a port: descriptor, the peer's address, bytes received."""
    for descriptor in descriptors():
        with contextlib.suppress(OSError):  # closed meanwhile, or no connection
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with _borrowed(descriptor) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.getsockname()[1] != port:
                    continue
                peer = _written(connection)
                received = _received(connection)
            yield descriptor, peer, received


def descriptors() -> list[int]:
    """Return this process's open files, also where it may open no other to list them."""
    try:
        return [int(name) for name in os.listdir("/dev/fd")]
    except OSError:
        return list(range(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))


def number_of_descriptors() -> int:
    """Return the number of this process's open files."""
    with contextlib.suppress(OSError):
        if number := os.stat("/proc/self/fd").st_size:  # since Linux 6.2; listing them takes ten times as long
            return number
    return len(descriptors())


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """Yield a descriptor's socket without a copy, which needs a free descriptor, and leave it open."""
    connection = socket.socket(fileno=descriptor)
    try:
        yield connection
    finally:
        connection.detach()


def _written(connection: socket.socket) -> str:
    """Return the address of a connection's other end, as gRPC writes it but for its quotes."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return ""
    host, port = connection.getpeername()[:2]
    host = host.removeprefix("::ffff:")
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


def _received(connection: socket.socket) -> int:
    if not hasattr(socket, "TCP_INFO"):
        return 0
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size)
    return _BYTES_RECEIVED.unpack(info)[0] if len(info) == _BYTES_RECEIVED.size else 0


def end(descriptor: int, peer: str) -> None:
    """Shut a connection down if the descriptor is still its own: every read of it ends, and its owner closes it."""
    with contextlib.suppress(OSError), _borrowed(descriptor) as connection:
        if _written(connection) == peer:
            connection.shutdown(socket.SHUT_RDWR)


class Limited:
    """Report of lines, a limited number in a minute, then how many were left out.

    Args:
      report: called with lines.
      lines: the most in a minute.
    """

    def __init__(self, report: Callable[[str], None], lines: int = 20):
        self._report, self._lines = report, lines
        self._lock = threading.Lock()
        self._began, self._told, self._left_out = 0.0, 0, 0

    def __call__(self, line: str) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._began >= 60.0:
                if self._left_out:
                    self._report(f"{self._left_out} more calls were refused or failed, and are not listed")
                self._began, self._told, self._left_out = now, 0, 0
            if self._told < self._lines:
                self._told += 1
                self._report(line)
            else:
                self._left_out += 1
