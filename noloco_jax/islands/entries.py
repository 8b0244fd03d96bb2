"""Membership entries of a run: their signatures, and the file that keeps them.

`members.json` holds the run's name, its founders with their addresses, and all entries. It lies beside an island's
checkpoints, in the folder of keys, where the authority's entries are made, and with the keys of a member that is
invited, to which it is the roster.
"""

import base64
import binascii
import dataclasses
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from noloco_jax.errors import UserError
from noloco_jax.files import write_whole
from noloco_jax.islands.certificates import names_of, owner_and_issue
from noloco_jax.islands.keys import Credentials
from noloco_jax.islands.protocol.members import OPEN, Certificate, Entry, Members
from noloco_jax.islands.protocol.messages import HeaderError, entry_from_json
from noloco_jax.islands.roster import NONE, Island, Roster, check_name, parse_dialled

MEMBERS_FILE = "members.json"
_ALGORITHM = ec.ECDSA(hashes.SHA256())


class Saved(NamedTuple):
    """Content of a `MEMBERS_FILE`: the founders, and all entries."""

    roster: Roster
    entries: tuple[Entry, ...]


def now_version(former: int = 0) -> int:
    """Return a version larger than a former one: milliseconds since 1970, also where a clock was put back."""
    return max(time.time_ns() // 1_000_000, former + 1)


def signed(entry: Entry, run: str, key: ec.EllipticCurvePrivateKey) -> Entry:
    """Return an entry with the authority's signature."""
    return dataclasses.replace(entry, signature=key.sign(_content(entry, run), _ALGORITHM).hex())


def own_address(name: str, address: str, former: int, run: str, credentials: Credentials) -> Entry:
    """Return a member's own signed statement of its address; `former` is the version of the last one."""
    key = load_pem_private_key(credentials.key, password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    der = x509.load_pem_x509_certificate(credentials.certificate).public_bytes(Encoding.DER)
    certificate = Certificate(base64.b64encode(der).decode())
    return signed(Entry(-1, name, address, 0, OPEN, 0, now_version(former), certificate=certificate), run, key)


def check_of(run: str, credentials: Credentials | None) -> Callable[[Entry], bool]:
    """Return the check of an entry's signature: the run's authority's, or the member's own by its certificate.

    A certificate that has expired since still tells whose statement it was. Without keys no entry is believed.
    """
    if credentials is None:
        return lambda entry: False
    authority = x509.load_pem_x509_certificate(credentials.authority)

    def is_signed(entry: Entry) -> bool:
        try:
            check_name(entry.name)
            if entry.address:
                parse_dialled(entry.address)
            signer = authority
            if entry.certificate:
                signer = x509.load_der_x509_certificate(base64.b64decode(entry.certificate, validate=True))
                signer.verify_directly_issued_by(authority)
                if {owner_and_issue(name)[0] for name in names_of(signer)} != {entry.name}:
                    return False
            key = signer.public_key()
            assert isinstance(key, ec.EllipticCurvePublicKey)
            key.verify(bytes.fromhex(entry.signature), _content(entry, run), _ALGORITHM)
        except (UserError, ValueError, TypeError, AssertionError, InvalidSignature, binascii.Error):
            return False
        return True

    return is_signed


def members_at(path: Path, roster: Roster, credentials: Credentials | None) -> Members:
    """Return the members as a file keeps them; without it, the roster's alone.

    Raises `UserError` for a damaged file, and for one of other founders.
    """
    entries: Iterable[Entry] = ()
    if path.exists():
        saved = read_members(path)
        if saved.roster.version != roster.version:
            raise UserError(
                f"{path} is of {saved.roster.run} with {', '.join(saved.roster.names[:8])}, and the roster has "
                f"{', '.join(roster.names[:8])}: give the roster that the run began with, as members are added by "
                "`island invite`"
            )
        entries = saved.entries
    return Members(roster.names, check_of(roster.run, credentials), entries)


def read_members(path: Path) -> Saved:
    """Read a `MEMBERS_FILE`; raise `UserError` where it is missing, damaged or a file of another kind."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        founders = tuple(Island(name, parse_dialled(address)) for name, address in content["founders"])
        entries = tuple(map(entry_from_json, content["entries"]))
        return Saved(Roster(str(content["run"]), founders), entries)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): `island keys` makes one") from None
    except (UserError, HeaderError, ValueError, TypeError, KeyError):
        if path.name != MEMBERS_FILE:
            raise UserError(
                f"{path} is no {MEMBERS_FILE}: give the one that `island invite` wrote beside the island's keys"
            ) from None
        raise UserError(f"{path} is damaged: bring back a copy of it, such as that of another island") from None


def write_members(path: Path, roster: Roster, entries: Iterable[Entry]) -> None:
    """Write a `MEMBERS_FILE`, whole or not at all."""
    content: dict[str, Any] = {
        "run": roster.run,
        "founders": [[name, str(address)] for name, address in roster.islands],
        "entries": [dataclasses.asdict(entry) for entry in entries],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(content, indent=1))


def known_roster(roster: Roster, members: Members, round: int) -> Roster:
    """Return the islands that are members around a round, by their ids, at their newest addresses.

    Args:
      roster: the founders, at their addresses as this machine knows them.
      members: the members.
      round: the last round that was ended here.
    """
    first = dict(roster.islands)
    told = {name: members.address_of(name) for name in members.present(round)}
    addresses = {name: parse_dialled(text) if text else first.get(name) for name, text in told.items()}
    return Roster(roster.run, tuple(Island(name, at) for name, at in addresses.items() if at is not None))


def dials_of(roster: Roster, members: Members) -> Callable[[str, str], bool]:
    """Return a function that maps the names of two islands to True if the first one dials the second for exchanges.

    One that only dials out dials everybody; one that can be dialled need not go to it through a relay, except for
    questions, a state, or its last weights.
    """

    def can_be_dialled(member: str) -> bool:
        text = members.address_of(member)
        return (parse_dialled(text) if text else roster.address(member)).can_be_dialled

    return lambda name, peer: can_be_dialled(peer) or not can_be_dialled(name)


def describe(entry: Entry) -> str:
    """Return a line for people on an entry."""
    if entry.certificate and entry.address == NONE:
        return f"{entry.name} only dials out from now on"
    if entry.certificate:
        return f"{entry.name} is at {entry.address} from now on"
    if entry.until_round != OPEN:
        return f"{entry.name} is removed: no member from round {entry.until_round + 1} on"
    where = ", which only dials out," if entry.address == NONE else f" at {entry.address}"
    return f"{entry.name}{where} is a member from round {entry.from_round + 1} on"


def _content(entry: Entry, run: str) -> bytes:
    """Return what is signed: everything but the signature and the certificate to check it by."""
    fields = dataclasses.astuple(dataclasses.replace(entry, signature="", certificate=Certificate("")))
    return json.dumps(["noloco_jax member", run, *fields]).encode()
