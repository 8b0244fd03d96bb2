"""Roster of a run's islands: the file that a run begins with, and the signed document that takes its place.

    run = "c4-125m"

    [[island]]
    name = "paris"
    address = "paris.example.org:7070"

    [[island]]
    name = "berlin"
    address = "10.0.0.7:7070"

    [[island]]
    name = "oslo"
    address = "none"  # it only dials out

An island's place in the file is the number of its replica. Its name is what its certificate is made out to. This is
version 0 of the roster. Whoever has the key of the run's authority makes the next version (`invite`, `remove`, `keys
--replace`), a document of all rows with the authority's signature. Islands take the highest version that they hear of,
keep it in WORKDIR/members.json, and pair by it.
"""

import base64
import difflib
import functools
import hashlib
import ipaddress
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from noloco_jax.errors import UserError
from noloco_jax.files import write_whole
from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.certificates import is_signed, sign

MEMBERS_FILE = "members.json"
MAX_BYTES = 1 << 20  # of a signed roster
# A label as in RFC 1035, which begins with a letter: one of digits alone is read as an IP address by some.
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_HOST = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PURPOSE = b"noloco_jax roster"
NONE = "none"


class Address(NamedTuple):
    """Network address of an island.

    Attributes:
      host: a DNS name or an IP address, an IPv6 one without brackets; empty: nobody can dial the island.
      port: 1 to 65535; 0 in an address to listen at takes any that is free.
    """

    host: str
    port: int

    def __str__(self) -> str:
        if not self.can_be_dialled:
            return NONE
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def can_be_dialled(self) -> bool:
        return bool(self.host)

    @property
    def is_loopback(self) -> bool:
        """True if no other machine can reach it."""
        try:
            return not self.host or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host.lower().rstrip(".") == "localhost"


class Member(NamedTuple):
    """Row of a roster.

    Attributes:
      id: number of its replica, for good.
      name: what its certificate is made out to.
      address: where it is reached.
      from_round: its first round.
      until_round: the first round without it; None: it stays.
      issued: when its certificate was made, in ms since 1970; every other one is refused. 0: any that is valid.
    """

    id: int
    name: str
    address: Address
    from_round: int = 0
    until_round: int | None = None
    issued: int = 0

    def is_active(self, round: int) -> bool:
        return self.from_round <= round and (self.until_round is None or round < self.until_round)


