"""Commands on keys and members: keys, invite, remove. Needs no jax, but the key of the run's authority."""

import argparse
import math
from dataclasses import replace
from pathlib import Path

from noloco_jax.errors import UserError
from noloco_jax.files import check_writable
from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.ask import Found, RosterAndKeys, discover, open_run
from noloco_jax.islands.keys import AUTHORITY, AUTHORITY_KEY, authority_key, issue_in, make_keys, signing_alone
from noloco_jax.islands.roster import (
    MEMBERS_FILE,
    Member,
    Roster,
    check_name,
    describe,
    newest,
    parse_dialled,
    read_members,
    read_roster,
    write_members,
)

_SECONDS = 10.0  # of asking and telling each island


def keys(flags: argparse.Namespace) -> int:
    """Make the keys that are missing, and print what to do with them."""
    _check_days(flags.days)
    roster = read_roster(flags.roster)
    check_writable(flags.out)
    with signing_alone(flags.out):
        path = flags.out / AUTHORITY
        authority = path.read_bytes() if path.exists() else None
        known = flags.out / MEMBERS_FILE
        if known.exists() and read_members(known, None, authority).version > 1:
            roster = newest(known, roster, authority)  # raises where the file has changed since
        made = make_keys(roster, flags.out, flags.days, flags.replace)
        if kept := [name for name in roster.names if name not in made]:
            print(f"kept as they are: {', '.join(kept)}")
        for name in made:
            print(
                f"made: {flags.out / name}, valid for {flags.days} days; carry it to {name}'s machine, and nowhere else"
            )
        if made:
            print(
                f"{flags.out / AUTHORITY_KEY} signs for any name of {roster.run}: no island needs it, keep it off "
                "their machines; you need it here again for `island invite` and `island remove`"
            )
        if roster.version == 0 and (made or not known.exists()):
            roster = replace(roster, version=1).signed(authority_key(flags.out))
            write_members(known, roster)
        if flags.replace:
            following = roster
            for name in flags.replace:
                following = following.changed(following.member(name)._replace(issued=issue_in(flags.out / name)))
            _publish(flags.out, open_run(known, flags.out), replace(following, version=roster.version + 1))
    return 0


def invite(flags: argparse.Namespace) -> int:
    """Make a new member's keys and its row, and tell the islands; of a member, change the address.

    A row that is known already is told to the islands again.
    """
    check_name(flags.name)
    _check_days(flags.days)
    address = parse_dialled(flags.address)
    with signing_alone(flags.keys):
        run = _signing_run(flags.keys)
        found = discover(run, _SECONDS)
        roster = found.run.roster
        for other in roster.members:
            if other.address == address and address.can_be_dialled and other.name != flags.name:
                raise UserError(f"--address={address} is that of {other.name}: give the new member its own")
        former, folder = roster.get(flags.name), flags.keys / flags.name
        if former is not None and former.until_round is None:
            if former.address == address:
                print(
                    f"{flags.name} is a member already, at {address}, which is told again: give another --address to "
                    "move it; keys are made anew by `island keys --replace=NAME`"
                )
            else:
                roster = roster.changed(former._replace(address=address))
            _check_told(flags.keys, found, _publish(flags.keys, found.run, roster))
            return 0
        first = _first_round(flags, found)  # fails where nobody answers: before keys are made that nobody needs
        id = max(member.id for member in roster.members) + 1 if former is None else former.id
        row = Member(id, flags.name, address, first)
        make_keys(Roster(roster.run, (row,), 1), flags.keys, flags.days, replace=[flags.name])
        published = _publish(flags.keys, found.run, roster.changed(row._replace(issued=issue_in(folder))))
        write_members(folder / MEMBERS_FILE, published)
    print(
        f"made: {folder}, valid for {flags.days} days; carry it to {flags.name}'s machine, and nowhere else, and start "
        f"there, with the configuration of the others:\n  python -m noloco_jax.island train --config=... "
        f"--roster={flags.name}/{MEMBERS_FILE} --name={flags.name} --keys={flags.name} --workdir=runs/{flags.name}"
    )
    return 0


