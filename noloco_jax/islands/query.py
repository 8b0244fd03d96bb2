"""Read-only queries to islands: status, description and weights."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from pyarrow import flight

from noloco_jax.errors import UserError
from noloco_jax.islands.client import Client
from noloco_jax.islands.connections import Connections
from noloco_jax.islands.entries import MEMBERS_FILE, read_members
from noloco_jax.islands.frames import ArraySpec
from noloco_jax.islands.keys import CERTIFICATE, Credentials, credentials_for, owner_of
from noloco_jax.islands.peer_errors import PeerError, RefusedError
from noloco_jax.islands.protocol.members import OPEN, Entry
from noloco_jax.islands.protocol.messages import (
    HeaderError,
    Identity,
    Status,
    StatusRequest,
    from_json,
    identity_from_json,
    to_json,
)
from noloco_jax.islands.relay import Relay, RelayedPort
from noloco_jax.islands.roster import Island, Roster
from noloco_jax.islands.server import USED_TWICE
from noloco_jax.islands.snapshots import ABOUT, PROGRESS, PROGRESS_SPEC

_AT_ONCE = 16
_SECONDS = 3.0  # timeout of asking if an island runs already
T = TypeVar("T")


def check_alone(roster: Roster, name: str, credentials: Credentials | None) -> None:
    """Raise `UserError` where an island of this name answers at its address already, perhaps on another machine."""
    try:
        Client(roster, name, credentials, name).action("status", {}, _SECONDS)
    except RefusedError as error:
        if USED_TWICE in str(error):
            where = roster.address(name)
            hint = f"stop it, or give --name of an island of {roster.run} that does not run yet"
            raise UserError(f"{name} runs already, at {where}: {hint}") from None
    except PeerError:
        pass  # expected: no island of this name runs


class About(NamedTuple):
    """Description of an island's weights.

    Attributes:
      identity: values that must be equal for two islands to average.
      config: the configuration of its run; empty for an island in a user's own loop.
      tokenizer: fingerprint of its tokenizer; None where it reads token ids.
      round: the last round that it has ended; -1: none.
      training: True if it has weights.
    """

    identity: Identity
    config: dict[str, Any]
    tokenizer: str | None
    round: int
    training: bool

    @property
    def trainers_config(self) -> dict[str, Any]:
        """Return the configuration of its run; raise `UserError` for an island in a user's own loop, which has none."""
        if not self.config:
            raise UserError(
                f"the islands of {self.identity.run} train in a loop of their own (noloco_jax.Island), of which the "
                "commands know no model: call island.merge(params) there, and start new members by the same loop"
            )
        return self.config


class Weights(NamedTuple):
    """Weights of an island by the names of their specs, after the end of `round`."""

    round: int
    arrays: dict[str, np.ndarray]


class RelayedClient(Client):
    """Client of an island that only dials out: each call has a connection of its own through one of the relays.

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


def clients_of(roster: Roster, keys: Path | None, connections: Connections | None = None) -> dict[str, Client | str]:
    """Return every island's client, or the reason why it cannot be asked.

    An island only answers other islands, so that each is asked in the name of another one whose keys are here. One that
    only dials out is asked through those that can be dialled.

    Args:
      roster: the islands.
      keys: a folder with a folder for each of some islands, or with those of one or of a viewer; None: without TLS.
      connections: keeps connections for further calls; None: each is closed behind its call.

    Raises:
      UserError: if keys are needed, or those given are not right.
    """
    known = credentials_in(roster, keys)
    askers = {name: next((other for other in known if other != name), None) for name in roster.names}
    clients = {
        name: Client(roster, asker, known[asker], name, connections)
        for name, asker in askers.items()
        if asker is not None
    }
    relays = {name: client for name, client in clients.items() if roster.address(name).can_be_dialled}

    def client_of(name: str, asker: str | None) -> Client | str:
        if asker is None:
            return f"not asked: these are the keys of {name}, which others answer"
        credentials = known[asker]
        if name in relays or credentials is None:
            return clients[name]
        return RelayedClient(roster, asker, credentials, name, relays)

    return {name: client_of(name, asker) for name, asker in askers.items()}


def ask_all(clients: Mapping[str, Client | str], ask: Callable[[Client], T]) -> dict[str, T | str]:
    """Call `ask` with the client of each island, some at a time; return its results, or the reasons of `PeerError`s."""

    def answer(client: Client | str) -> T | str:
        if isinstance(client, str):
            return client
        try:
            return ask(client)
        except PeerError as error:
            return str(error)

    with ThreadPoolExecutor(_AT_ONCE) as threads:
        return dict(zip(clients, threads.map(answer, clients.values()), strict=True))


def ask_status(client: Client, request: StatusRequest, seconds: float) -> Status:
    """Return an island's status; raise `PeerError` where none comes."""
    with client.exchange(to_json(request), lambda _: None, seconds) as channel:
        frame = channel.receive()
    try:
        header = from_json(frame.header)
    except HeaderError as error:
        raise PeerError(f"{client.peer}: {error}") from None
    if not isinstance(header, Status):
        raise PeerError(f"{client.peer} answers with {type(header).__name__}")
    return header


