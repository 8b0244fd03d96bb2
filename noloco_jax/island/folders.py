"""Conversion of checkpoints between one program and islands, which hold one replica each.

Both ways, the state of all replicas is in this machine's memory for a while.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from noloco_jax.checkpoint import elastic
from noloco_jax.checkpoint.saved import Saved
from noloco_jax.checkpoint.store import Checkpointer
from noloco_jax.checkpoint.totals import Totals
from noloco_jax.config import CONFIG_FILE, MeshConfig, TrainConfig, load_saved, save_config
from noloco_jax.data import renumbered
from noloco_jax.errors import UserError
from noloco_jax.island.membership import Membership, common_values
from noloco_jax.islands.protocol.island import Journal
from noloco_jax.islands.roster import Roster
from noloco_jax.islands.start import ISLAND_FILE
from noloco_jax.model.huggingface import check_new_folder
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.programs import Programs, TrainState, build_programs

Tell = Callable[[str], None]


def scatter(workdir: Path, config: TrainConfig, roster: Roster, out: Path, tell: Tell) -> None:
    """Split the newest checkpoint of a run into a workdir per island: island i resumes from replica i.

    Args:
      workdir: the run's workdir; its number of replicas may differ where `config.elastic` says how to resume.
      config: the islands' configuration.
      roster: the islands.
      out: the folder that gets a workdir of each island's name.
      tell: called with lines for people.

    Raises `UserError` where islands cannot resume from it, before anything is written.
    """
    if config.outer.delay:
        raise UserError(
            f"outer.delay={config.outer.delay}: the checkpoints of {workdir} hold corrections that are not "
            "applied yet, which islands have no place for: only a run without a delay can be split"
        )
    for name in roster.names:
        Membership(roster, name, None).check(config)
        check_new_folder(out / name)
    checkpoints = Checkpointer(workdir, config, read_only=True)

    def read(saved: Saved | None) -> tuple[int, TrainState, list[dict], Totals]:
        if saved is None:
            raise UserError(f"{workdir} holds no checkpoint: train first, or give another folder")
        elastic.check_elastic(config, saved.shape)
        positions = elastic.data_positions(saved, config.num_replicas)
        return saved.step, _state(saved, config, _flat_programs(config)), positions, saved.totals

    step, whole, positions, totals = checkpoints.read_newest(read)
    checkpoints.close()
    # By the state: the schedule of a run with another sync_every, before or from now on, counts other rounds.
    assert whole.outer is not None
    journal = Journal(int(whole.outer.num_outer_steps) - 1, True, {}, 0, ()).to_json()
    for replica, name in enumerate(roster.names):
        state = jax.tree.map(lambda x, replica=replica: x[replica : replica + 1] if x.ndim else x, whole)
        _write(out / name, config, step, state, {0: positions[replica]}, totals.of_each(config.num_replicas), journal)
        tell(f"{out / name}: replica {replica} after step {step}, for the --workdir of {name}")


def gather(workdirs: Sequence[Path], out: Path, tell: Tell) -> None:
    """Join islands that have ended into one run, at the newest step of which all have a checkpoint.

    The run has as many replicas as there are folders, in the order of the roster. Data that an island left out had not
    read yet is not read before the next epoch.

    Raises `UserError` where the folders do not belong together, before anything is written.
    """
    configs = configs_of_islands(workdirs)
    check_new_folder(out)
    parts = _parts(configs)
    if len(parts) < 2:
        raise UserError("--workdirs names one island, and one program has more: give those of others too")
    number = parts[0].position["num_replicas"]
    for part in parts:
        tell(f"{part.workdir}: replica {part.position['replica']} of {number} after step {part.step}")
    missing = sorted(set(range(number)) - {part.position["replica"] for part in parts})
    if missing:
        tell(f"without replica {', '.join(map(str, missing))}: its share of the data is not read before the next epoch")
    config = replace(next(iter(configs.values())), num_replicas=len(parts))
    data = {i: renumbered(part.position, i, len(parts)) for i, part in enumerate(parts)}
    state = jax.tree.map(_together, *(part.state for part in parts))
    _write(out, config, parts[0].step, state, data, Totals.of_all([part.totals for part in parts]))
    resume = f"resume by python -m noloco_jax.train --config={out / CONFIG_FILE} --workdir={out}"
    tell(f"{out}: {len(parts)} replicas after step {parts[0].step}; {resume}")


def configs_of_islands(workdirs: Sequence[Path]) -> Mapping[Path, TrainConfig]:
    """Return the configuration of each folder.

    Raises `UserError` where the model or run of one differs from that of the first, for a folder given twice, and for
    one of an island in a user's own loop.
    """
    places: dict[Path, Path] = {}
    for workdir in workdirs:
        place = workdir.resolve()
        if place in places:
            raise UserError(f"--workdirs names a folder twice, {places[place]} and {workdir}: give each once")
        places[place] = workdir
    for workdir in workdirs:
        if (workdir / ISLAND_FILE).exists() and not (workdir / CONFIG_FILE).exists():
            raise UserError(
                f"{workdir} is of an island in a loop of its own (noloco_jax.Island), of which the commands "
                "know no model: call island.merge(params) there"
            )
    configs = {workdir: load_saved(workdir) for workdir in workdirs}
    first, common = workdirs[0], common_values(configs[workdirs[0]])
    for workdir, config in configs.items():
        for field, value in common_values(config).items():
            if value != common[field]:
                raise UserError(
                    f"{workdir} and {first} do not belong together, their {field} differs: give folders of one run"
                )
    return configs


def both_of_one(workdir: Path, other: Path, replica: int) -> UserError:
    """Return the error for two folders of one island, such as a folder and its copy."""
    return UserError(f"{workdir} and {other} are both of replica {replica}: give one of them")


class _Part(NamedTuple):
    """Checkpoint of an island."""

    workdir: Path
    step: int
    position: dict[str, Any]
    state: TrainState
    totals: Totals


def _parts(configs: Mapping[Path, TrainConfig]) -> list[_Part]:
    """Return the islands' checkpoints of the newest common step, in the order of their replicas."""
    opened = {workdir: Checkpointer(workdir, config, read_only=True) for workdir, config in configs.items()}
    step = _newest_common({workdir: checkpoints.steps() for workdir, checkpoints in opened.items()})
    parts: dict[int, _Part] = {}
    for workdir, checkpoints in opened.items():
        own = replace(configs[workdir], num_replicas=1)
        saved = checkpoints.open(step)
        count = saved.shape.num_replicas
        if count != 1:
            raise UserError(f"{workdir} holds {count} replicas and is no island's: give folders of islands")
        (position,) = saved.positions
        twin = parts.get(position["replica"])
        if twin is not None:
            raise both_of_one(workdir, twin.workdir, position["replica"])
        state = _state(saved, own, _flat_programs(own))
        parts[position["replica"]] = _Part(workdir, step, position, state, saved.totals)
        checkpoints.close()
    first, *others = (parts[replica] for replica in sorted(parts))
    for other in others:
        for what in ("num_replicas", "source"):
            if other.position[what] != first.position[what]:
                raise UserError(
                    f"the data of {other.workdir} and {first.workdir} differ, "
                    f"{what} {other.position[what]} and {first.position[what]}: give folders of one run"
                )
    return [first, *others]


