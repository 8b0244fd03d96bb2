"""Server of an island: checks its callers, and hands their requests to the island's handlers."""

import contextlib
import errno
import functools
import json
import os
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
from pyarrow import flight

from noloco_jax.errors import UserError
from noloco_jax.islands.certificates import VIEWER, is_viewer, owner_and_issue
from noloco_jax.islands.channel import (
    MAX_ACTION_BYTES,
    MAX_OPENING_BYTES,
    Channel,
    Opening,
    decode,
    describe,
    from_flight,
)
from noloco_jax.islands.doorkeeper import Doorkeeper, Limited, descriptors, end
from noloco_jax.islands.frames import SCHEMA, Expects
from noloco_jax.islands.keys import Credentials, Newest
from noloco_jax.islands.peer_errors import BusyError, PeerError, RefusedError
from noloco_jax.islands.protocol.messages import StatusRequest
from noloco_jax.islands.recent import WATCH
from noloco_jax.islands.relay import CALLS as RELAY_CALLS
from noloco_jax.islands.relay import RELAY, CallPipe
from noloco_jax.islands.roster import Address, Roster

MAX_CALLS = 32  # at once
MAX_CALLS_OF_A_PEER = 8
USED_TWICE = "one name is used twice"
_TRIES = 100  # to listen again, a tenth of a second apart
_GRACE_SECONDS = 5.0  # allowed to a caller after its own deadline


def _relays_nothing(kind: str, caller: str, body: Mapping[str, Any], pipe: CallPipe) -> None:
    raise RefusedError("nothing is relayed here")


@dataclass(frozen=True)
class Handlers:
    """Handlers of calls, each called in a thread of its own.

    A `RefusedError` or `BusyError` raised anywhere is told to the caller. Every other exception is reported here, and
    the caller is told that the call failed.

    Attributes:
      exchange: (caller, hello, connect): checks the hello and calls connect(expects) for the channel, which is closed
        when this returns.
      state: (caller, request) -> named arrays, which are sent one by one.
      actions: name -> (caller, argument) -> answer, both small JSON.
      report: called with one line about every call that was refused or failed.
      relay: (kind of call, caller, body, its end of a tunnel): see `relay.Relay.call`.
      introduced: (name in the certificate, body of the call) -> True if that makes it a member: an unknown caller.
    """

    exchange: Callable[[str, Mapping[str, Any], Callable[[Expects], Channel]], None]
    state: Callable[[str, Mapping[str, Any]], Iterable[tuple[str, np.ndarray]]]
    actions: Mapping[str, Callable[[str, Mapping[str, Any]], Mapping[str, Any]]]
    report: Callable[[str], None]
    relay: Callable[[str, str, Mapping[str, Any], CallPipe], None] = _relays_nothing
    introduced: Callable[[str, Mapping[str, Any]], bool] = lambda name, body: False


class Server:
    """Flight server that listens from its construction until `close`."""

    def __init__(
        self,
        roster: Roster,
        name: str,
        credentials: Credentials | None,
        handlers: Handlers,
        listen: Address | None = None,
        newest: Newest | None = None,
    ):
        """Start to listen.

        Args:
          roster: the islands that may call.
          name: this island.
          credentials: its keys; None: without TLS, on loopback addresses only.
          handlers: the handlers of calls.
          listen: the address; None: its port in the roster, on the same host if that is loopback, else on all of the
            machine's addresses, as the one that others dial may be a router's.
          newest: certificates seen; None: those kept beside the island's keys.

        Raises `UserError` if the port is in use, or listening there without keys would be open to others.
        """
        listen = listen or _to_listen(roster.address(name))
        if credentials is None and not listen.is_loopback:
            raise UserError(f"{name} would listen at {listen} without keys: give --keys, or a loopback address")
        _check_free(name, listen)
        self._handlers = handlers
        self._location = location = f"{'grpc+tls' if credentials else 'grpc'}://{listen}"
        newest = newest or Newest(credentials.folder if credentials else None)
        self._calls = _Calls(roster, name, credentials is not None, newest, handlers)
        try:
            self._flight = _Flight(location, credentials, handlers, self._calls)
        except Exception as error:  # Arrow raises only a general error
            raise UserError(f"{name} cannot listen at {listen} ({str(error)[:120]}): give a free port") from None
        self.port: int = self._flight.port
        self._doorkeeper = Doorkeeper(self.port, self._calls.connections)

    def admit(self, roster: Roster, issued: Mapping[str, int]) -> None:
        """Admit the islands of another roster from the next call on.

        Args:
          roster: the islands that may call.
          issued: milliseconds in which certificates of some were made: older ones of these names are refused.
        """
        self._calls.admit(roster, issued)

    def renew(self, credentials: Credentials, timeout: float = 10.0) -> None:
        """Show other keys to new callers, once running calls have ended, after `timeout` seconds by force.

        Flight reads keys only when it begins to listen, and takes no port that another server has.

        Raises `UserError` if it cannot listen: nobody can call until it is tried again.
        """
        self._end_calls(timeout)
        location = f"{self._location.rpartition(':')[0]}:{self.port}"
        for left in reversed(range(_TRIES)):
            try:
                self._flight = _Flight(location, credentials, self._handlers, self._calls)
                return
            except Exception as error:  # Arrow raises only a general error
                if not left:
                    raise UserError(f"nobody can call it, as it cannot listen at {location} again ({error})") from None
                time.sleep(0.1)

    def close(self, timeout: float = 5.0) -> None:
        """Refuse new calls, let running ones finish for up to `timeout` seconds, and end the rest."""
        self._calls.closing = True
        self._doorkeeper.close()
        self._end_calls(timeout)

    def _end_calls(self, timeout: float) -> None:
        # Flight waits for the last call, and a suspended caller would hold its own until its deadline.
        thread = threading.Thread(target=self._flight.shutdown, daemon=True)
        thread.start()
        thread.join(timeout)
        self._calls.hang_up()
        thread.join(timeout)


