"""Merged model of islands: the mean of their weights, fetched while they train or read from their folders.

The weights wait for one another in files without a name; one model of sums is in memory.
"""

import argparse
import asyncio
import contextlib
import json
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from noloco_jax.checkpoint.saved import Saved
from noloco_jax.checkpoint.store import Checkpointer
from noloco_jax.checkpoint.trained_model import tokenizer_of, write_model_folder
from noloco_jax.config import MeshConfig, TrainConfig, from_dict, load_saved, overridden
from noloco_jax.data import RunData, Tokenizer
from noloco_jax.errors import UserError
from noloco_jax.formatting import format_perplexity
from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.ask import RosterAndKeys, ask_all, open_run
from noloco_jax.islands.checked_mean import checked_mean
from noloco_jax.islands.exchange import ConnectionLost, ProtocolError
from noloco_jax.islands.fetch import Spool, fetch
from noloco_jax.islands.membership import ISLAND_FILE, common_values
from noloco_jax.islands.payload import pack, specs_of
from noloco_jax.islands.peers import FINISHED
from noloco_jax.islands.transport import Dialler
from noloco_jax.metrics.console import by_source
from noloco_jax.metrics.evaluate import evaluate_alone, read_validation
from noloco_jax.model.architecture import param_shapes
from noloco_jax.model.huggingface import check_has_format, check_new_folder
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.programs import build_programs, shardings_of

PyTree = Any
T = TypeVar("T")


@dataclass(frozen=True)
class Source:
    """Access to islands' weights, live or from folders.

    Attributes:
      config: the configuration of their run.
      check_tokenizer: raises `UserError` for a tokenizer other than theirs.
      parts: island -> coroutine function that returns its weights, in the order of the parameters' leaves, and its last
        round, or raises `ConnectionLost` or `ProtocolError`.
      away: islands whose weights cannot be had -> the reason.
    """

    config: TrainConfig
    check_tokenizer: Callable[[Tokenizer], None]
    parts: Mapping[str, Callable[[], Awaitable[tuple[list[np.ndarray], int]]]]
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


def merge(flags: argparse.Namespace) -> int:
    """Write the mean of the islands' weights, and print whose are in it."""
    if (flags.roster is None) == (flags.workdirs is None):
        raise UserError("give --roster=FILE of islands that train, or --workdirs DIR DIR ... of those that ended")
    if not all(override.startswith("--config.data.") for override in flags.overrides):
        raise UserError("merge takes no fields but --config.data.NAME=VALUE: the islands say what they train")
    if not 0 < flags.seconds <= 86400:
        raise UserError(f"--seconds={flags.seconds}: give more than 0 and up to 86400")
    check_new_folder(flags.out)
    if not flags.evaluate:
        jax.config.update("jax_platforms", "cpu")  # accelerators may be a training's
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".merged-", dir=flags.out.parent) as root:
        config, tokenizer, merged = asyncio.run(_merged(flags, Path(root)))
        made = Path(root) / "model"
        made.mkdir()
        workdir = flags.workdirs[0] if flags.workdirs else None
        lines = list(
            write_model_folder(
                made, merged.params, config.model, config.data, tokenizer, str(merged), config.init_from, workdir
            )
        )
        with contextlib.suppress(FileNotFoundError):
            flags.out.rmdir()  # it was empty
        made.rename(flags.out)
    print(*(line.replace(str(made), str(flags.out)) for line in lines), sep="\n")
    if flags.evaluate:
        values = evaluation_of(config, merged.params, tokenizer)
        print(f"merged model: validation perplexity {format_perplexity(values['perplexity'])}{by_source(values)}")
    return 0


async def _merged(flags: argparse.Namespace, folder: Path) -> tuple[TrainConfig, Tokenizer | None, Merged]:
    async with contextlib.AsyncExitStack() as stack:
        if flags.roster is None:
            source = of_folders(flags.workdirs, folder)
        else:
            run = open_run(flags.roster, flags.keys)
            dialler = Dialler(run.name, run.credentials, run.roster)
            stack.push_async_callback(dialler.close)
            source = await of_live_islands(run, dialler, min(flags.seconds, 10.0), flags.seconds, folder)
        config = overridden(source.config, flags.overrides)
        check_has_format(config.model)
        is_named = any(override.startswith("--config.data.tokenizer") for override in flags.overrides)
        tokenizer = tokenizer_of(config.data, None if is_named or flags.workdirs is None else flags.workdirs[0])
        if tokenizer is not None:
            source.check_tokenizer(tokenizer)
        return config, tokenizer, await mean_of(source, print, flags.at_least, flags.without)


