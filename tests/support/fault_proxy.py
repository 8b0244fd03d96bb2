"""A TCP proxy on loopback that does to connections what networks do."""

import contextlib
import queue
import socket
import struct
import threading
import time
from typing import Literal

Direction = Literal["up", "down"]  # to the server that is behind it, and back to the client

_CHUNK = 16 << 10
_QUEUED_CHUNKS = 16


class Link:
    """A line of so many bytes a second, one way, on which all connections that use it take turns."""

    def __init__(self, rate: float):
        self.rate = rate
        self.carried = 0
        self._turn = threading.Lock()
        self._free = 0.0  # when the last bytes were through, however late a busy machine noticed

    def carry(self, size: int, come: float) -> None:
        """Returns when the last of these bytes is through, which came at that time of the monotonic clock."""
        with self._turn:
            self._free = max(self._free, come) + size / self.rate
            time.sleep(max(self._free - time.monotonic(), 0.0))
            self.carried += size


class FaultProxy:
    """Forwards connections to a port of this machine. Attributes may be set at any time, for all connections.

    Attributes:
      port: where it listens.
      latency: seconds by which every byte is late, each way.
      rate: bytes a second each way of each connection; None for no limit.
      links: the lines that all bytes of a direction pass, with those of other proxies.
      silent: directions in which everything is swallowed: one of them is a half-open connection, both a black hole.
      flip: direction -> offset of a byte whose lowest bit is flipped, once, counted over each connection.
      cut: direction -> number of bytes after which a connection is closed.
      passed: bytes that have come in, each way.
      accepted: number of connections so far.
    """

    def __init__(self, target_port: int):
        self._target = ("127.0.0.1", target_port)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self.latency = 0.0
        self.rate: float | None = None
        self.links: dict[Direction, Link] = {}
        self.silent: set[Direction] = set()
        self.flip: dict[Direction, int] = {}
        self.cut: dict[Direction, int] = {}
        self.passed: dict[Direction, int] = {"up": 0, "down": 0}
        self.accepted = 0
        self._connections: list[tuple[socket.socket, socket.socket]] = []
        self._half_ended: set[tuple[socket.socket, socket.socket]] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> "FaultProxy":
        return self

    def __exit__(self, *_) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        self.reset()

    def reset(self) -> None:
        """Breaks all connections that there are now, as a router that was restarted does."""
        with self._lock:
            pairs, self._connections = self._connections, []
        for pair in pairs:
            for one in pair:
                with contextlib.suppress(OSError):
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    one.shutdown(socket.SHUT_RD)  # wakes the thread that reads
                one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                client, _ = self._listener.accept()
                self.accepted += 1
                try:
                    server = socket.create_connection(self._target)
                except OSError:
                    client.close()
                    continue
                pair = client, server
                self._connections.append(pair)
                self._forward(pair, client, server, "up")
                self._forward(pair, server, client, "down")

    def _forward(
        self,
        pair: tuple[socket.socket, socket.socket],
        source: socket.socket,
        sink: socket.socket,
        direction: Direction,
    ) -> None:
        chunks: queue.Queue[tuple[float, bytes]] = queue.Queue(_QUEUED_CHUNKS)
        threading.Thread(target=self._take, args=(source, direction, chunks), daemon=True).start()

        def give() -> None:
            self._give(source, sink, direction, chunks)
            self._end(pair)

        threading.Thread(target=give, daemon=True).start()

    def _end(self, pair: tuple[socket.socket, socket.socket]) -> None:
        """A direction of a connection is over; with the second one it is closed."""
        with self._lock:
            if pair not in self._half_ended:
                self._half_ended.add(pair)
                return
            self._half_ended.remove(pair)
            if pair in self._connections:
                self._connections.remove(pair)
        for one in pair:
            one.close()

    def _take(self, source: socket.socket, direction: Direction, chunks: queue.Queue) -> None:
        data = b"more"
        while data:
            try:
                data = source.recv(_CHUNK)
            except OSError:
                data = b""
            self.passed[direction] += len(data)
            chunks.put((time.monotonic() + self.latency, data))

    def _give(self, source: socket.socket, sink: socket.socket, direction: Direction, chunks: queue.Queue) -> None:
        sent = 0
        while True:
            due, data = chunks.get()
            time.sleep(max(due - time.monotonic(), 0.0))
            rate, link, cut = self.rate, self.links.get(direction), self.cut.get(direction)
            if rate is not None:
                time.sleep(len(data) / rate)
            if link is not None:
                link.carry(len(data), due)
            place = self.flip.get(direction, -1) - sent
            if 0 <= place < len(data) and self.flip.pop(direction, None) is not None:
                data = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
            sent += len(data)
            try:
                if cut is not None and sent >= cut:
                    sink.sendall(data[: len(data) - (sent - cut)])
                    for one in (sink, source):  # not `close`, which does nothing while another thread reads from it
                        one.shutdown(socket.SHUT_RDWR)
                elif direction not in self.silent:
                    if data:
                        sink.sendall(data)
                    else:
                        sink.shutdown(socket.SHUT_WR)
            except OSError:
                with contextlib.suppress(OSError):
                    source.shutdown(socket.SHUT_RD)
                while data:  # what has come cannot be handed on
                    data = chunks.get()[1]
            if not data:
                return