def _newest_common(steps: Mapping[Path, Sequence[int]]) -> int:
    """Return the newest step of which all folders have a checkpoint."""
    common = set.intersection(*map(set, steps.values()))
    if not common:
        there = "; ".join(f"{workdir} {', '.join(map(str, sorted(have))) or 'none'}" for workdir, have in steps.items())
        raise UserError(
            f"there is no step of which all folders have a checkpoint ({there}): let the islands train on to one that "
            "checkpoint_every divides, or keep more with --config.keep_checkpoints"
        )
    return max(common)


def _flat_programs(config: TrainConfig) -> Programs:
    """Build programs on one device of this machine, to get the state's shapes whatever the mesh of the run."""
    flat = replace(config, mesh=MeshConfig(replica=1, stage=1, fsdp=1, tensor=1))
    return build_programs(flat, make_mesh(flat, jax.devices()[:1]))


def _state(saved: Saved, config: TrainConfig, programs: Programs) -> TrainState:
    """Return the state as numpy arrays with the replicas in front."""
    return jax.tree.map(np.asarray, elastic.restore(saved, config, programs)[0])


def _together(*parts: np.ndarray) -> np.ndarray:
    """Concatenate an array over replicas; scalars must be equal on all."""
    if parts[0].ndim:
        return np.concatenate(parts)
    if any(part != parts[0] for part in parts):
        counts = ", ".join(map(str, parts))
        raise UserError(f"the islands have different outer steps behind them ({counts}): give folders of one run")
    return parts[0]


def _write(
    workdir: Path,
    config: TrainConfig,
    step: int,
    state: TrainState,
    data: dict[int, dict],
    totals: Totals,
    beside: dict[str, Any] | None = None,
) -> None:
    with Checkpointer(workdir, config) as checkpoints:
        checkpoints.save(step, state, data, totals, beside)
    save_config(config, workdir)
