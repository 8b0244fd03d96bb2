"""Commands on the members of a run: invite and remove. Need no jax, but the key of the run's authority."""

import argparse
import dataclasses
import math
from pathlib import Path

from cryptography import x509

from noloco_jax.errors import UserError
from noloco_jax.islands.certificates import names_of, owner_and_issue
from noloco_jax.islands.discovery import Found, discover
from noloco_jax.islands.entries import (
    MEMBERS_FILE,
    Saved,
    describe,
    known_roster,
    now_version,
    read_members,
    signed,
    write_members,
)
from noloco_jax.islands.keys import AUTHORITY_KEY, CERTIFICATE, authority_key, make_keys, signing_alone
from noloco_jax.islands.protocol.members import OPEN, Entry
from noloco_jax.islands.roster import Address, Island, Roster, check_name, parse_dialled

_SECONDS = 10.0  # of asking and telling each island


def invite(flags: argparse.Namespace) -> int:
    """Make a new member's keys and its signed entry, and tell the islands."""
    check_name(flags.name)
    address = parse_dialled(flags.address)
    check_days(flags.days)
    with signing_alone(flags.keys):
        return _invite(flags, address)


def _invite(flags: argparse.Namespace, address: Address) -> int:
    saved = _saved(flags.keys)
    found = discover(saved, flags.keys, _SECONDS)
    current = known_roster(saved.roster, found.members, found.round)
    for name, other in current.islands:
        former = found.members.entry_of(name)
        if name == flags.name and (former is None or former.until_round == OPEN):
            raise UserError(
                f"{name} is a member already: give another --name; keys are made anew by `island keys --replace={name}`"
            )
        if other == address and address.can_be_dialled and name != flags.name:
            raise UserError(f"--address={address} is that of {name}: give the new member its own")
    from_round = _first_round(flags, found)  # fails where nobody answers: before keys are made that nobody needs
    make_keys(Roster(saved.roster.run, (Island(flags.name, address),)), flags.keys, flags.days, replace=[flags.name])
    former, folder = found.members.entry_of(flags.name), flags.keys / flags.name
    entry = Entry(
        id=_next_id(found) if former is None else former.id,
        name=flags.name,
        address=str(address),
        from_round=from_round,
        until_round=OPEN,
        issued=_issued(folder),
        # Its own statement of an address is older, whatever its clock said.
        version=now_version(max((one.version for one in found.members.entries if one.name == flags.name), default=0)),
    )
    told = _publish(flags.keys, saved, found, entry)
    write_members(folder / MEMBERS_FILE, saved.roster, told.members.entries)
    via = next(iter(told.statuses), saved.roster.names[0])
    print(
        f"made: {folder}, valid for {flags.days} days; carry it to {flags.name}'s machine, and nowhere else, and start "
        f"there:\n  python -m noloco_jax.island join --entry={flags.name}/{MEMBERS_FILE} --via={via} "
        f"--workdir=runs/{flags.name} --config.data.path=..."
    )
    return 0


def remove(flags: argparse.Namespace) -> int:
    """Sign the end of a membership, and tell the islands."""
    with signing_alone(flags.keys):
        return _remove(flags)


def _remove(flags: argparse.Namespace) -> int:
    saved = _saved(flags.keys)
    found = discover(saved, flags.keys, _SECONDS)
    id = found.members.id_of(flags.name)
    if id is None:
        found.roster.index(flags.name)  # raises, and names who is near
        raise UserError(f"{flags.name} is no member of {saved.roster.run}")
    former = found.members.entry_of(flags.name)
    if former is not None and former.until_round != OPEN:
        first = former.until_round if flags.from_round is None else _first_round(flags, found)
        if first > former.until_round:
            raise UserError(
                f"{describe(former)}, and a later end would make it one until then: give the command without "
                "--from_round to tell the islands again, or `island invite` it"
            )
    else:
        first = _first_round(flags, found)
    if flags.from_round is None and (last := _last_round(found, flags.name)) is not None:
        first = min(first, last)
    if former is None:
        entry = Entry(id, flags.name, "", 0, first, 0, now_version())
    else:
        address = found.members.address_of(flags.name)  # where it is until then
        version = now_version(former.version)
        entry = dataclasses.replace(former, address=address, until_round=first, version=version, signature="")
    told = _publish(flags.keys, saved, found, entry)
    if not told.statuses:
        raise UserError(
            f"none of the islands answers ({next(iter(told.answers.values()), 'there is none')}): "
            f"{flags.keys / MEMBERS_FILE} has the entry; give the same command again once one answers"
        )
    return 0


def check_days(days: int) -> None:
    """Raise `UserError` for a time that certificates cannot be valid for."""
    if not 1 <= days <= 3650:
        raise UserError(f"--days={days}: give 1 to 3650, the days that the authority itself is valid")


def _saved(folder: Path) -> Saved:
    """Return what the folder of keys says of the members; raise `UserError` where it cannot sign for them."""
    if not (folder / AUTHORITY_KEY).exists():
        raise UserError(f"{folder / AUTHORITY_KEY} is missing: give the folder that `island keys` made, with this key")
    if not (folder / MEMBERS_FILE).exists():
        raise UserError(
            f"{folder / MEMBERS_FILE} is missing: `island keys --roster=FILE --out={folder}` writes it, from the "
            "roster that the run began with"
        )
    return read_members(folder / MEMBERS_FILE)


def _publish(folder: Path, saved: Saved, found: Found, entry: Entry) -> Found:
    """Sign an entry, keep it with the keys, tell it to all islands, and return what they know then."""
    entry = signed(entry, saved.roster.run, authority_key(folder))
    found.members.merge([entry])
    write_members(folder / MEMBERS_FILE, saved.roster, found.members.entries)
    told = discover(Saved(saved.roster, found.members.entries), folder, _SECONDS, tell=[entry])
    heard = sorted(told.statuses)
    print(f"{describe(entry)}; told to {', '.join(heard) if heard else 'nobody: none of the islands answers'}")
    return told


def _first_round(flags: argparse.Namespace, found: Found) -> int:
    """Return the round from which on an entry holds: far enough ahead for the news to reach all before."""
    if flags.from_round is not None:
        if flags.from_round < 1:
            raise UserError(f"--from_round={flags.from_round}: rounds are counted from 1, as in the log")
        return flags.from_round - 1
    if not found.statuses:
        reason = next(iter(found.answers.values()), "there is none")
        raise UserError(f"none of the islands answers ({reason}), so that their round is unknown: give --from_round=N")
    return found.round + 1 + lead(len(found.active) + 1)


def _last_round(found: Found, leaving: str) -> int | None:
    """Return the last round of a run that has ended for all members that answer, but for `leaving`; None: one trains.

    They end no further round, and wait for those that are members of their last one.
    """
    members = found.members.active(max(found.round, 0))
    others = [status for name, status in found.statuses.items() if name in members and name != leaving]
    if not others or not all(status.finished for status in others):
        return None
    return max(min(status.round for status in others), 0)


def lead(count: int) -> int:
    """Return the rounds in which news reaches all of so many members: twice log2 of them, and a few more."""
    return 2 * math.ceil(math.log2(max(count, 2))) + 4


def _next_id(found: Found) -> int:
    known = [entry.id for entry in found.members.entries]
    return max([len(found.members.founders) - 1, *known]) + 1


def _issued(folder: Path) -> int:
    """Return when a member's certificate was made, in milliseconds."""
    certificate = x509.load_pem_x509_certificate((folder / CERTIFICATE).read_bytes())
    return owner_and_issue(names_of(certificate)[0])[1]