def ask_about(clients: Mapping[str, Client | str], seconds: float) -> dict[str, About | str]:
    """Ask every island to describe its weights; return that, or the reason why it is unknown."""
    return ask_all(clients, lambda client: _about(client, seconds))


def fetch_weights(client: Client, specs: Mapping[str, ArraySpec], seconds: float) -> Weights:
    """Fetch a copy of an island's current weights.

    Raises `PeerError` where they do not come whole, or are not finite.
    """
    arrays = dict(client.state({}, {PROGRESS: PROGRESS_SPEC, **specs}, seconds))
    round, _ = arrays.pop(PROGRESS).tolist()
    check_finite(f"{client.peer}'s", arrays)
    return Weights(round, arrays)


def check_finite(whose: str, weights: Mapping[str, np.ndarray]) -> None:
    """Raise `RefusedError` for weights that are not finite, of which one would spoil a mean; `whose` names them."""
    for name, array in weights.items():
        if not np.isfinite(array).all():
            raise RefusedError(
                f"{whose} weights are not finite, {name} for one, and are left out: have it train from an earlier "
                "checkpoint, --from_step=STEP"
            )


def _about(client: Client, seconds: float) -> About:
    try:
        answer = client.action(ABOUT, {}, seconds)
        identity = identity_from_json(answer["identity"])
        config, tokenizer = dict(answer["config"]), answer["tokenizer"]
        return About(identity, config, tokenizer, int(answer["round"]), bool(answer["training"]))
    except (TypeError, KeyError, ValueError):
        raise RefusedError(f"{client.peer} describes its weights in an unknown form: it runs another version") from None


def kept_entries(keys: Path | None) -> tuple[Entry, ...]:
    """Return the entries beside the keys: all that the authority made, where the folder is its own."""
    path = None if keys is None else keys / MEMBERS_FILE
    return () if path is None or not path.exists() else read_members(path).entries


def credentials_in(roster: Roster, keys: Path | None, entries: Iterable[Entry] = ()) -> dict[str, Credentials | None]:
    """Return the credentials to ask with: two islands' at most are ever needed.

    Args:
      roster: the islands.
      keys: see `clients_of`.
      entries: of members that are not in the roster, whose keys do as well.
    """
    known = {island.name: island for island in roster.islands}
    known |= {one.name: Island(one.name, roster.islands[0].address) for one in entries if one.name not in known}
    roster = Roster(roster.run, tuple(known.values()))
    if keys is None:
        return {name: credentials_for(roster, name, None) for name in roster.names[:2]}
    if (keys / CERTIFICATE).exists():
        name = owner_of(keys, roster)
        return {name: credentials_for(roster, name, keys)}
    names = [name for name in roster.names if (keys / name / CERTIFICATE).exists()]
    removed = {entry.name for entry in kept_entries(keys) if entry.until_round != OPEN}
    names = sorted(names, key=removed.__contains__)[:2]  # the others answer no removed one
    if not names:
        raise UserError(f"{keys} holds no keys of {roster.run}'s islands: give the folder that `island keys` made")
    return {name: credentials_for(roster, name, keys / name) for name in names}
