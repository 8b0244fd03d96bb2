"""Calls to islands from commands: who answers, with what, and news for all. Needs no jax."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from noloco_jax.errors import UserError
from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.exchange import Broken, Unfit
from noloco_jax.islands.keys import CERTIFICATE, Credentials, authority_in, check_loopback, load_keys, owner_of
from noloco_jax.islands.peers import check_status
from noloco_jax.islands.roster import MEMBERS_FILE, BadRosterError, Roster, newest, parse_document, read_run
from noloco_jax.islands.transport import Dialler

_AT_ONCE = 16


@dataclass(frozen=True)
class Run:
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
      answers: island -> its status, or the reason for which it is unknown.
    """

    run: Run
    answers: Mapping[str, pb.Status | str]

    @property
    def statuses(self) -> dict[str, pb.Status]:
        return {name: answer for name, answer in self.answers.items() if isinstance(answer, pb.Status)}

    @property
    def round(self) -> int:
        """The last round that one of them has ended; -1: none."""
        return max((status.round for status in self.statuses.values()), default=-1)


def open_run(roster: Path, keys: Path | None) -> Run:
    """Return a run from a roster's file and a folder of keys: a whole one, or an island's.

    Raises `UserError` for files that are not right, and where keys are missing.
    """
    pem = authority_in(keys)
    known = read_run(roster, pem)
    if keys is None:
        check_loopback(known)
        return Run(known, "", None)
    if (keys / CERTIFICATE).exists():
        name = owner_of(keys, known)
        return Run(known, name, load_keys(keys, name))
    known = newest(keys / MEMBERS_FILE, known, pem)
    for name in sorted(known.names, key=lambda name: known.member(name).until_round is not None):
        if (keys / name / CERTIFICATE).exists():
            return Run(known, name, load_keys(keys / name, name))
    raise UserError(f"{keys} holds no keys: give the folder that `island keys` made, or one island's own")


def discover(run: Run, seconds: float, **fields: Any) -> Found:
    """Greet all islands of a run, also those that only a newer roster of theirs names.

    Args:
      run: the run.
      seconds: the limit of each answer.
      **fields: of the greeting.
    """

    async def asked() -> Found:
        dialler = Dialler(run.name, run.credentials, run.roster)
        try:
            return await ask_all(run, dialler, seconds, **fields)
        finally:
            await dialler.close()

    return asyncio.run(asked())


async def ask_all(run: Run, dialler: Dialler, seconds: float, **fields: Any) -> Found:
    """Greet all islands: see `discover`."""
    answers: dict[str, pb.Status | str] = {}
    limit = asyncio.Semaphore(_AT_ONCE)
    greeting = pb.Greeting(roster_version=run.roster.version, wants_roster=True, **fields)

    async def ask(name: str) -> None:
        try:
            async with limit:
                status = await dialler.greet(name, greeting, seconds)
            check_status(status)
            answers[name] = status.wrong or status  # of commands, only former members are refused
        except (Broken, Unfit) as error:
            answers[name] = str(error)

    while new := [one.name for one in run.roster.members if one.name not in answers and one.until_round is None]:
        await asyncio.gather(*map(ask, new))
        for status in answers.values():
            if isinstance(status, pb.Status) and status.HasField("roster"):
                run = replace(run, roster=_newer(run, status.roster.SerializeToString()))
        dialler.follow(run.roster, {})
    return Found(run, {name: answers[name] for name in run.roster.names if name in answers})


def _newer(run: Run, document: bytes) -> Roster:
    """Return an island's roster if it is newer, and signed."""
    if run.credentials is None:
        return run.roster
    try:
        found = parse_document(document, run.roster.run, run.credentials.authority)
    except BadRosterError:
        return run.roster
    return found if found.version > run.roster.version and found.founders == run.roster.founders else run.roster
