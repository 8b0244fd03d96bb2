"""Calls to islands from commands: who answers, with what, and news for all. Needs no jax."""

import asyncio
import contextlib
import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from noloco_jax.errors import UserError
from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.exchange import ConnectionLost, ProtocolError
from noloco_jax.islands.keys import CERTIFICATE, Credentials, authority_in, check_loopback, load_keys, owner_of
from noloco_jax.islands.peers import MAX_ABOUT, check_status
from noloco_jax.islands.roster import MEMBERS_FILE, BadRosterError, Roster, newest, parse_document, read_run
from noloco_jax.islands.standing import Watched, present
from noloco_jax.islands.transport import Dialler

_AT_ONCE = 16
_TRIES = 3  # islands that are asked for what any of them knows


@dataclass(frozen=True)
class RosterAndKeys:
    """A run as a command reaches it.

    Attributes:
      roster: its members, as far as they are known.
      name: in whose name the command calls.
      credentials: its keys; None without TLS.
    """

    roster: Roster
    name: str
    credentials: Credentials | None


@dataclass(frozen=True)
class Found:
    """Islands of a run and what they answer.

    Attributes:
      run: the run, with the newest roster that one of them has.
      islands: what is known of each. Islands whose membership has ended are not asked.
    """

    run: RosterAndKeys
    islands: Mapping[str, Watched]

    @property
    def statuses(self) -> dict[str, pb.Status]:
        return {name: one.status for name, one in self.islands.items() if one.status is not None}

    @property
    def fault(self) -> str:
        """The reason for which the first silent one does not answer."""
        return next((one.fault for one in self.islands.values() if one.fault), "there is none")

    @property
    def round(self) -> int:
        """The last round that one of them has ended; -1: none."""
        return max((status.round for status in self.statuses.values()), default=-1)

    @property
    def num_rounds(self) -> int:
        """Rounds of the whole run, as most islands tell; 0: unknown."""
        told = [status.num_rounds for status in self.statuses.values() if status.num_rounds]
        return statistics.mode(told) if told else 0


def open_run(roster: Path, keys: Path | None) -> RosterAndKeys:
    """Return a run from a roster's file and a folder of keys: a whole one, or an island's.

    Raises `UserError` for files that are not right, and where keys are missing.
    """
    pem = authority_in(keys)
    known = read_run(roster, pem)
    if keys is None:
        check_loopback(known)
        return RosterAndKeys(known, "", None)
    if (keys / CERTIFICATE).exists():
        name = owner_of(keys, known)
        return RosterAndKeys(known, name, load_keys(keys, name))
    known = newest(keys / MEMBERS_FILE, known, pem)
    for name in sorted(known.names, key=lambda name: known.member(name).until_round is not None):
        if (keys / name / CERTIFICATE).exists():
            return RosterAndKeys(known, name, load_keys(keys / name, name))
    raise UserError(f"{keys} holds no keys: give the folder that `island keys` made, or one island's own")


def discover(run: RosterAndKeys, seconds: float, **fields: Any) -> Found:
    """Greet all islands of a run, also those that only a newer roster of theirs names.

    Each has so many seconds to answer; `fields` are those of the greeting.
    """

    async def asked() -> Found:
        dialler = Dialler(run.name, run.credentials, run.roster)
        try:
            return await ask_all(run, dialler, seconds, **fields)
        finally:
            await dialler.close()

    return asyncio.run(asked())


async def ask_all(run: RosterAndKeys, dialler: Dialler, seconds: float, **fields: Any) -> Found:
    """Greet all islands: see `discover`."""
    islands: dict[str, Watched] = {}
    limit = asyncio.Semaphore(_AT_ONCE)
    greeting = pb.Greeting(roster_version=run.roster.version, **fields)

    async def ask(name: str) -> None:
        try:
            async with limit:
                status = await dialler.greet(name, greeting, seconds)
            check_status(status)
            # Of commands, only former members are refused.
            islands[name] = Watched(None, status.wrong) if status.wrong else Watched(status, "")
        except (ConnectionLost, ProtocolError) as error:
            islands[name] = Watched(None, str(error))

    found = Found(run, islands)
    while new := [one.name for one in present(found.run.roster, found.statuses.values()) if one.name not in islands]:
        await asyncio.gather(*map(ask, new))
        run = await take_newest(found.run, dialler, found.statuses, seconds)
        found = replace(found, run=run)
    silent = [name for name, one in islands.items() if one.fault]
    for name, phase in (await ask_about(silent, list(found.statuses), dialler, seconds)).items():
        islands[name].told = phase
    return Found(run, {name: islands[name] for name in run.roster.names if name in islands})


async def take_newest(
    run: RosterAndKeys, dialler: Dialler, statuses: Mapping[str, pb.Status], seconds: float
) -> RosterAndKeys:
    """Return the run with the newest roster that islands have, and let the dialler follow it.

    Of the islands with a newer version a few are asked for it, until one gives what the authority has signed: answers
    that carried it would cost the square of the number of members.
    """
    newer = [name for name, status in statuses.items() if status.roster_version > run.roster.version]
    newest = sorted(newer, key=lambda name: -statuses[name].roster_version)[:_TRIES]
    for name in (*newest, *random.sample(newer, min(_TRIES, len(newer)))):  # the highest claims may be lies
        if statuses[name].roster_version <= run.roster.version:
            continue
        greeting = pb.Greeting(roster_version=run.roster.version, wants_roster=True)
        with contextlib.suppress(ConnectionLost):
            status = await dialler.greet(name, greeting, seconds)
            run = replace(run, roster=_newer(run, status.roster.SerializeToString()))
    dialler.follow(run.roster)
    return run


async def ask_about(silent: Sequence[str], asked: Sequence[str], dialler: Dialler, seconds: float) -> dict[str, Any]:
    """Return the phases that a few of the islands in `asked` have last heard of islands that do not answer."""
    greeting = pb.Greeting(about=silent[:MAX_ABOUT])
    votes: dict[str, Counter[Any]] = {}

    async def ask(name: str) -> None:
        with contextlib.suppress(ConnectionLost):
            for peer in (await dialler.greet(name, greeting, seconds)).peers:
                if not peer.fault and peer.phase != pb.Status.STARTING:  # else nothing is known of it
                    votes.setdefault(peer.name, Counter())[peer.phase] += 1

    if silent:
        await asyncio.gather(*map(ask, random.sample(asked, min(_TRIES, len(asked)))))
    return {name: votes[name].most_common(1)[0][0] for name in silent if name in votes}


def _newer(run: RosterAndKeys, document: bytes) -> Roster:
    """Return an island's roster if it is newer, and signed."""
    if run.credentials is None or not document:
        return run.roster
    try:
        found = parse_document(document, run.roster.run, run.credentials.authority)
    except BadRosterError:
        return run.roster
    return found if found.version > run.roster.version and found.founders == run.roster.founders else run.roster