class _Calls:
    """Admission of calls: checks the caller, and limits concurrent calls."""

    def __init__(self, roster: Roster, name: str, is_tls: bool, newest: Newest, handlers: Handlers):
        self._roster, self._names = roster, frozenset(roster.names)
        self._name = name
        self._is_tls = is_tls
        self._newest = newest
        self._introduced = handlers.introduced
        self._report = Limited(handlers.report)
        self._running: Counter[str] = Counter()
        self._connections: dict[str, int] = {}  # of running calls -> messages read of it
        self._lock = threading.Lock()
        self.closing = False

    @contextlib.contextmanager
    def admitted(self, context: Any, content: bytes | None, limit: int) -> Iterator[Opening]:
        """Admit a call and yield its opening; a failure ends it with a Flight error that carries the message."""
        caller = "somebody"
        try:
            opening = decode(content, limit)
            caller = self._caller(opening, context.peer_identity())
            if is_viewer(caller):
                _check_looks(caller, opening)
            who = VIEWER if is_viewer(caller) else caller
            with self._place(who, context.peer(), is_counted=opening.call not in RELAY_CALLS):
                yield opening
        except Exception as error:
            if isinstance(error, (flight.FlightError, pa.ArrowException)):
                error = from_flight(caller, error)
            line = str(error) if isinstance(error, PeerError) else f"failed: {error!r}"
            self._report(f"the call of {caller} from {context.peer()}: {line}")
            description = json.dumps(describe(error))
            raise flight.FlightServerError(description, extra_info=description.encode()) from None

    def admit(self, roster: Roster, issued: Mapping[str, int]) -> None:
        self._roster, self._names = roster, frozenset(roster.names)
        for name, when in issued.items():
            self._newest.admits(name, when)

    def _caller(self, opening: Opening, identity: bytes) -> str:
        """Return the caller's name, confirmed by its certificate."""
        claimed = opening.caller[:80]
        if self._is_tls:
            certified, issue = owner_and_issue(identity.decode(errors="replace")[:80])
            is_known = certified in self._names or is_viewer(certified)
            if not is_known and not self._introduced(certified, opening.body):
                raise RefusedError(
                    f"a certificate made out to {certified!r}, who is not in the roster of {self._roster.run}"
                )
            if claimed != certified:
                raise RefusedError(
                    f"the caller says it is {claimed!r}, and its certificate is made out to {certified!r}"
                )
            if not self._newest.admits(claimed, issue):
                raise RefusedError(f"a certificate of {claimed} that another has replaced")
        if claimed not in self._names and not is_viewer(claimed):
            raise RefusedError(f"the caller says it is {claimed!r}, who is not in the roster of {self._roster.run}")
        if claimed == self._name:
            raise RefusedError(f"the caller says it is {claimed}, and so does this island: {USED_TWICE}")
        if opening.callee != self._name:
            raise RefusedError(f"this is {self._name}, not {opening.callee[:80]!r}: the rosters' addresses differ")
        return claimed

    def hang_up(self) -> None:
        """End all running calls."""
        for connection in self.connections():
            hang_up(connection)

    def connections(self) -> dict[str, int]:
        """Return the connections of running calls, with the number of messages that were read of each."""
        with self._lock:
            return dict(self._connections)

    def has_read(self, connection: str) -> None:
        """Record that a message of a running call was read."""
        with self._lock:
            if connection in self._connections:
                self._connections[connection] += 1

    @contextlib.contextmanager
    def _place(self, caller: str, connection: str, *, is_counted: bool) -> Iterator[None]:
        """Hold a place for a call; those of a relay have limits of their own."""
        with self._lock:
            if self.closing:
                raise BusyError(f"{self._name} is about to stop")
            is_full = self._running.total() >= MAX_CALLS or self._running[caller] >= MAX_CALLS_OF_A_PEER
            if is_counted and is_full:
                raise BusyError(
                    f"{self._name} has {self._running[caller]} calls of {caller} of {self._running.total()} now"
                )
            self._running[caller] += is_counted
            self._connections[connection] = 0
        try:
            yield
        finally:
            with self._lock:
                self._running[caller] -= is_counted
                self._connections.pop(connection, None)  # another program may have had two calls on it


