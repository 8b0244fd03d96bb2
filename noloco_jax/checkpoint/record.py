"""Records of a run in its checkpoints: configuration, totals and versions; the check of what may change on a resume."""

import functools
import importlib.metadata
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from noloco_jax.config import Change, TrainConfig, changes, find_field
from noloco_jax.data.tokenizers import copy_tokenizer
from noloco_jax.errors import UserError
from noloco_jax.model.huggingface_config import GIVEN_FILES
from noloco_jax.storage import local_folder

TOKENIZER_FOLDER = "tokenizer"
GIVEN_FOLDER = "init_from"
_PACKAGES = ("noloco_jax", "jax", "jaxlib", "optax", "orbax-checkpoint", "numpy", "tokenizers")


@dataclass(frozen=True)
class Totals:
    """Sums over the steps of a run and all its starts, without steps lost by a kill after the last checkpoint.

    Attributes:
      tokens: tokens trained on by all replicas together.
      bytes_sent_total: bytes sent by a replica to other replicas, averaged over replicas, see `train.bytes_sent`.
      seconds: seconds of training, evaluating and saving.
      seconds_waiting_for_data: seconds of these spent waiting for batches: an upper bound of the cost of data, since
        devices compute a step meanwhile.
      seconds_in_outer_steps: seconds of these spent in outer steps.
      unlogged_outer_steps: the last outer steps taken, which no metrics line has yet.
    """

    tokens: int = 0
    bytes_sent_total: int | float = 0
    seconds: float = 0.0
    seconds_waiting_for_data: float = 0.0
    seconds_in_outer_steps: float = 0.0
    unlogged_outer_steps: int = 0

    @property
    def figures(self) -> dict[str, int | float]:
        """Return what metrics lines show: all but the counter that only a resume needs."""
        return {name: value for name, value in asdict(self).items() if name != "unlogged_outer_steps"}

    def plus(self, **values: int | float) -> "Totals":
        """Return the totals with the given values added."""
        return replace(self, **{name: getattr(self, name) + value for name, value in values.items()})


@functools.cache  # every checkpoint has them, and a package's version is read from files
def versions() -> dict[str, str]:
    """Return the versions of installed packages that a run's figures depend on; not to be changed."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def make_record(config: Mapping[str, Any], source: Mapping[str, Any], from_step: int | None) -> dict[str, Any]:
    """Make the record of a run for its checkpoints, as JSON values.

    Args:
      config: configuration of the run, see `to_dict`.
      source: identity of its data and tokenizer, see `data.Stream.source`.
      from_step: the step that the run was told to go back to.
    """
    return {
        "config": dict(config),
        "source": dict(source),
        "versions": versions(),
        "from_step": from_step,
    }


def permitted_changes(before: TrainConfig, now: TrainConfig, where: str) -> list[Change]:
    """Return the fields whose values differ from the checkpoint in `where`, without those that may always change.

    `init_from` may be left out, as a resume does not read it; another value would have no effect.

    Raises:
      UserError: for a field that must match.
    """
    found = changes(before, now)
    for change in found:
        if change.on_resume == "must match" and (change.field != "init_from" or change.now):
            raise UserError(
                f"{where} holds a checkpoint with {change.field}={change.before!r}, the config has {change.now!r}: "
                f"give {_former(change)} to resume that run, or another --workdir"
            )
    return [change for change in found if change.on_resume == "may change"]


def _former(change: Change) -> str:
    """Return the flag that restores a field's value, or removes the group that did not exist."""
    group, _, _ = change.field.rpartition(".")
    if change.before is None and not find_field(change.field).optional:
        return f"--config.{group}=None"
    return f"--config.{change.field}={change.before}"


def version_changes(record: Mapping[str, Any]) -> list[str]:
    """Return a line for every package whose version differs from the record's."""
    before, now = record["versions"], versions()
    return [
        f"{package}: version {before.get(package)} before, {now.get(package)} now"
        for package in before | now
        if before.get(package) != now.get(package)
    ]


def copy_inputs(tokenizer: str, init_from: str | None, workdir: Path) -> None:
    """Copy to the workdir what tools read of a run from elsewhere or later, and what may move.

    Args:
      tokenizer: the field `data.tokenizer`.
      init_from: the field; None: a resume, which does not read it.
      workdir: the run's folder.
    """
    copy_tokenizer(tokenizer, workdir / TOKENIZER_FOLDER)
    if init_from is not None:
        _copy_configs(init_from, workdir / GIVEN_FOLDER)


def _copy_configs(init_from: str, folder: Path) -> None:
    """Copy the configurations beside given weights, for exports; remove those of an earlier start."""
    shutil.rmtree(folder, ignore_errors=True)
    if not init_from:
        return
    with local_folder(init_from, GIVEN_FILES) as given:
        folder.mkdir(parents=True)
        for name in GIVEN_FILES:
            if (given / name).is_file():
                shutil.copyfile(given / name, folder / name)
