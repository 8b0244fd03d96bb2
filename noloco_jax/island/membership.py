"""Membership of a run in a group of islands: its part of the configuration, its peers, and its start."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from noloco_jax.checkpoint.saved import Saved
from noloco_jax.cluster.processes import Processes
from noloco_jax.config import TrainConfig, from_dict, to_dict
from noloco_jax.data import renumbered
from noloco_jax.errors import UserError
from noloco_jax.islands.agent import Agent, Healed
from noloco_jax.islands.entries import known_roster
from noloco_jax.islands.keys import Credentials
from noloco_jax.islands.partners import partner_in
from noloco_jax.islands.payload import Codec, codec_of, specs_of
from noloco_jax.islands.protocol.context import Settings
from noloco_jax.islands.protocol.island import Journal
from noloco_jax.islands.protocol.members import Members
from noloco_jax.islands.protocol.messages import Identity
from noloco_jax.islands.roster import Address, Roster
from noloco_jax.islands.start import open_agent
from noloco_jax.islands.state_shares import layouts_of
from noloco_jax.islands.steps import IslandSteps, weight_specs
from noloco_jax.methods import schedule_of
from noloco_jax.outer.fragments import described
from noloco_jax.outer.rule import at_num_outer_steps
from noloco_jax.spmd.first_process import from_first_process
from noloco_jax.spmd.inner import at_step
from noloco_jax.spmd.programs import Programs, TrainState
from noloco_jax.spmd.solo import SoloPrograms, compile_solo
from noloco_jax.train.messages import Messages
from noloco_jax.train.mode import Resumed

# Groups and fields of a configuration that all islands must have equal; all others may differ.
COMMON = ("method", "num_steps", "num_replicas", "seed", "model", "inner", "outer")
_MOST_ROUNDS = 2**30  # that a donor may say it has ended: counters hold twice as many


@dataclass(frozen=True)
class Membership:
    """Place of a run among the islands.

    Attributes:
      roster: the islands that the run began with.
      name: the island's name.
      credentials: the island's keys; None without TLS.
      patience: rounds of a fragment for which a message waits for its partner's.
      pace: "steps": every island takes every inner step; "time": an island takes as many of a round's inner steps as it
        has time for while the fastest takes all of them. One inner step may then stand for several steps of the run's
        schedule of `num_steps`, which rounds and learning rates follow. A message's weight is its number of inner
        steps.
      catch_up: "weights": it catches up from the weights of others, and begins with fresh moments and a rate that
        rises; "whole": from their whole state. None: weights.
      linger: seconds for which an island that has taken its last step serves its weights, until all have.
      members: the members as they are known at the start; None: those of the roster.
      listen: the address to listen at; None: that in the roster, see `Server`.
      at_once: True if outer steps wait for their exchange, for tests that compare islands with one program.
    """

    roster: Roster
    name: str
    credentials: Credentials | None
    patience: int = 2
    pace: str = "steps"
    catch_up: str | None = None
    listen: Address | None = None
    at_once: bool = False
    linger: float = 600.0
    members: Members = None  # pyright: ignore[reportAssignmentType]

    def __post_init__(self):
        if self.members is None:
            object.__setattr__(self, "members", Members(self.roster.names))

    def __str__(self) -> str:
        """Return a line for the banner, without secrets."""
        security = "no TLS" if self.credentials is None else "mutual TLS"
        known = self.known
        return (
            f"{self.name}, {known.index(self.name) + 1} of {len(known.islands)} of {self.roster.run}, at "
            f"{known.address(self.name)}, {security}"
        )

    @property
    def known(self) -> Roster:
        """Members as they are known at the start, and their addresses."""
        return known_roster(self.roster, self.members, 0)

    @property
    def replica(self) -> int:
        """Number of its replica, by which it reads its share of the data: the member's id."""
        id = self.members.id_of(self.name)
        return self.roster.index(self.name) if id is None else id

    def check(self, config: TrainConfig) -> None:
        """Raise `UserError` where the configuration does not fit these islands, or asks for what islands do not do."""
        count, outer = len(self.roster.islands), config.outer
        if config.num_replicas != count:
            raise UserError(
                f"num_replicas={config.num_replicas} and the roster of {self.roster.run} has {count} islands: give "
                f"--config.num_replicas={count} on all of them"
            )
        if config.method != "noloco":
            raise UserError(f"method={config.method!r}: islands meet in pairs, give --config.method=noloco")
        for name, wanted, given, why in (
            ("outer.group_size", 2, outer.group_size, "they meet in pairs"),
            ("outer.delay", 0, outer.delay, "whose corrections are applied when they arrive, late already"),
            ("mesh.stage", 1, config.mesh.stage, "which use mesh.fsdp and mesh.tensor to spread a model over devices"),
        ):
            if given != wanted:
                raise UserError(f"{name}={given!r} is not for islands, {why}: give --config.{name}={wanted}")

    def warning(self, config: TrainConfig) -> str | None:
        """Return a line where this member reads what others read that came later too, or None."""
        if self.replica < len(self.roster.islands) or config.data.shuffle_buffer > 1:
            return None
        return (
            f"warning: data.shuffle_buffer=1 keeps the order of the files, in which {self.name} and every other member "
            "that was invited reads all of them: give each that joins --config.data.shuffle_buffer=1000"
        )

    def check_present(self, round: int) -> None:
        """Raise `UserError` where the island was removed, and `round` was its last one or a later one."""
        if self.members.is_over(self.name, round + 1):
            raise UserError(
                f"{self.name} was removed from the run, before round {round + 2}: have it invited again "
                f"(`island invite --name={self.name}`), and join with what that makes"
            )

    def own(self, config: TrainConfig) -> TrainConfig:
        """Return the configuration of the island's program, which holds one replica."""
        return replace(config, num_replicas=1, mesh=replace(config.mesh, replica=1))

    def settings(self, config: TrainConfig) -> Settings:
        """Return the protocol's settings: every outer step is a round, so that patience counts all fragments."""
        return Settings(
            patience=self.patience * config.outer.fragments,
            keeps_pace=self.pace == "time",
            awaits_absent=True,
            whole_state=self.takes_whole_state(config),
            fits=lambda round, step: 0 < step < config.num_steps and round < _MOST_ROUNDS,
        )

    def takes_whole_state(self, config: TrainConfig) -> bool:
        """Return whether it catches up from a whole state."""
        return self.catch_up == "whole"

    @staticmethod
    def messages(config: TrainConfig, solo: SoloPrograms) -> Messages:
        """Return the traffic of an island in a round that has a partner."""
        size = sum(spec.nbytes for spec in specs_of(solo.code))
        return Messages(outer_step=size)

    @staticmethod
    def codec(config: TrainConfig, solo: SoloPrograms) -> Codec:
        """Return the codec of an island's messages. Raises `UserError` as `codec_of`."""
        return codec_of(solo.wire, solo.message, solo.code, solo.cuts)

    def data_position(self, saved: Saved) -> dict[str, Any]:
        """Return the data position of a checkpoint, renumbered where the roster was made longer: see `data.renumbered`.

        Raises `UserError` where the checkpoint is not this island's.
        """
        position, *others = saved.positions
        if others or position["replica"] != self.replica:
            of = f"all {1 + len(others)} replicas" if others else f"replica {position['replica']}"
            raise UserError(
                f"the checkpoint of step {saved.step} is of {of}, and {self.name} is replica {self.replica}: give its "
                "own --workdir, or have `island scatter` make one for each island"
            )
        return renumbered(position, self.replica, len(self.roster.islands))

    @staticmethod
    def journal(resumed: Resumed, config: TrainConfig) -> Journal | None:
        """Return a checkpoint's journal; where no island saved it, that of a run whose exchanges are all done."""
        if resumed.sync_state is not None:
            return Journal.from_json(dict(resumed.sync_state))
        if resumed.step == 0:
            return None
        schedule = schedule_of(config)
        assert schedule is not None
        return Journal(schedule.total(resumed.step) - 1, True, {}, 0, ())

    def open_agent(
        self,
        config: TrainConfig,
        solo: SoloPrograms,
        programs: Programs,
        journal: Journal | None,
        workdir: Path,
        is_stopping: Callable[[], bool],
        report: Callable[[str], None],
        fingerprint: str | None = None,
        processes: Processes | None = None,
    ) -> Agent | None:
        """Join the peers, who may refuse the island before it compiles; return None if told to stop meanwhile.

        `fingerprint` identifies its tokenizer; None: it reads token ids. Of the island's processes the first
        calls this.
        Raises `UserError` if its name or address is in use, or most of the others refuse it.
        """
        identity = _identity(self, config, programs, fingerprint)
        return open_agent(
            self.roster,
            self.name,
            self.credentials,
            identity,
            partner_in(self.members, self.name, config),
            self.settings(config),
            journal,
            workdir,
            self.codec(config, solo),
            layouts_of(programs.state, len(jax.tree.leaves(programs.state.params)), config.outer.wire),
            weight_specs(config.model),
            {"identity": asdict(identity), "config": told_values(config), "tokenizer": fingerprint},
            is_stopping,
            report,
            self.members,
            self.listen,
            processes,
        )

    def steps(
        self,
        config: TrainConfig,
        agent: Agent | None,
        solo: SoloPrograms,
        programs: Programs,
        processes: Processes | None = None,
    ) -> IslandSteps:
        """Compile the island's outer steps; `config` is its own, and `agent` in its first process alone."""
        compiled = compile_solo(solo, programs)
        schedule = schedule_of(config)
        assert schedule is not None

        def tokens_of_round(step: int) -> int:
            return schedule.sync_every * config.tokens_per_step

        def place(healed: Healed) -> TrainState:
            if healed.whole:
                likes, structure = jax.tree.flatten(programs.resting)
                state = structure.unflatten(from_first_process([*map(healed.leaves.get, range(len(likes)))], likes))
                return state._replace(outer=at_num_outer_steps(state.outer, healed.round + 1))
            weights = jax.tree.map(_of_one_replica, programs.state.params)
            likes, structure = jax.tree.flatten(weights)
            given = [x[0] for x in map(healed.leaves.get, range(len(likes))) if x is not None]
            state = programs.from_params(structure.unflatten(from_first_process(given, likes)))
            assert state.outer is not None
            inner, outer = at_step(state.inner, healed.step + 1), at_num_outer_steps(state.outer, healed.round + 1)
            return state._replace(inner=inner, outer=outer)

        return IslandSteps(
            agent,
            compiled,
            place,
            tokens_of_round,
            keeps_pace=self.pace == "time",
            processes=processes,
            at_once=self.at_once,
        )