def _check_looks(viewer: str, opening: Opening) -> None:
    """Raise `RefusedError` for a viewer's call that is more than a look at the status, or the way to one by a relay."""
    body = opening.body
    asks = {name for name, value in body.items() if value} <= {"kind", "before"}  # tells nothing, settles nothing
    is_status = opening.call == "exchange" and body.get("kind") == StatusRequest.__name__ and asks
    if opening.call not in (WATCH, RELAY) and not is_status:
        raise RefusedError(f"{viewer} may only look: a viewer's keys open the status of islands and nothing else")


class _Counted:
    """Reader of a call's stream that reports each message read."""

    def __init__(self, reader: Any, has_read: Callable[[], None]):
        self._reader, self._has_read = reader, has_read

    def read_chunk(self) -> Any:
        chunk = self._reader.read_chunk()
        self._has_read()
        return chunk


class _Flight(flight.FlightServerBase):
    """Arrow Flight server, which calls a method for each call, in a thread of its own."""

    def __init__(self, location: str, credentials: Credentials | None, handlers: Handlers, calls: _Calls):
        self._handlers = handlers
        self._calls = calls
        if credentials is None:
            super().__init__(location)
        else:
            super().__init__(
                location,
                tls_certificates=[(credentials.certificate, credentials.key)],
                verify_client=True,
                root_certificates=credentials.authority,
            )

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        with self._calls.admitted(context, descriptor.command, MAX_OPENING_BYTES) as opening:
            deadline = time.monotonic() + opening.seconds
            cancel = functools.partial(hang_up, context.peer())
            counted = _Counted(reader, functools.partial(self._calls.has_read, context.peer()))
            with contextlib.ExitStack() as stack:
                # The caller's own deadline ends the call, if it keeps to what it says.
                overdue = threading.Timer(opening.seconds + _GRACE_SECONDS, cancel)
                overdue.daemon = True
                overdue.start()
                stack.callback(overdue.cancel)

                def connect(expects: Expects) -> Channel:
                    writer.begin(SCHEMA)
                    channel = Channel(opening.caller, counted, writer, expects, deadline, cancel)
                    stack.push(lambda _, error, __: channel.close(error))
                    return channel

                if opening.call == "exchange":
                    self._handlers.exchange(opening.caller, opening.body, connect)
                elif opening.call in RELAY_CALLS:
                    writer.begin(SCHEMA)
                    self._handlers.relay(opening.call, opening.caller, opening.body, CallPipe(counted, writer, cancel))
                elif opening.call == "state":
                    _send_state(self._handlers.state(opening.caller, opening.body), connect)
                else:
                    raise RefusedError(
                        f"there is no call {opening.call[:80]!r} here: it is of another version or program"
                    )

    def do_action(self, context: Any, action: Any) -> list[bytes]:
        with self._calls.admitted(context, action.body.to_pybytes(), MAX_ACTION_BYTES) as opening:
            handler = self._handlers.actions.get(opening.call)
            if handler is None:
                raise RefusedError(
                    f"there is no action {opening.call[:80]!r} here: it is of another version or program"
                )
            return [json.dumps(handler(opening.caller, opening.body), allow_nan=False).encode()]


def _send_state(named: Iterable[tuple[str, np.ndarray]], connect: Callable[[Expects], Channel]) -> None:
    """Send named arrays, each in a frame with its own digest."""
    channel = connect(lambda _: None)
    for name, array in named:
        channel.send({"name": name}, [array])


def _to_listen(address: Address) -> Address:
    if not address.can_be_dialled:
        return Address("127.0.0.1", 0)
    if address.is_loopback:
        return address
    return Address("::" if socket.has_dualstack_ipv6() else "0.0.0.0", address.port)


def _check_free(name: str, address: Address) -> None:
    """Raise `UserError` where the island cannot listen at an address; Flight does not say why."""
    try:
        family = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a former run's connections may linger
            probe.bind((address.host, address.port))
            probe.listen()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            hint = "another program, or the same island, runs there: stop it, or give the roster a free port"
        else:
            hint = "give an address of this machine with a port from 1024"
        raise UserError(f"{name} cannot listen at {address} ({error.strerror}): {hint}") from None


def hang_up(peer: str) -> None:
    """Shut down this process's connection with `peer`, so that every read and write of a call on it ends.

    Args:
      peer: the caller's address as gRPC writes it, such as "ipv4:127.0.0.1:41894" or "ipv6:%5B::1%5D:41894". A
        connection carries one call at a time, so that no other call ends.
    """
    for descriptor in descriptors():
        with contextlib.suppress(OSError):  # closed meanwhile, or no connection
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                end(descriptor, unquote(peer))