@dataclass(frozen=True)
class Roster:
    """Islands of a run.

    Attributes:
      run: the run's name.
      members: by their ids.
      num_founders: islands that the run began with; their ids are the first ones.
      version: 0 for the file that a run begins with.
      document: the signed form, of version 1 and later; empty in version 0.
    """

    run: str
    members: tuple[Member, ...]
    num_founders: int
    version: int = 0
    document: bytes = field(default=b"", compare=False, repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(member.name for member in self.members)

    @property
    def founders(self) -> str:
        """Digest of the run's name and its first islands, in their order: what every version of a roster keeps."""
        names = [member.name for member in self.members if member.id < self.num_founders]
        return hashlib.sha256(json.dumps([self.run, *names]).encode()).hexdigest()[:16]

    @functools.cached_property
    def _by_name(self) -> dict[str, Member]:
        return {member.name: member for member in self.members}

    def get(self, name: str) -> Member | None:
        return self._by_name.get(name)

    def member(self, name: str) -> Member:
        """Return a row; raise `UserError` for a name that the roster does not hold."""
        if (found := self.get(name)) is None:
            near = difflib.get_close_matches(name, self.names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(self.names[:8])}"
            raise UserError(f"the roster of {self.run} has no island {name!r}: {hint}")
        return found

    def active(self, round: int) -> tuple[str, ...]:
        """Return the members of a round, by their ids."""
        return tuple(member.name for member in self.members if member.is_active(round))

    def is_over(self, name: str, round: int) -> bool:
        """Return whether a membership has ended before a round."""
        member = self.get(name)
        return member is None or (member.until_round is not None and member.until_round <= round)

    def changed(self, member: Member) -> "Roster":
        """Return the next version, in which a row is new or takes the place of that with its name."""
        kept = [one for one in self.members if one.name != member.name]
        members = tuple(sorted((*kept, member), key=lambda one: one.id))
        return replace(self, members=members, version=self.version + 1, document=b"")

    def signed(self, key: Any) -> "Roster":
        """Return the roster with its document, signed by the authority's key."""
        rows = [
            pb.Member(
                id=member.id,
                name=member.name,
                address=str(member.address),
                from_round=member.from_round,
                until_round=member.until_round or 0,
                issued=member.issued,
            )
            for member in self.members
        ]
        content = pb.Roster(
            run=self.run, version=self.version, num_founders=self.num_founders, members=rows
        ).SerializeToString(deterministic=True)
        document = pb.SignedRoster(roster=content, signature=sign(key, _PURPOSE + content))
        return replace(self, document=document.SerializeToString())


class BadRosterError(Exception):
    """A document that is no roster of this run, or was not signed by its authority."""


def parse_document(document: bytes, run: str | None, authority: bytes) -> Roster:
    """Parse a signed roster.

    Args:
      document: a `SignedRoster`.
      run: the run's name; None: any.
      authority: the authority's certificate, PEM.

    Raises `BadRosterError`.
    """
    if len(document) > MAX_BYTES:
        raise BadRosterError(f"it has {len(document)} bytes, and {MAX_BYTES} are allowed")
    try:
        outer = pb.SignedRoster.FromString(document)
        if not is_signed(authority, _PURPOSE + outer.roster, outer.signature):
            raise BadRosterError("the run's authority has not signed it")
        content = pb.Roster.FromString(outer.roster)
        members = tuple(
            Member(row.id, row.name, parse_dialled(row.address), row.from_round, row.until_round or None, row.issued)
            for row in content.members
        )
        for member in members:
            check_name(member.name)
    except (DecodeError, UserError) as error:
        raise BadRosterError(f"it is damaged: {error}") from None
    if run is not None and content.run != run:
        raise BadRosterError(f"it is of the run {content.run!r}")
    if len({member.name for member in members}) < len(members) or len({one.id for one in members}) < len(members):
        raise BadRosterError("two of its rows have one name or one id")
    return Roster(content.run, members, content.num_founders, content.version, document)


def version_of(document: bytes) -> int:
    """Return the version that a document claims, before its signature is checked; 0 for no document."""
    try:
        return pb.Roster.FromString(pb.SignedRoster.FromString(document[: MAX_BYTES + 1]).roster).version
    except DecodeError:
        return 0


def read_members(path: Path, run: str | None, authority: bytes | None) -> Roster:
    """Read a signed roster from a file; raise `UserError` where there is none that the authority has signed."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        document = base64.b64decode(content["document"], validate=True)
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}): give the {MEMBERS_FILE} of `island invite`"
        ) from None
    except (ValueError, TypeError, KeyError):
        raise UserError(f"{path} is no {MEMBERS_FILE}: bring back a copy, such as that of another island") from None
    if authority is None:
        raise UserError(f"{path} is checked with the run's keys: give --keys")
    try:
        return parse_document(document, run, authority)
    except BadRosterError as error:
        raise UserError(f"{path} is not used: {error}") from None


def write_members(path: Path, roster: Roster) -> None:
    """Write a signed roster to a file, whole or not at all; beside the document is a form for people."""
    shown = [[member.id, member.name, str(member.address), *member[3:]] for member in roster.members]
    content = {"run": roster.run, "version": roster.version, "rows": shown}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({**content, "document": base64.b64encode(roster.document).decode()}, indent=1))


def newest(path: Path, roster: Roster, authority: bytes | None) -> Roster:
    """Return the roster in a `MEMBERS_FILE` if it is newer; raise `UserError` for a damaged or a foreign file."""
    if not path.exists():
        return roster
    found = read_members(path, roster.run, authority)
    if found.founders != roster.founders:
        raise UserError(
            f"{path} is of the islands {', '.join(found.names[:8])}, and the roster has {', '.join(roster.names[:8])}: "
            "give the roster that the run began with, as members are added by `island invite`"
        )
    return found if found.version > roster.version else roster


def read_run(path: Path, authority: bytes | None) -> Roster:
    """Read the roster that a flag names: a TOML file, or a `MEMBERS_FILE`."""
    return read_members(path, None, authority) if path.suffix == ".json" else read_roster(path)


def parse_address(text: str) -> Address:
    """Parse "host:port"; raise `UserError` for anything else."""
    match = re.fullmatch(r"(?:\[(?P<bracketed>[^\]]+)\]|(?P<host>[^:]+)):(?P<port>[0-9]{1,5})", text)
    if match is None or int(match["port"]) > 65535:
        raise UserError(f'{text!r} is no address: give "host:port", with a port up to 65535 and IPv6 in brackets')
    host = match["bracketed"] or match["host"]
    try:
        ipaddress.ip_address(host)
    except ValueError:
        numeric = re.fullmatch(r"[0-9.]+", host) is not None  # an IP address with a slip in it
        if match["bracketed"] or numeric or not _HOST.fullmatch(host):
            raise UserError(f"{text!r} is no address: {host!r} is neither a DNS name nor an IP address") from None
    return Address(host, int(match["port"]))


def parse_dialled(text: str) -> Address:
    """Parse an address that others dial, or "none"; raise `UserError` for anything else."""
    if text == NONE:
        return Address("", 0)
    address = parse_address(text)
    if address.port == 0:
        raise UserError(f"address = {text!r}: others cannot dial port 0, give the one that it listens on")
    return address


def check_name(name: Any) -> None:
    """Raise `UserError` for what cannot be an island's name."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UserError(
            f"name = {name!r}: give a DNS label, up to 63 small letters, digits and hyphens from a letter on"
        )


