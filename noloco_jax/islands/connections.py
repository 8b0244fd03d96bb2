"""Connections that are kept for the next call to the same island: a handshake costs round trips and work.

A call has its connection to itself, as a call is ended from the called side by shutting its connection down.
"""

import math
import threading
import time
from typing import NamedTuple

from pyarrow import flight

MOST_KEPT = 64  # idle connections, of all islands together
IDLE_SECONDS = 45.0  # shorter than the time after which routers forget a silent connection
AGE_SECONDS = 600.0  # after which another handshake checks the certificates


class Connection(NamedTuple):
    """Connection to an island.

    Attributes:
      client: the Flight client that holds it.
      made: time at which its making began, in seconds of `time.monotonic()`.
    """

    client: flight.FlightClient
    made: float


class Connections:
    """Idle connections of an island."""

    def __init__(self):
        self._idle: list[tuple[str, Connection, float]] = []  # island, connection, time of its last use; newest last
        self._closed = False
        self._oldest = -math.inf  # time of making of the oldest that are kept
        self._lock = threading.Lock()

    def take(self, peer: str) -> Connection | None:
        """Return the idle connection to an island that was used last, or None."""
        with self._lock:
            self._drop_old()
            for place in reversed(range(len(self._idle))):
                if self._idle[place][0] == peer:
                    return self._idle.pop(place)[1]
        return None

    def keep(self, peer: str, connection: Connection) -> None:
        """Keep a connection whose call has ended properly."""
        with self._lock:
            self._idle.append((peer, connection, time.monotonic()))
            self._drop_old()

    def close_older(self) -> None:
        """Close all that were made before now, those of running calls when their calls end: they show replaced keys."""
        with self._lock:
            self._oldest = time.monotonic()
            self._drop_old()

    def close(self) -> None:
        """Close all idle connections, and those that are to be kept from now on."""
        with self._lock:
            self._closed = True
            self._drop_old()

    def _drop_old(self) -> None:
        now, idle = time.monotonic(), self._idle
        oldest = max(now - AGE_SECONDS, self._oldest)
        self._idle = [
            (peer, connection, used)
            for peer, connection, used in idle[-MOST_KEPT:]
            if not self._closed and now - used < IDLE_SECONDS and connection.made > oldest
        ]
        kept = {id(connection.client) for _, connection, _ in self._idle}
        for _, connection, _ in idle:
            if id(connection.client) not in kept:
                connection.client.close()