async def of_live_islands(
    run: RosterAndKeys, dialler: Dialler, ask_seconds: float, seconds: float, folder: Path
) -> Source:
    """Ask all members of a run for what they train.

    Each has `ask_seconds` to answer, and `seconds` to give its weights, see `fetch`, which go to files in `folder`.
    Raises `UserError` where nobody answers, and where an island's run or model is another than the first one's.
    """
    found = await ask_all(run, dialler, ask_seconds, wants_details=True)
    active = found.run.roster.active(max(found.round, 0))
    away = {name: one.fault for name, one in found.islands.items() if one.fault and name in active}
    details: dict[str, dict[str, Any]] = {}
    for name, status in found.statuses.items():
        if name not in active:
            continue
        if status.phase not in (pb.Status.TRAINING, *FINISHED):
            away[name] = f"{name} has no weights: it starts or leaves"
        else:
            details[name] = _details(name, status)
    if not details:
        raise UserError(
            f"none of {run.roster.run}'s islands has weights ({next(iter(away.values()), 'none answers')}): where they "
            "have ended, give their folders, --workdirs DIR DIR ..."
        )
    first, about = next(iter(details.items()))
    config = from_dict(about["config"])
    for name, other in details.items():
        if common_values(from_dict(other["config"])) != common_values(config):
            raise UserError(f"islands of two runs cannot be merged: {name} and {first} train with other configurations")
    specs = specs_of(param_shapes(config.model))

    def check_tokenizer(tokenizer: Tokenizer) -> None:
        if about["tokenizer"] not in (None, tokenizer.fingerprint):
            raise UserError(
                f"data.tokenizer={tokenizer.name!r} is here not the one that {first} is trained with (fingerprint "
                f"{about['tokenizer']}, here {tokenizer.fingerprint}): give it as --config.data.tokenizer=FOLDER"
            )

    parts = {name: partial(fetch, dialler, name, specs, folder, seconds) for name in details}
    return Source(config, check_tokenizer, parts, away)


def _details(name: str, status: pb.Status) -> dict[str, Any]:
    """Return what an island trains; raise `UserError` where it is no trainer's run."""
    try:
        details = json.loads(status.details)
        if details["config"] is None:
            raise UserError(f"{name} is a loop of your own (nj.Island): end it with island.merge(params) instead")
        return {"config": details["config"], "tokenizer": details["tokenizer"]}
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{name} does not say what it trains: install one version of noloco_jax on both") from None


def of_folders(workdirs: Sequence[Path], folder: Path) -> Source:
    """Read the newest checkpoint of each island's folder; the weights go to files in `folder`.

    Raises `UserError` for a folder that is no island's, for two of one island, and where one's model or run is another
    than the first one's.
    """
    configs: dict[Path, TrainConfig] = {}
    replicas: dict[int, Path] = {}
    for workdir in workdirs:
        if not (workdir / ISLAND_FILE).exists():
            raise UserError(f"{workdir} is no folder of an island ({ISLAND_FILE} is missing): give islands' --workdir")
        configs[workdir] = config = load_saved(workdir)
        if common_values(config) != common_values(configs[workdirs[0]]):
            raise UserError(
                f"islands of two runs cannot be merged: {workdir} and {workdirs[0]} have other configurations"
            )
        replica = _with_newest(workdir, config, lambda saved: saved.positions[0]["replica"])
        if replica in replicas:
            raise UserError(
                f"{workdir} and {replicas[replica]} are both of replica {replica}: give each island's folder once"
            )
        replicas[replica] = workdir
    are_different = len({workdir.name for workdir in workdirs}) == len(workdirs)

    def read(saved: Saved) -> tuple[list[np.ndarray], int]:
        arrays = [np.asarray(x[0]) for x in jax.tree.leaves(saved.params())]
        with Spool(folder) as spool:
            for x in arrays:
                spool.write(pack([x]))
            return spool.arrays(specs_of(arrays)), -1 if saved.sync_state is None else saved.sync_state["round"]

    async def part(workdir: Path) -> tuple[list[np.ndarray], int]:
        return _with_newest(workdir, configs[workdir], read)

    def check_tokenizer(tokenizer: Tokenizer) -> None:
        for workdir, config in configs.items():
            _with_newest(workdir, config, lambda saved: saved.check_tokenizer(tokenizer))

    parts = {workdir.name if are_different else str(workdir): partial(part, workdir) for workdir in workdirs}
    return Source(configs[workdirs[0]], check_tokenizer, parts, {})