def remove(flags: argparse.Namespace) -> int:
    """Sign the end of a membership, and tell the islands."""
    with signing_alone(flags.keys):
        found = discover(_signing_run(flags.keys), _SECONDS)
        roster = found.run.roster
        former = roster.member(flags.name)
        if former.until_round is not None and flags.from_round is None:
            # Again, for those that did not answer.
            _check_told(flags.keys, found, _publish(flags.keys, found.run, roster))
            return 0
        first = _first_round(flags, found)
        if former.until_round is not None and first > former.until_round:
            raise UserError(
                f"{describe(None, former)}, and a later end would make it one until then: give the command without "
                "--from_round to tell the islands again, or `island invite` it"
            )
        # A row that ends before it begins is no member in any round; 0 would stand for one that stays.
        published = _publish(flags.keys, found.run, roster.changed(former._replace(until_round=max(first, 1))))
    _check_told(flags.keys, found, published)
    return 0


def lead(count: int) -> int:
    """Return the rounds in which news reaches all of so many members: twice log2 of them, and a few more."""
    return 2 * math.ceil(math.log2(max(count, 2))) + 4


def _check_days(days: int) -> None:
    if not 1 <= days <= 3650:
        raise UserError(f"--days={days}: give 1 to 3650, the days that the authority itself is valid")


def _signing_run(folder: Path) -> RosterAndKeys:
    """Return the run of a whole folder of keys; raise `UserError` where it cannot sign for it."""
    if not (folder / AUTHORITY_KEY).exists():
        raise UserError(f"{folder / AUTHORITY_KEY} is missing: give the folder that `island keys` made, with this key")
    if not (folder / MEMBERS_FILE).exists():
        raise UserError(
            f"{folder / MEMBERS_FILE} is missing: `island keys --roster=FILE --out={folder}` writes it, from the "
            "roster that the run began with"
        )
    read_members(folder / MEMBERS_FILE, None, (folder / AUTHORITY).read_bytes())
    return open_run(folder / MEMBERS_FILE, folder)


def _publish(folder: Path, run: RosterAndKeys, roster: Roster) -> Roster:
    """Sign a roster, keep it with the keys, tell it to all islands, and return it."""
    signed = roster if roster.document else roster.signed(authority_key(folder))
    write_members(folder / MEMBERS_FILE, signed)
    found = discover(replace(run, roster=signed), _SECONDS, roster=pb.SignedRoster.FromString(signed.document))
    heard = sorted(name for name, status in found.statuses.items() if status.roster_version >= signed.version)
    for before, after in ((run.roster.get(member.name), member) for member in signed.members):
        if before != after:
            print(describe(before, after))
    print(f"roster version {signed.version} is told to {', '.join(heard) or 'nobody: none of the islands answers'}")
    return signed


def _check_told(folder: Path, found: Found, published: Roster) -> None:
    """Raise `UserError` where nobody was there to be told of a roster."""
    if not found.statuses:
        raise UserError(
            f"none of the islands answers ({found.fault}): "
            f"{folder / MEMBERS_FILE} has version {published.version}; give the same command again once one answers"
        )


def _first_round(flags: argparse.Namespace, found: Found) -> int:
    """Return the round from which on a row holds: far enough ahead for the news to reach all before."""
    if flags.from_round is not None:
        if flags.from_round < 1:
            raise UserError(f"--from_round={flags.from_round}: rounds are counted from 1, as in the log")
        if flags.from_round > (found.num_rounds or math.inf):
            raise UserError(
                f"--from_round={flags.from_round}: the run ends after round {found.num_rounds}, give an earlier one"
            )
        return flags.from_round - 1
    if not found.statuses:
        raise UserError(
            f"none of the islands answers ({found.fault}), so that their round is unknown: give --from_round=N"
        )
    first = found.round + 1 + lead(len(found.run.roster.active(max(found.round, 0))) + 1)
    if first >= (found.num_rounds or math.inf):
        raise UserError(
            f"the run ends after round {found.num_rounds}, and the news may need until round {first + 1} to reach all: "
            "give an earlier --from_round=N, or let the run end"
        )
    return first
