"""Client of an island that only dials out, for commands: each call has a way of its own through a relay."""

import contextlib
from collections.abc import Iterator, Mapping

from pyarrow import flight

from noloco_jax.islands.client import Client
from noloco_jax.islands.keys import Credentials
from noloco_jax.islands.relay import Relay, RelayedPort
from noloco_jax.islands.roster import Roster


class RelayedClient(Client):
    """Client whose connections go through one of the relays. One call at a time.

    Args:
      roster, name, credentials, peer: as of `Client`.
      relays: name -> client of an island that can be dialled.
    """

    def __init__(self, roster: Roster, name: str, credentials: Credentials, peer: str, relays: Mapping[str, Client]):
        super().__init__(roster, name, credentials, peer)
        self._relays = relays

    @contextlib.contextmanager
    def _flight(self) -> Iterator[flight.FlightClient]:
        port = RelayedPort(self._name, self.peer, self._relays, lambda: self._relays, Relay())
        try:
            self.move(port.address, is_relayed=True)
            with super()._flight() as client:
                yield client
        finally:
            port.close()
