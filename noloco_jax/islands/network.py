"""Ways between an island and the others: its server, a client for each, and relays where one can only dial out."""

import math
import threading
import time
from collections.abc import Callable, Mapping

from noloco_jax.errors import UserError
from noloco_jax.islands.client import Client
from noloco_jax.islands.connections import Connections
from noloco_jax.islands.keys import Credentials, Newest, expiry_warning, renewed
from noloco_jax.islands.relay import Relay, RelayedPort, RelayedServer
from noloco_jax.islands.roster import Address, Roster
from noloco_jax.islands.server import Handlers, Server

_KEYS_SECONDS, _WARN_SECONDS = 10.0, 86400.0  # interval of reading the keys again; of warnings that they expire


class Network:
    """Server and clients of an island. `open` starts to listen and `close` ends everything.

    Args:
      roster: the members, at their addresses as this machine knows them.
      name: this island.
      credentials: its keys, None without TLS.
      report: called with lines for people.
      listen: the address to listen at; None: see `Server`.

    Attributes:
      roster: the members that are called and admitted.
      clients: a client for each peer.
      relay: passes calls on between members that only dial out.
    """

    def __init__(
        self,
        roster: Roster,
        name: str,
        credentials: Credentials | None,
        report: Callable[[str], None],
        listen: Address | None = None,
    ):
        self.roster = roster
        self.clients: dict[str, Client] = {}
        self.relay = Relay()
        self._name, self._credentials, self._report, self._listen = name, credentials, report, listen
        self._connections = Connections()
        self._newest = Newest(credentials.folder if credentials else None)
        self._server: Server | None = None
        self._relayed: RelayedServer | None = None
        self._ports: dict[str, RelayedPort] = {}  # of peers that only dial out
        self._closed = threading.Event()

    def open(self, handlers: Handlers) -> None:
        """Listen. Raises `UserError` where it cannot."""
        self._server = Server(self.roster, self._name, self._credentials, handlers, self._listen, self._newest)
        if not self.roster.address(self._name).can_be_dialled:
            host = self._listen.host if self._listen and self._listen.host not in ("0.0.0.0", "::") else "127.0.0.1"
            self._relayed = RelayedServer(self._name, self.clients, self._relays, Address(host, self._server.port))
        if self._credentials is not None:
            threading.Thread(target=self._watch_keys, daemon=True, name="keys").start()

    def follow(self, roster: Roster, issued: Mapping[str, int]) -> None:
        """Call and admit the members of another roster.

        Args:
          roster: the members, at their newest addresses; without this island if it was removed: nobody will have it.
          issued: see `Server.admit`.
        """
        if self._name not in roster.names:
            self.roster = roster
            return
        behind = {name for name, address in roster.islands if not address.can_be_dialled}
        for name in self._ports.keys() - behind:
            # Closing waits for threads that may want a lock which the caller holds.
            threading.Thread(target=self._ports.pop(name).close, daemon=True).start()
        for name, address in roster.islands:
            if name == self._name:
                continue
            if name in behind and self._credentials is not None:
                if name not in self._ports:
                    self._ports[name] = RelayedPort(self._name, name, self.clients, self._relays, self.relay)
                address = self._ports[name].address
            if name not in self.clients:
                keys = self._credentials
                self.clients[name] = Client(roster, self._name, keys, name, self._connections, self._newest)
            self.clients[name].move(address, is_relayed=name in self._ports)
        self.roster = roster  # only now, as threads of tunnels call the members that it has
        if self._server is not None:
            self._server.admit(roster, issued)

    def close(self) -> None:
        """Refuse calls and end those that run. Call it once."""
        self._closed.set()
        self.relay.close()
        if self._relayed is not None:
            self._relayed.close()
        for port in self._ports.values():
            port.close()
        self._connections.close()
        if self._server is not None:
            self._server.close(1.0)

    def _relays(self) -> list[str]:
        """Return the members that can be dialled, but for this one."""
        return [name for name, at in self.roster.islands if at.can_be_dialled and name != self._name]

    def _watch_keys(self) -> None:
        """Read keys that were renewed, warn daily of those that expire soon, and of a fault of the files once."""
        warned, fault, told = -math.inf, "", ""
        assert self._credentials is not None
        while True:
            before = fault
            try:
                fault, is_renewed = "", self._renew_keys()
            except UserError as error:
                fault, is_renewed = str(error), False
            if fault and fault == before != told:  # at the first look files may still come one after the other
                self._report(f"{self._name} goes on with its old keys: {fault}")
                told = fault
            is_warned = is_renewed or time.monotonic() - warned <= _WARN_SECONDS
            if not is_warned and (line := expiry_warning(self._credentials, self._name)):
                warned = time.monotonic()
                self._report(line)
            if self._closed.wait(_KEYS_SECONDS):
                return

    def _renew_keys(self) -> bool:
        """Use the keys in the folder if they are others; return True if so. Raises `UserError` where it cannot."""
        assert self._credentials is not None and self._server is not None
        keys = renewed(self._credentials, self._name)
        if keys is None:
            return False
        for client in list(self.clients.values()):
            client.renew(keys)
        self._connections.close_older()
        self._server.renew(keys)
        self._credentials = keys
        self._report(f"{self._name} has read new keys from {keys.folder}")
        return True