def _of_one_replica(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return shape, dtype and sharding of an array without its axis of replicas, of which there is one."""
    assert isinstance(x.sharding, NamedSharding)
    sharding = NamedSharding(x.sharding.mesh, P(*x.sharding.spec[1:]))
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=sharding)


def _identity(member: Membership, config: TrainConfig, programs: Programs, fingerprint: str | None) -> Identity:
    defaults = dict(_fields(common_values(from_dict({"method": config.method}))))
    return Identity(
        member.roster.run,
        {name: value for name, value in _fields(common_values(config)) if value != defaults.get(name)},
        _digest([str(spec) for spec in specs_of(programs.state.params)]),
        member.roster.version,
        f"{config.outer.wire}, {described(config.outer.fragments)}",
        member.pace,
        fingerprint or "",
    )


def _fields(values: Mapping[str, Any], group: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path of each field and its value as JSON; a long one as its beginning and digest."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _fields(value, f"{group}{name}.")
        else:
            text = json.dumps(value, default=str)
            yield f"{group}{name}", text if len(text) <= 80 else f"{text[:60]}... {_digest(value)}"


def common_values(config: TrainConfig) -> dict[str, Any]:
    """Return the values that all islands must have equal, by the names of `COMMON`."""
    values = to_dict(config)
    outer = {name: value for name, value in values["outer"].items() if name != "offload"}
    return {name: values[name] for name in COMMON} | {"outer": outer}


def told_values(config: TrainConfig) -> dict[str, Any]:
    """Return the values that other islands and commands are told, from which `from_dict` builds the same configuration.

    Those at their defaults are left out, as a version without a later field does not build what has it.
    """

    def changed(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
        groups = {name: defaults.get(name, ...) for name in values}
        return {
            name: changed(values[name], default) if isinstance(default, Mapping) and values[name] else values[name]
            for name, default in groups.items()
            if values[name] != default
        }

    always = {"method": config.method, "num_steps": config.num_steps}
    return changed(to_dict(config), to_dict(from_dict({"method": config.method}))) | always


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
