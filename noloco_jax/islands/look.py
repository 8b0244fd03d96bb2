"""Asks islands how they are, from outside: nothing is changed by it."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from noloco_jax.errors import UserError
from noloco_jax.islands.client import Client
from noloco_jax.islands.keys import CERTIFICATE, Credentials, credentials_for, owner_of
from noloco_jax.islands.peer_errors import PeerError, Refused
from noloco_jax.islands.protocol.headers import HeaderError, Status, StatusRequest, from_json, to_json
from noloco_jax.islands.roster import Roster
from noloco_jax.islands.server import USED_TWICE

_AT_ONCE = 16
_SECONDS = 3.0  # to see whether an island runs already
Answers = dict[str, Status | str]


def check_alone(roster: Roster, name: str, credentials: Credentials | None) -> None:
    """Raises `UserError` where an island of this name answers at its address already, perhaps on another machine."""
    try:
        Client(roster, name, credentials, name).action("status", {}, _SECONDS)
    except Refused as error:
        if USED_TWICE in str(error):
            where = roster.address(name)
            hint = f"stop it, or give --name of an island of {roster.run} that does not run yet"
            raise UserError(f"{name} runs already, at {where}: {hint}") from None
    except PeerError:
        pass  # as it should be: nobody is there


def ask_all(roster: Roster, keys: Path | None, seconds: float) -> Answers:
    """Of every island how it is, or a line on why that is not known.

    An island answers the others alone, so that each is asked in the name of another one whose keys are here.

    Args:
      roster: the islands.
      keys: a folder with a folder for each of some islands, or with those of one; None: without TLS.
      seconds: to wait for each.

    Raises:
      UserError: if keys are needed, or those given are not right.
    """
    known = _credentials(roster, keys)

    def ask(name: str) -> Status | str:
        asker = next((other for other in known if other != name), None)
        if asker is None:
            return f"not asked: these are the keys of {name}, which others answer"
        try:
            return _ask(Client(roster, asker, known[asker], name), seconds)
        except PeerError as error:
            return str(error)

    with ThreadPoolExecutor(_AT_ONCE) as threads:
        return dict(zip(roster.names, threads.map(ask, roster.names), strict=True))


def _ask(client: Client, seconds: float) -> Status | str:
    with client.exchange(to_json(StatusRequest()), lambda _: None, seconds) as channel:
        frame = channel.receive()
    try:
        header = from_json(frame.header)
    except HeaderError as error:
        return f"{client.peer}: {error}"
    return header if isinstance(header, Status) else f"{client.peer} answers with {type(header).__name__}"


def _credentials(roster: Roster, keys: Path | None) -> dict[str, Credentials | None]:
    """Islands in whose names may be asked: two at most are ever needed."""
    if keys is None:
        return {name: credentials_for(roster, name, None) for name in roster.names[:2]}
    if (keys / CERTIFICATE).exists():
        name = owner_of(keys, roster)
        return {name: credentials_for(roster, name, keys)}
    names = [name for name in roster.names if (keys / name / CERTIFICATE).exists()][:2]
    if not names:
        raise UserError(f"{keys} holds no keys of {roster.run}'s islands: give the folder that `island keys` made")
    return {name: credentials_for(roster, name, keys / name) for name in names}
