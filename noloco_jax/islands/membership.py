"""Membership of a trainer's run in a group of islands: checks of its configuration, and what it tells the others."""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from noloco_jax.checkpoint.saved import Saved
from noloco_jax.config import TrainConfig, from_dict, to_dict
from noloco_jax.data import renumbered
from noloco_jax.errors import UserError
from noloco_jax.files import write_whole
from noloco_jax.islands.keys import Credentials
from noloco_jax.islands.payload import specs_of
from noloco_jax.islands.peers import PROTOCOL
from noloco_jax.islands.roster import Address, Roster
from noloco_jax.spmd.programs import Programs

# Groups and fields of a configuration that all islands must have equal; all others may differ.
COMMON = ("method", "num_steps", "num_replicas", "seed", "model", "inner", "outer")
ISLAND_FILE = "island.json"


@dataclass(frozen=True)
class Membership:
    """Place of a run among the islands.

    Attributes:
      roster: the members as they are known at the start.
      name: the island's name.
      credentials: the island's keys; None without TLS.
      pace: "steps": every island takes every inner step; "time": an island takes as many of a round's inner steps as it
        has time for, see `pace.py`. A message's weight is its number of inner steps.
      linger: seconds for which an island that has taken its last step serves its weights, until all have.
      listen: the address to listen at; None: that in the roster.
    """

    roster: Roster
    name: str
    credentials: Credentials | None
    pace: str = "steps"
    linger: float = 600.0
    listen: Address | None = None

    def __str__(self) -> str:
        """Return a line for the banner, without secrets."""
        security = "no TLS" if self.credentials is None else "mutual TLS"
        names, address = self.roster.names, self.roster.member(self.name).address
        place = f"island {names.index(self.name) + 1} of {len(names)} in the run {self.roster.run}"
        return f"{self.name}, {place}, at {address}, {security}"

    @property
    def replica(self) -> int:
        """Number of its replica, by which it reads its share of the data: the member's id."""
        return self.roster.member(self.name).id

    def check(self, config: TrainConfig) -> None:
        """Raise `UserError` where the configuration does not fit these islands, or asks for what islands do not do."""
        count, outer = self.roster.num_founders, config.outer
        if config.num_replicas != count:
            raise UserError(
                f"num_replicas={config.num_replicas} and the run {self.roster.run} began with {count} islands: give "
                f"--config.num_replicas={count} on all of them"
            )
        if config.method != "noloco":
            raise UserError(f"method={config.method!r}: islands exchange in pairs, give --config.method=noloco")
        if outer.delay:
            raise UserError(
                f"outer.delay={outer.delay!r} is not for islands, whose corrections are applied when they arrive, late "
                "already: leave out --config.outer.delay"
            )
        for name, wanted, given, why in (
            ("outer.group_size", 2, outer.group_size, "they exchange in pairs (best,groups=2 of configs/c4_1b.py)"),
            ("mesh.stage", 1, config.mesh.stage, "which use mesh.fsdp and mesh.tensor to spread a model over devices"),
        ):
            if given != wanted:
                raise UserError(f"{name}={given!r} is not for islands, {why}: give --config.{name}={wanted}")

    def warning(self, config: TrainConfig) -> str | None:
        """Return a line where this member reads what others read that came later too, or None."""
        if self.replica < self.roster.num_founders or config.data.shuffle_buffer > 1:
            return None
        return (
            f"warning: data.shuffle_buffer=1 keeps the order of the files, in which {self.name} and every other member "
            "that was invited reads all of them: give each that joins --config.data.shuffle_buffer=1000"
        )

    def check_present(self, round: int) -> None:
        """Raise `UserError` where the island was removed, and `round` was its last one or a later one."""
        if self.roster.is_over(self.name, round + 1):
            raise UserError(
                f"{self.name} was removed from the run, before round {round + 2}: have it invited again "
                f"(`island invite --name={self.name}`), and start it with what that makes"
            )

    def own(self, config: TrainConfig) -> TrainConfig:
        """Return the configuration of the island's program, which holds one replica."""
        return replace(config, num_replicas=1, mesh=replace(config.mesh, replica=1))

    def data_position(self, saved: Saved) -> dict[str, Any]:
        """Return the data position of a checkpoint; raise `UserError` where it is not this island's."""
        position, *others = saved.positions
        if saved.sync_state is None or others or position["replica"] != self.replica:
            of = "a run without islands" if saved.sync_state is None else f"replica {position['replica']}"
            raise UserError(
                f"the checkpoint of step {saved.step} is of {of}, and {self.name} is replica {self.replica}: give its "
                "own --workdir"
            )
        return renumbered(position, self.replica, self.roster.num_founders)

    def identity(self, config: TrainConfig, programs: Programs, fingerprint: str | None) -> dict[str, str]:
        """Return the values that all islands must have equal; those at their defaults are left out.

        `fingerprint` identifies the tokenizer; None: the run reads token ids.
        """
        defaults = dict(_fields(common_values(from_dict({"method": config.method}))))
        own = {name: value for name, value in _fields(common_values(config)) if value != defaults.get(name)}
        arrays = digest([str(spec) for spec in specs_of(programs.state.params)])
        return {
            **run_identity(self.roster),
            "pace": self.pace,
            "tokenizer": fingerprint or "none",
            "model's arrays": arrays,
            **own,
        }


def run_identity(roster: Roster) -> dict[str, str]:
    """Return what islands of any training compare first."""
    return {"protocol": PROTOCOL, "run": roster.run, "roster": roster.founders}


def incarnation_of(workdir: Path) -> tuple[int, bool]:
    """Return an incarnation larger than that of every earlier start, and True if an earlier start has trained.

    Milliseconds leave room for increments, and the clock still counts up where a workdir was lost with its disk.
    """
    path = workdir / ISLAND_FILE
    before = json.loads(path.read_text(encoding="utf-8"))["incarnation"] if path.exists() else 0
    return max(before + 1000, time.time_ns() // 1_000_000), before > 0


def write_incarnation(workdir: Path, incarnation: int) -> None:
    workdir.mkdir(parents=True, exist_ok=True)
    write_whole(workdir / ISLAND_FILE, json.dumps({"incarnation": incarnation}))


def common_values(config: TrainConfig) -> dict[str, Any]:
    """Return the values that all islands must have equal, by the names of `COMMON`."""
    values = to_dict(config)
    outer = {name: value for name, value in values["outer"].items() if name != "offload"}
    return {name: values[name] for name in COMMON} | {"outer": outer}


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _fields(values: Mapping[str, Any], group: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path of each field and its value as JSON; a long one as its beginning and digest."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _fields(value, f"{group}{name}.")
        else:
            text = json.dumps(value, default=str)
            yield f"{group}{name}", text if len(text) <= 80 else f"{text[:60]}... {digest(value)}"
