"""Client for calls to another island, each with a deadline and, while it lasts, a connection of its own."""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import flight

from noloco_jax.errors import UserError
from noloco_jax.islands.certificates import is_viewer
from noloco_jax.islands.channel import Channel, Opening, encode, from_flight
from noloco_jax.islands.connections import Connection, Connections
from noloco_jax.islands.frames import PIECE_BYTES, SCHEMA, ArraySpec, Expects, drain
from noloco_jax.islands.keys import Credentials, Newest
from noloco_jax.islands.peer_errors import BrokenError, EndedError, PeerError, RefusedError, UnreachableError
from noloco_jax.islands.probe import learn_issue, why_unreachable
from noloco_jax.islands.roster import Address, Roster

_OPTIONS = [
    ("grpc.max_receive_message_length", 4 * PIECE_BYTES),  # limits what a message may allocate
    ("grpc.enable_http_proxy", 0),  # islands dial each other directly, not through a web proxy
    ("grpc.use_local_subchannel_pool", 1),  # else the next call inherits a failed connection's backoff
]


class Client:
    """Client of one other island. Thread-safe, as no two calls share a connection."""

    def __init__(
        self,
        roster: Roster,
        name: str,
        credentials: Credentials | None,
        peer: str,
        connections: Connections | None = None,
        newest: Newest | None = None,
    ):
        """Check the names and keys; connect to nothing yet.

        Args:
          roster: the islands' addresses.
          name: the caller: this island, or a viewer.
          credentials: its keys; None: without TLS, which only loopback addresses are allowed.
          peer: the island to call.
          connections: keeps connections for further calls; None: each is closed behind its call.
          newest: certificates seen; the peer must show its newest, or a newer one. None: any of the run.

        Raises `UserError` for names that are not in the roster, and for calls without keys to another machine.
        """
        if not is_viewer(name):
            roster.index(name)
        self.peer = peer
        self._name = name
        self._credentials = credentials
        self._address, self._is_relayed = roster.address(peer), False
        self._connections = connections
        self._newest = newest
        if credentials is None and self._address.can_be_dialled and not self._address.is_loopback:
            raise UserError(f"{peer} at {self._address} can be reached from other machines: give --keys=FOLDER")

    def renew(self, credentials: Credentials) -> None:
        """Use other keys for new connections."""
        self._credentials = credentials

    def move(self, address: Address, *, is_relayed: bool = False) -> None:
        """Call the peer at another address from the next call on; `is_relayed`: a `RelayedPort`."""
        self._address, self._is_relayed = address, is_relayed

    def action(self, call: str, argument: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Call a small action and return its answer.

        Raises `PeerError` if the call fails.
        """
        options = flight.FlightCallOptions(timeout=seconds)
        try:
            with self._flight() as client:
                action = flight.Action(call, self._opening(call, argument, seconds))
                results = list(client.do_action(action, options))
            answer = json.loads(results[0].body.to_pybytes()) if len(results) == 1 else None
        except flight.FlightUnavailableError:
            raise self._why_unreachable() from None
        except (flight.FlightError, pa.ArrowException) as error:
            raise from_flight(self.peer, error) from None
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise BrokenError(f"{self.peer} answered with what is no JSON object")
        return answer

    @contextlib.contextmanager
    def exchange(
        self, hello: Mapping[str, Any], expects: Expects, seconds: float, call: str = "exchange"
    ) -> Iterator[Channel]:
        """Open a channel to the other island for the `with` block.

        Args:
          hello: description of the exchange, up to 64 KiB as JSON, which the peer checks first.
          expects: maps the header of a frame to the specs of its arrays.
          seconds: the limit of the whole call.
          call: the kind of call.

        Raises `PeerError`, here and from the channel.
        """
        deadline = time.monotonic() + seconds
        with self._flight() as client:
            descriptor = flight.FlightDescriptor.for_command(self._opening(call, hello, seconds))
            try:
                writer, reader = client.do_exchange(descriptor, flight.FlightCallOptions(timeout=seconds))
            except flight.FlightUnavailableError:
                raise self._why_unreachable() from None
            except (flight.FlightError, pa.ArrowException) as error:
                raise from_flight(self.peer, error) from None
            # A call that its server has ended already: the channel's first frame says why.
            with contextlib.suppress(flight.FlightError, pa.ArrowException, OSError):
                writer.begin(SCHEMA)
            channel = Channel(self.peer, reader, writer, expects, deadline, reader.cancel, self._why_unreachable)
            try:
                yield channel
            except BaseException as error:
                channel.close(error)
                raise
            channel.close()

    def state(
        self, request: Mapping[str, Any], expected: Mapping[str, ArraySpec], seconds: float
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Yield named arrays of the other island, one by one, each whole and checked.

        Args:
          request: argument of the peer's handler.
          expected: name -> spec of every array that must come, once each.
          seconds: the limit of the whole call.

        Raises `PeerError`; arrays yielded before are correct, but incomplete.
        """

        def expects(header: Mapping[str, Any]) -> list[ArraySpec]:
            if header.get("name") not in expected:
                raise RefusedError(f"it sends {str(header.get('name'))[:80]!r}, which is not expected")
            return [expected[header["name"]]]

        missing = set(expected)
        with self.exchange(request, expects, seconds, call="state") as channel:
            while missing:
                header, arrays = channel.receive()
                if arrays is None or header["name"] not in missing:
                    raise RefusedError(f"{self.peer} sends {header['name']!r} twice")
                missing.remove(header["name"])
                yield header["name"], arrays[0]

    @contextlib.contextmanager
    def tunnel(self, call: str, body: Mapping[str, Any], seconds: float) -> Iterator[tuple[Any, Any, Any]]:
        """Yield reader, writer and cancellation of a call without frames, on a connection of its own.

        It is cancelled at the end of the `with` block, when no other thread may read or write any more.
        Raises `PeerError` where no connection comes about; Arrow's errors pass.
        """
        client = self._connected()
        try:
            descriptor = flight.FlightDescriptor.for_command(self._opening(call, body, seconds))
            writer, reader = client.do_exchange(descriptor, flight.FlightCallOptions(timeout=seconds))
            try:
                writer.begin(SCHEMA)
                yield reader, writer, reader.cancel
            finally:
                reader.cancel()
                with contextlib.suppress(Exception):
                    drain(reader)  # the stream must be over before it is freed
                with contextlib.suppress(Exception):
                    writer.close()
        finally:
            client.close()

    @contextlib.contextmanager
    def _flight(self) -> Iterator[flight.FlightClient]:
        """Hold a connection for a call; after one that failed it is closed."""
        connection = self._connections.take(self.peer) if self._connections is not None else None
        if connection is None:
            began = time.monotonic()  # before the keys are read, which may be replaced meanwhile
            connection = Connection(self._connected(), began)
        is_over = False
        try:
            yield connection.client
            is_over = True
        except EndedError:
            is_over = True
            raise
        finally:
            if is_over and self._connections is not None:
                self._connections.keep(self.peer, connection)
            else:
                connection.client.close()

    def _connected(self) -> flight.FlightClient:
        if not self._address.can_be_dialled:
            raise UnreachableError(f"{self.peer} only dials out: nobody can call it")
        if self._credentials is None:
            return flight.FlightClient(f"grpc://{self._address}", generic_options=_OPTIONS)
        # Certificates bear the time of their making as a name too: TLS itself then refuses every other one.
        if self._newest is not None and not self._newest.knows(self.peer):
            learn_issue(self.peer, self._address, self._credentials, self._newest)
        issue = self._newest.issue_of(self.peer) if self._newest is not None else 0
        return flight.FlightClient(
            f"grpc+tls://{self._address}",
            tls_root_certs=self._credentials.authority,
            cert_chain=self._credentials.certificate,
            private_key=self._credentials.key,
            override_hostname=f"{self.peer}.{issue}" if issue else self.peer,  # must be in the server's certificate
            generic_options=_OPTIONS,
        )

    def _opening(self, call: str, body: Mapping[str, Any], seconds: float) -> bytes:
        return encode(Opening(call, self._name, self.peer, seconds, dict(body)))

    def _why_unreachable(self) -> PeerError:
        if self._is_relayed:
            if self._credentials is not None and self._newest is not None:
                learn_issue(self.peer, self._address, self._credentials, self._newest)
            return UnreachableError(f"{self.peer} only dials out, and no relay that answers reaches it: it may be away")
        return why_unreachable(self.peer, self._address, self._credentials, self._newest)
