"""What a checkpoint says of the run that saved it, whether another may go on from it, and a run's starts."""

import importlib.metadata
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from noloco_jax.config import Change, TrainConfig, changes, find_field, save_config, to_dict, unchecked, without_deleted
from noloco_jax.errors import UserError
from noloco_jax.files import write_whole

HISTORY_FILE = "config.history.jsonl"
_PACKAGES = ("noloco_jax", "jax", "jaxlib", "optax", "orbax-checkpoint", "numpy", "tokenizers")


def versions() -> dict[str, str]:
    """The versions of the packages that a run's figures depend on, of those that are installed."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def make_record(config: TrainConfig, source: Mapping[str, Any], from_step: int | None) -> dict[str, Any]:
    """What a checkpoint says of its run, as JSON holds it.

    Args:
      config: of the run.
      source: what tells its data and tokenizer from others, see `data.Stream.source`.
      from_step: the step that the run was told to go back to.
    """
    return {"config": to_dict(config), "source": dict(source), "versions": versions(), "from_step": from_step}


def saved_config(record: Mapping[str, Any], where: Path) -> TrainConfig:
    """The configuration of a record; `where` is the checkpoint's folder."""
    if "config" not in record:
        raise UserError(
            f"{where} holds no configuration, as an earlier version of noloco_jax saved it: go on with that version, "
            "or give another --workdir"
        )
    return unchecked(without_deleted(record["config"]))


def permitted_changes(before: TrainConfig, now: TrainConfig, where: Path) -> list[Change]:
    """The fields with other values than those of the checkpoint in `where`; free ones are left out.

    Raises:
      UserError: for a field that must match.
    """
    found = changes(before, now)
    for change in found:
        if change.on_resume == "must match":
            raise UserError(
                f"{where} holds a checkpoint with {change.field}={change.before!r}, the config has {change.now!r}: "
                f"give {_former(change)} to go on with that run, or another --workdir"
            )
    return [change for change in found if change.on_resume == "may change"]


def _former(change: Change) -> str:
    """The flag that makes a field what it was, or takes away the group that was not there."""
    group, _, _ = change.field.rpartition(".")
    if change.before is None and not find_field(change.field).optional:
        return f"--config.{group}=None"
    return f"--config.{change.field}={change.before}"


def version_changes(record: Mapping[str, Any]) -> list[str]:
    """A line for every package whose version is another than the record's."""
    before, now = record["versions"], versions()
    return [
        f"{package}: version {before.get(package)} before, {now.get(package)} now"
        for package in before | now
        if before.get(package) != now.get(package)
    ]


def write_start(config: TrainConfig, workdir: Path, step: int, changed: Sequence[Change]) -> None:
    """Writes config.json, and adds a line on this start to config.history.jsonl: nothing before it is lost or read.

    A line has the time, the step that the run goes on from (0 if it starts anew), what is changed in comparison with
    that checkpoint as field -> [before, now], the versions, and the whole configuration.
    """
    line = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "step": step,
        "changed": {change.field: [change.before, change.now] for change in changed},
        "versions": versions(),
        "config": to_dict(config),
    }
    history = workdir / HISTORY_FILE
    former = history.read_bytes() if history.exists() else b""
    if former and not former.endswith(b"\n"):
        former += b"\n"  # after damage, the new line stands alone all the same
    write_whole(history, former + json.dumps(line).encode() + b"\n")
    save_config(config, workdir)
