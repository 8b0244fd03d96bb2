"""Roster of a run's islands: their names in an order common to all, and their addresses.

    run = "c4-125m"

    [[island]]
    name = "paris"
    address = "paris.example.org:7070"

    [[island]]
    name = "berlin"
    address = "10.0.0.7:7070"
    comment = "the one with eight GPUs"

    [[island]]
    name = "oslo"
    address = "none"  # it only dials out

An island's place in the file is the number of its replica. Its name is what its certificate is made out to.
"""

import difflib
import hashlib
import ipaddress
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from noloco_jax.errors import UserError

# A label as in RFC 1035, which begins with a letter: one of digits alone is read as an IP address by some.
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_HOST = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


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
        """False for an island that only dials out."""
        return bool(self.host)

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can reach it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host.lower().rstrip(".") == "localhost"


class Island(NamedTuple):
    """Entry of the roster."""

    name: str
    address: Address


@dataclass(frozen=True)
class Roster:
    """Islands of a run.

    Attributes:
      run: the run's name.
      islands: in the order of the file; an island's position is the number of its replica.
    """

    run: str
    islands: tuple[Island, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(island.name for island in self.islands)

    @property
    def version(self) -> str:
        """Digest of everything that must be equal everywhere: the run's name and the islands' names in their order.

        Pairing depends on these alone. Addresses may differ, as a machine can be known by one inside its own network
        and by another outside.
        """
        return hashlib.sha256(json.dumps([self.run, *self.names]).encode()).hexdigest()[:16]

    def index(self, name: str) -> int:
        """Return the number of an island's replica; raise `UserError` for a name that the roster does not hold."""
        if name not in self.names:
            near = difflib.get_close_matches(name, self.names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(self.names[:8])}"
            raise UserError(f"the roster of {self.run} has no island {name!r}: {hint}")
        return self.names.index(name)

    def address(self, name: str) -> Address:
        """Return an island's address; raise `UserError` for a name that the roster does not hold."""
        return self.islands[self.index(name)].address


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


def _roster(content: Mapping[str, Any]) -> Roster:
    _check_keys("", content, required=("run", "island"), optional=("comment",))
    run, entries = content["run"], content["island"]
    if not isinstance(run, str) or not _RUN.fullmatch(run):
        raise UserError(f"run = {run!r}: give a name of letters, digits, dots, _ and -")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UserError("island: give one [[island]] for each, in double brackets, with name and address")
    islands = tuple(_island(number, entry) for number, entry in enumerate(entries, start=1))
    if len(islands) < 2:
        raise UserError(f"it has {len(islands)} island, and a run has two at least: give each an [[island]]")
    seen: dict[str, int] = {}
    for number, (name, address) in enumerate(islands, start=1):
        for what, value in (("name", name), ("address", str(address)))[: 1 + address.can_be_dialled]:
            former = seen.setdefault(f"{what} = {value.lower()!r}", number)
            if former != number:
                raise UserError(f"[[island]] {former} and {number} both have {what} = {value!r}: give each its own")
    return Roster(run, islands)


def _island(number: int, entry: Mapping[str, Any]) -> Island:
    where = f"[[island]] {number}: "
    _check_keys(where, entry, required=("name", "address"), optional=("comment",))
    name, address = entry["name"], entry["address"]
    if not isinstance(address, str):
        raise UserError(f'{where}address = {address!r}: give "host:port"')
    try:
        check_name(name)
        return Island(name, parse_dialled(address))
    except UserError as error:
        raise UserError(f"{where}{error}") from None


def _check_keys(where: str, table: Mapping[str, Any], required: tuple[str, ...], optional: tuple[str, ...]) -> None:
    for key in table:
        if key not in (*required, *optional):
            near = difflib.get_close_matches(key, (*required, *optional), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it may have {', '.join((*required, *optional))}"
            raise UserError(f"{where}unknown key {key!r}: {hint}")
    for key in required:
        if key not in table:
            raise UserError(f"{where}{key!r} is missing")
    if not isinstance(table.get("comment", ""), str):
        raise UserError(f"{where}comment = {table['comment']!r}: give a text")