async def mean_of(source: Source, log: Callable[[str], None], at_least: int = 1, without: Sequence[str] = ()) -> Merged:
    """Average all weights that can be had, and are not out of line.

    It logs a line for each island: once its weights have come or failed, and if they are left out. Raises `UserError`
    where fewer than `at_least` can be had, where two disagree, and for an unknown name in `without`.
    """
    known = {**source.parts, **source.away}
    if unknown := [name for name in without if name not in known]:
        raise UserError(f"--without={unknown[0]}: the islands are {', '.join(known)}")
    parts = {name: get for name, get in source.parts.items() if name not in without}

    def leave_out(name: str, reason: str) -> None:
        away[name] = reason
        log(f"{name}: {reason.removeprefix(f'{name} ')}")

    away, found, rounds = dict[str, str](), dict[str, list[np.ndarray]](), dict[str, int]()
    for name, reason in {**source.away, **dict.fromkeys(without, "left out by --without")}.items():
        leave_out(name, reason)
    for number, (name, get) in enumerate(parts.items()):
        _check_number(len(found) + len(parts) - number, at_least, away)  # fail before time is spent on the next
        try:
            found[name], rounds[name] = await get()
        except (ConnectionLost, ProtocolError) as error:
            leave_out(name, str(error))
            continue
        log(f"{name}: weights after {'no round' if rounds[name] < 0 else f'round {rounds[name] + 1}'}")
    mean = checked_mean(found)
    if mean.is_undecided:
        one, other = list(mean.left_out)[-2:]
        raise UserError(
            f"{mean.left_out[one]}; compare the losses in their logs, and give --without={one} or --without={other}"
        )
    for name, reason in mean.left_out.items():
        leave_out(name, reason)
        del rounds[name]
    _check_number(len(rounds), max(at_least, 1), away)
    shapes, structure = jax.tree.flatten(param_shapes(source.config.model))
    means = [x.astype(shape.dtype, copy=False) for x, shape in zip(mean.arrays, shapes, strict=True)]
    return Merged(jax.tree.unflatten(structure, means), rounds, away)


def evaluation_of(config: TrainConfig, params: PyTree, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Evaluate a model on its run's validation data, on the first device; return the figures of `evaluate_alone`.

    Raises `UserError` where the data are not there.
    """
    alone = replace(config, num_replicas=1, mesh=MeshConfig(replica=1, stage=1, fsdp=1, tensor=1))
    data = RunData(config.data, seed=config.seed, vocab_size=config.model.vocab_size)
    validation = read_validation(data, tokenizer, config.eval_batches)
    programs = build_programs(alone, make_mesh(alone.mesh, 1, jax.devices()[:1]))
    placed = jax.device_put(jax.tree.map(lambda x: x[None], params), shardings_of(programs.state.params))
    return evaluate_alone(programs, placed, validation)


def _with_newest(workdir: Path, config: TrainConfig, read: Callable[[Saved], T]) -> T:
    """Apply `read` to the newest checkpoint of a folder and return its result."""
    checkpoints = Checkpointer(workdir, config, read_only=True)

    def of(saved: Saved | None) -> T:
        if saved is None:
            raise UserError(f"{workdir} holds no checkpoint: leave it out, or train first")
        return read(saved)

    result = checkpoints.read_newest(of)
    checkpoints.close()
    return result


def _check_number(number: int, at_least: int, away: Mapping[str, str]) -> None:
    if number < at_least:
        missing = f", not those of {', '.join(away)}" if away else ""
        raise UserError(
            f"the weights of {number} islands can be had{missing}, and --at_least={at_least}: wait for the others, or "
            "ask for fewer"
        )
