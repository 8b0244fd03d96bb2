"""Merged model of islands: the mean of their weights, asked for while they train or read from their folders.

One model of sums is in memory, and one island's at a time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from noloco_jax.checkpoint.saved import Saved as SavedCheckpoint
from noloco_jax.checkpoint.store import Checkpointer
from noloco_jax.config import MeshConfig, TrainConfig, from_dict
from noloco_jax.data import RunData, Tokenizer
from noloco_jax.errors import UserError
from noloco_jax.island.folders import both_of_one, configs_of_islands
from noloco_jax.islands.client import Client
from noloco_jax.islands.discovery import discover
from noloco_jax.islands.entries import MEMBERS_FILE, Saved, describe, read_members
from noloco_jax.islands.peer_errors import PeerError, RefusedError
from noloco_jax.islands.protocol.members import OPEN, Entry
from noloco_jax.islands.query import About, ask_about, check_finite, fetch_weights
from noloco_jax.islands.start import ISLAND_FILE
from noloco_jax.islands.steps import weight_specs
from noloco_jax.metrics.evaluate import evaluate_alone, read_validation
from noloco_jax.model.kind import param_shapes
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.programs import build_programs, shardings_of

PyTree = Any
T = TypeVar("T")


class Part(NamedTuple):
    """Weights of an island after a round, in the order of the parameters' leaves."""

    round: int
    arrays: list[np.ndarray]


@dataclass(frozen=True)
class Source:
    """Access to islands' weights, live or from folders.

    Attributes:
      config: the configuration of their run.
      check_tokenizer: raises `UserError` for a tokenizer other than theirs.
      parts: island -> function that returns its weights, finite ones, or raises `PeerError`.
      away: islands whose weights cannot be had -> the reason.
    """

    config: TrainConfig
    check_tokenizer: Callable[[Tokenizer], None]
    parts: Mapping[str, Callable[[], Part]]
    away: Mapping[str, str]


@dataclass(frozen=True)
class Merged:
    """Mean of some islands' weights.

    Attributes:
      params: numpy arrays, in the dtype of the run.
      rounds: island in the mean -> the last round that it had ended.
      away: island left out -> the reason.
    """

    params: PyTree
    rounds: Mapping[str, int]
    away: Mapping[str, str]

    def __str__(self) -> str:
        apart = max(self.rounds.values()) - min(self.rounds.values())
        return (
            f"the mean of {len(self.rounds)} of {len(self.rounds) + len(self.away)} islands"
            f"{f', up to {apart} rounds apart' if apart else ', all after the same round'}"
            f"{', without ' + ', '.join(self.away) if self.away else ''}"
        )


def of_live_islands(run: Saved, keys: Path | None, ask_seconds: float, seconds: float) -> Source:
    """Ask all active members of a run, in the name of one of them; see `query.clients_of` for `keys`.

    Args:
      run: the founders, and the entries known here.
      ask_seconds: to wait for each to say what it trains.
      seconds: to wait for the weights of each.

    Raises `UserError` where nobody answers, and where an island's run or model is another than the first one's.
    """
    roster, islands = run.roster, discover(run, keys, ask_seconds)
    clients = {name: islands.clients[name] for name in islands.active}
    answers = ask_about(clients, ask_seconds)
    away = {name: answer for name, answer in answers.items() if isinstance(answer, str)}
    found = {name: answer for name, answer in answers.items() if isinstance(answer, About)}
    if not found:
        raise UserError(
            f"none of {roster.run}'s islands answers ({next(iter(away.values()))}): where they have ended, give their "
            "folders, --workdirs DIR DIR ..."
        )
    first, about = next(iter(found.items()))
    for name, other in found.items():
        if other.identity.run != roster.run or other.identity.roster != roster.version:
            raise UserError(
                f"{name} is of the run {other.identity.run}, roster {other.identity.roster}, and this roster is "
                f"{roster.version} of {roster.run}: give the islands' own roster"
            )
        if (difference := other.identity.difference(about.identity, first, f"at {name}")) is not None:
            raise UserError(f"islands of two runs cannot be merged: {difference}")
    config = from_dict(about.trainers_config)
    specs = weight_specs(config.model)

    def fetch(client: Client) -> Part:
        weights = fetch_weights(client, specs, seconds)
        return Part(weights.round, [weights.arrays[name] for name in specs])

    parts = {}
    for name, other in found.items():
        client = clients[name]
        assert isinstance(client, Client)
        if other.training:
            parts[name] = partial(fetch, client)
        else:
            away[name] = f"{name} has no weights: it starts or leaves"

    def check_tokenizer(tokenizer: Tokenizer) -> None:
        if about.tokenizer not in (None, tokenizer.fingerprint):
            raise UserError(
                f"data.tokenizer={tokenizer.name!r} is here not the one that {first} is trained with (fingerprint "
                f"{about.tokenizer}, here {tokenizer.fingerprint}): give it as --config.data.tokenizer=FOLDER"
            )

    return Source(config, check_tokenizer, parts, away)


