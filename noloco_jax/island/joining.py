"""Start of an island, or of one of its processes: as one of a roster, or as a member that was invited."""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

from noloco_jax.cluster.host import use_cpu_cores, use_gpu_memory
from noloco_jax.cluster.place import Place
from noloco_jax.cluster.start import joined
from noloco_jax.config import CONFIG_FILE, TrainConfig, from_dict, load_saved, overridden, to_dict
from noloco_jax.errors import UserError
from noloco_jax.files import full_disk_told, write_whole
from noloco_jax.island.membership import Membership
from noloco_jax.island.mode import IslandMode
from noloco_jax.islands.client import Client
from noloco_jax.islands.discovery import introduce
from noloco_jax.islands.entries import MEMBERS_FILE, check_of, known_roster, members_at, own_address, read_members
from noloco_jax.islands.keys import Credentials, credentials_for, load_keys, owner_of
from noloco_jax.islands.peer_errors import PeerError
from noloco_jax.islands.protocol.members import Entry, Members
from noloco_jax.islands.query import ask_about
from noloco_jax.islands.roster import Island, Roster, parse_address, parse_dialled
from noloco_jax.train.training import train

_JOINED_FILE = "joined.json"  # in the workdir: what was learned from a member beside the configuration
_ASK_SECONDS = 30.0  # for a member to say what it trains


def train_island(config: TrainConfig, roster: Roster, place: Place | None, flags: argparse.Namespace) -> int:
    """Train as the island of a roster that the flags name; `place` among its processes, None: the only one."""
    return _train(config, roster, flags.name, credentials_for(roster, flags.name, flags.keys), (), place, flags)


def join_islands(overrides: Sequence[str], place: Place | None, flags: argparse.Namespace) -> int:
    """Train as a member that was invited, with the configuration that the islands have or the workdir keeps."""
    saved, keys = read_members(flags.entry), flags.keys or flags.entry.parent
    roster = Roster(
        saved.roster.run, tuple(Island(one.name, parse_dialled(one.address)) for one in saved.entries if one.address)
    )
    name = owner_of(keys, roster)
    credentials = load_keys(keys, name)
    members = Members(saved.roster.names, check_of(saved.roster.run, credentials), saved.entries)
    if members.id_of(name) is None:
        raise UserError(
            f"{flags.entry} has no entry of {name} that the authority of {keys} has signed: invite it again"
        )
    if (flags.workdir / CONFIG_FILE).exists():
        config, pace = load_saved(flags.workdir), _kept_pace(flags.workdir)
    else:
        config, pace = _told(known_roster(saved.roster, members, 0), name, credentials, members, flags.via)
        if not flags.dry_run:
            flags.workdir.mkdir(parents=True, exist_ok=True)
            write_whole(flags.workdir / _JOINED_FILE, json.dumps({"pace": pace}))
    flags.pace = flags.pace or pace
    return _train(overridden(config, overrides), saved.roster, name, credentials, members.entries, place, flags)


def _kept_pace(workdir: Path) -> str:
    """Return the pace with which an island joined; workdirs of earlier versions do not have it."""
    path = workdir / _JOINED_FILE
    return json.loads(path.read_text(encoding="utf-8"))["pace"] if path.exists() else "steps"


def _told(roster: Roster, name: str, credentials: Credentials, members: Members, via: str) -> tuple[TrainConfig, str]:
    """Return the configuration and the pace of a member's run, after telling it the entries known here."""
    client = Client(roster, name, credentials, via)
    try:
        introduce(client, members, _ASK_SECONDS)
    except PeerError as error:
        raise UserError(
            f"{via} cannot be asked what it trains ({error}): give --via=NAME of an island that runs"
        ) from None
    about = ask_about({via: client}, _ASK_SECONDS)[via]
    if isinstance(about, str):
        raise UserError(f"{via} does not say what it trains: {about}")
    return from_dict(about.trainers_config), about.identity.pace


def _train(
    config: TrainConfig,
    roster: Roster,
    name: str,
    credentials: Credentials | None,
    entries: Sequence[Entry],
    place: Place | None,
    flags: argparse.Namespace,
) -> int:
    """Train as one of the islands; check everything before compiling.

    Args:
      config: the run.
      roster: the founders.
      name: the island.
      credentials: its keys.
      entries: of members, beside those in the workdir.
      place: of this process among the island's; None: the only one.
      flags: those of `island train` and `island join`.
    """
    members = members_at(flags.workdir / MEMBERS_FILE, roster, credentials)
    members.merge(entries)
    if flags.address is not None:
        _move(members, name, flags.address, roster.run, credentials)
    options = {"pace": flags.pace, "linger": flags.linger, "catch_up": flags.catch_up}
    listen = None if flags.listen is None else parse_address(flags.listen)
    member = Membership(roster, name, credentials, **options, members=members, listen=listen)
    if not 0 <= flags.linger < math.inf:
        raise UserError(f"--linger={flags.linger}: give seconds, 0 to leave at once")
    member.check(config)
    use_gpu_memory()
    with joined(place, to_dict(config), flags.start_timeout) as num_processes, full_disk_told(flags.workdir):
        use_cpu_cores(member.own(config), num_processes)
        return train(
            config,
            flags.workdir,
            from_step=flags.from_step,
            dry_run=flags.dry_run,
            force_unlock=flags.force_unlock,
            wandb_project=flags.wandb,
            mode=IslandMode(member),
        )


def _move(members: Members, name: str, address: str, run: str, credentials: Credentials | None) -> None:
    """Sign a new address of this island, which the others will hear of; one that they know is not signed again."""
    if credentials is None:
        raise UserError(f"--address={address} is signed with the island's keys: give --keys")
    if str(parse_dialled(address)) == members.address_of(name):
        return
    former = max((entry.version for entry in members.entries if entry.name == name), default=0)
    members.merge([own_address(name, address, former, run, credentials)])