def read_roster(path: Path) -> Roster:
    """Read a roster from a TOML file.

    Raises `UserError`, a line that names the file and the entry, for a file that cannot be read, unknown or missing
    keys, values of other types, names that are no DNS labels, bad addresses, two islands of one name or one address,
    and fewer than two islands.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"the roster {path} cannot be read ({error.strerror}): give the path of a TOML file") from None
    except UnicodeDecodeError:
        raise UserError(f"the roster {path} is not UTF-8: it is a TOML file, with [[island]] entries") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"the roster {path} is not TOML: {error}") from None
    try:
        return _roster(content)
    except UserError as error:
        raise UserError(f"the roster {path}: {error}") from None


def describe(former: Member | None, member: Member) -> str:
    """Return a line for people on a changed row."""
    where = "which only dials out" if not member.address.can_be_dialled else f"at {member.address}"
    if member.until_round is not None:
        return f"{member.name} is removed: no member from round {member.until_round + 1} on"
    if former is None or former.until_round is not None:
        return f"{member.name}, {where}, is a member from round {member.from_round + 1} on"
    if former.address != member.address:
        return f"{member.name} is {where.removeprefix('which ')} from now on"
    return f"{member.name} has new keys: every older certificate is refused"


def changes(former: Roster, roster: Roster) -> list[str]:
    """Return a line for each row that differs."""
    pairs = [(former.get(member.name), member) for member in roster.members]
    return [describe(before, after) for before, after in pairs if before != after]


def _roster(content: Mapping[str, Any]) -> Roster:
    _check_keys("", content, ("run", "island"))
    run, entries = content["run"], content["island"]
    if not isinstance(run, str) or not _RUN.fullmatch(run):
        raise UserError(f"run = {run!r}: give a name of letters, digits, dots, _ and -")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UserError("island: give one [[island]] for each, in double brackets, with name and address")
    members = tuple(_member(number, entry) for number, entry in enumerate(entries))
    if len(members) < 2:
        raise UserError(f"it has {len(members)} island, and a run has two at least: give each an [[island]]")
    seen: dict[str, int] = {}
    for number, (_, name, address, *_) in enumerate(members, start=1):
        for what, value in (("name", name), ("address", str(address)))[: 1 + address.can_be_dialled]:
            former = seen.setdefault(f"{what} = {value.lower()!r}", number)
            if former != number:
                raise UserError(f"[[island]] {former} and {number} both have {what} = {value!r}: give each its own")
    return Roster(run, members, len(members))


def _member(number: int, entry: Mapping[str, Any]) -> Member:
    where = f"[[island]] {number + 1}: "
    _check_keys(where, entry, ("name", "address"))
    name, address = entry["name"], entry["address"]
    if not isinstance(address, str):
        raise UserError(f'{where}address = {address!r}: give "host:port"')
    try:
        check_name(name)
        return Member(number, name, parse_dialled(address))
    except UserError as error:
        raise UserError(f"{where}{error}") from None


def _check_keys(where: str, table: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    for key in table:
        if key not in keys:
            near = difflib.get_close_matches(key, keys, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(keys)}"
            raise UserError(f"{where}unknown key {key!r}: {hint}")
    for key in keys:
        if key not in table:
            raise UserError(f"{where}{key!r} is missing")