def of_folders(workdirs: Sequence[Path]) -> Source:
    """Read the newest checkpoint of each island's folder; those of removed members are left out, and named.

    Raises `UserError` for a folder that is no island's, for two of one island, and where one's model or run is another
    than the first one's.
    """
    for workdir in workdirs:
        if not (workdir / ISLAND_FILE).exists():
            raise UserError(f"{workdir} is no folder of an island ({ISLAND_FILE} is missing): give islands' --workdir")
    configs = configs_of_islands(workdirs)
    _check_different(configs)
    are_different = len({workdir.name for workdir in workdirs}) == len(workdirs)
    removed = _removed(workdirs)
    parts = {
        workdir.name if are_different else str(workdir): partial(_read, workdir, config, removed)
        for workdir, config in configs.items()
    }

    def check_tokenizer(tokenizer: Tokenizer) -> None:
        for workdir, config in configs.items():
            _with_newest(workdir, config, lambda saved: saved.check_tokenizer(tokenizer))

    return Source(configs[workdirs[0]], check_tokenizer, parts, {})


def mean_of(source: Source, tell: Callable[[str], None], at_least: int = 1) -> Merged:
    """Average all weights that can be had.

    Args:
      source: the access to the weights.
      tell: called with a line for each island once its weights have come or failed.
      at_least: the smallest number of islands to average.

    Raises `UserError` where fewer can be had.
    """
    for line in source.away.values():
        tell(line)
    away, left, rounds = dict(source.away), dict(source.parts), {}
    sums: list[np.ndarray] | None = None
    for name, get in source.parts.items():
        _check_number(len(left), at_least, away)  # fail before time is spent on the next
        try:
            part = get()
        except PeerError as error:
            away[name] = str(error)
            del left[name]
            tell(str(error))
            continue
        rounds[name] = part.round
        tell(f"{name}: weights after {'no round' if part.round < 0 else f'round {part.round + 1}'}")
        if sums is None:
            sums = [x.astype(np.float32) for x in part.arrays]
        else:
            for total, x in zip(sums, part.arrays, strict=True):
                total += x
        del part
    _check_number(len(rounds), max(at_least, 1), away)
    assert sums is not None
    shapes, structure = jax.tree.flatten(param_shapes(source.config.model))
    for total in sums:
        total /= len(rounds)
    means = [total.astype(shape.dtype, copy=False) for total, shape in zip(sums, shapes, strict=True)]
    return Merged(jax.tree.unflatten(structure, means), rounds, away)


def evaluation_of(config: TrainConfig, params: PyTree, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Evaluate a model on its run's validation data, on the first device; return the figures of `evaluate_alone`.

    Raises `UserError` where the data are not there.
    """
    alone = replace(config, num_replicas=1, mesh=MeshConfig(replica=1, stage=1, fsdp=1, tensor=1))
    data = RunData(config.data, seed=config.seed, vocab_size=config.model.vocab_size)
    validation = read_validation(data, tokenizer, config.eval_batches)
    programs = build_programs(alone, make_mesh(alone, jax.devices()[:1]))
    placed = jax.device_put(jax.tree.map(lambda x: x[None], params), shardings_of(programs.state.params))
    return evaluate_alone(programs, placed, validation)


def _removed(workdirs: Sequence[Path]) -> dict[int, Entry]:
    """Return the entries of removed members by their ids, as any of the folders knows them."""
    entries: dict[int | str, Entry] = {}
    for workdir in workdirs:
        if (path := workdir / MEMBERS_FILE).exists():
            for entry in read_members(path).entries:
                known = entries.get(entry.slot)
                if known is None or known.version < entry.version:
                    entries[entry.slot] = entry
    return {entry.id: entry for entry in entries.values() if entry.until_round != OPEN}


def _check_different(configs: Mapping[Path, TrainConfig]) -> None:
    """Raise `UserError` for two folders of one island: the mean would count it twice."""
    workdirs: dict[int, Path] = {}
    for workdir, config in configs.items():
        replica = _with_newest(workdir, config, _replica)
        if replica is not None:
            if replica in workdirs:
                raise both_of_one(workdir, workdirs[replica], replica)
            workdirs[replica] = workdir


def _replica(saved: SavedCheckpoint) -> int | None:
    """Return the number of an island's replica; None for a checkpoint that does not say it."""
    return saved.positions[0].get("replica")


def _read(workdir: Path, config: TrainConfig, removed: Mapping[int, Entry]) -> Part:
    def read(saved: SavedCheckpoint) -> Part:
        replica = _replica(saved)
        if replica is not None and (entry := removed.get(replica)) is not None:
            raise RefusedError(f"{workdir}: {describe(entry)}, and its weights are left out")
        journal = saved.sync_state
        arrays = [np.asarray(x[0]) for x in jax.tree.leaves(saved.params())]
        check_finite(f"{workdir}: the checkpoint's", dict(zip(weight_specs(config.model), arrays, strict=True)))
        return Part(-1 if journal is None else journal["round"], arrays)

    return _with_newest(workdir, config, read)


def _with_newest(workdir: Path, config: TrainConfig, read: Callable[[SavedCheckpoint], T]) -> T:
    """Apply `read` to the newest checkpoint of a folder and return its result."""
    checkpoints = Checkpointer(workdir, config, read_only=True)

    def of(saved: SavedCheckpoint | None) -> T:
        if saved is None:
            raise UserError(f"{workdir} holds no checkpoint: leave it out, or train first")
        return read(saved)

    result = checkpoints.read_newest(of)
    checkpoints.close()
    return result


def _check_number(number: int, at_least: int, away: Mapping[str, str]) -> None:
    missing = ", ".join(away)
    if number < at_least:
        raise UserError(
            f"the weights of {number} islands can be had{f', not those of {missing}' if away else ''}, and "
            f"--at_least={at_least}: wait for the others, or ask for fewer"
        )
