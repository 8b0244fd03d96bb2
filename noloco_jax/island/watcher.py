"""Watcher of a run's islands: polls their state and recent events, for a page and for metrics."""

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from noloco_jax.errors import UserError
from noloco_jax.islands.client import Client
from noloco_jax.islands.connections import Connections
from noloco_jax.islands.discovery import discover
from noloco_jax.islands.entries import Saved, describe, known_roster
from noloco_jax.islands.peer_errors import PeerError
from noloco_jax.islands.protocol.members import Members
from noloco_jax.islands.query import clients_of
from noloco_jax.islands.recent import WATCH
from noloco_jax.islands.roster import Roster

_AT_ONCE = 16
_SECONDS = 5.0  # the limit of each answer
_DISCOVER_SECONDS = 30.0  # interval of asking for members that came or moved
_MOST_EVENTS = 1200  # of an island


class Watched:
    """Last known state of one island, and its newest events. Thread-safe."""

    def __init__(self):
        self._lock = threading.Lock()
        self._status: dict[str, Any] | None = None
        self._away = "not asked yet"
        self._answered: float | None = None
        self._events: deque[Mapping[str, Any]] = deque(maxlen=_MOST_EVENTS)
        self._last = 0

    def ask(self, client: Client | str, seconds: float) -> None:
        """Ask for the state, and for the events since the last answer."""
        try:
            if isinstance(client, str):
                raise PeerError(client)
            status = client.action(WATCH, {"after": self._last}, seconds)
            is_other = self._status is not None and status["began"] != self._status["began"]
            if is_other:  # another process, which counts its events anew and tells those of earlier ones again
                status = client.action(WATCH, {"after": 0}, seconds)
            events, last = status.pop("events"), status.pop("last")
            _check(status, events, last)
        except Exception as error:  # whatever a member may answer
            is_known = isinstance(error, PeerError)
            reason = str(error) if is_known else "it describes itself in an unknown form: it runs another version"
            with self._lock:
                self._away = reason
            return
        with self._lock:
            if is_other:
                self._events.clear()
            self._events.extend(events)
            self._status, self._last, self._away, self._answered = status, last, "", time.time()

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON values.

        "status" is the last answer, None before the first; "answered" its time in seconds since 1970; "away" the
        reason why the last question had no answer, or empty.
        """
        with self._lock:
            return {
                "away": self._away,
                "answered": self._answered,
                "status": self._status,
                "events": list(self._events),
            }


def _check(status: Mapping[str, Any], events: Any, last: Any) -> None:
    """Raise `ValueError` or `KeyError` for an answer that the page and the metrics do not understand."""
    json.dumps([status, events], allow_nan=False)
    numbers = (status["round"], status["due"], status["committed"], last)
    are_counts = all(
        isinstance(number, int) for number in (*numbers, *(p["quarantined_until"] for p in status["peers"]))
    )
    are_texts = all(isinstance(text, str) for p in status["peers"] for text in (p["name"], p["refuses"]))
    are_events = all(isinstance(e["time"], int | float) and isinstance(e["event"], str) for e in events)
    if not (are_counts and are_texts and are_events):
        raise ValueError("an answer of another form")


class Watcher:
    """Thread that polls all islands, from `start` until `close`.

    Args:
      run: the founders and the entries known here.
      keys: see `query.clients_of`.
      every: seconds between polls.

    Raises `UserError` for keys that are not right.
    """

    def __init__(self, run: Saved, keys: Path | None, every: float):
        self._run, self._keys, self._every = run, keys, every
        self._connections = Connections()
        members = Members(run.roster.names, lambda entry: True, run.entries)  # checked where they are asked for
        self._roster: Roster = known_roster(run.roster, members, 0)
        self._clients: dict[str, Client | str] = clients_of(self._roster, keys, self._connections)
        self._islands: dict[str, Watched] = {name: Watched() for name in self._roster.names}
        self._changes: list[str] = []
        self._polled: float | None = None
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._poll_all, daemon=True, name="watcher")

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        self._connections.close()

    def to_json(self) -> dict[str, Any]:
        """Return the run as of the last poll, as JSON values; times in seconds since 1970."""
        with self._lock:
            roster, islands, changes, polled = self._roster, dict(self._islands), self._changes, self._polled
        addresses = {name: str(address) for name, address in roster.islands}
        return {
            "run": roster.run,
            "time": time.time(),
            "polled": polled,
            "every": self._every,
            "changes": changes,
            "islands": [
                {"name": name, "address": addresses.get(name, ""), "member": name in addresses, **one.to_json()}
                for name, one in islands.items()
            ],
        }

    def poll(self) -> None:
        """Ask all islands once."""
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            for name, client in self._clients.items():
                threads.submit(self._islands[name].ask, client, _SECONDS)
        with self._lock:
            self._polled = time.time()

    def discover(self) -> None:
        """Ask for the members, and watch new ones and new addresses."""
        found = discover(self._run, self._keys, _SECONDS)
        self._clients = clients_of(found.roster, self._keys, self._connections)
        with self._lock:
            self._roster, self._run = found.roster, Saved(self._run.roster, found.members.entries)
            self._changes = [describe(entry) for entry in found.members.entries]
            for name in found.roster.names:
                self._islands.setdefault(name, Watched())

    def _poll_all(self) -> None:
        discover_at = time.monotonic()
        while not self._closing.is_set():
            if time.monotonic() >= discover_at:
                with contextlib.suppress(UserError):  # keys that are being replaced
                    self.discover()
                discover_at = time.monotonic() + _DISCOVER_SECONDS
            self.poll()
            self._closing.wait(self._every)
