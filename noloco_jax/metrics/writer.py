"""Metrics of a run, written to metrics.jsonl, TensorBoard and W&B, and read back."""

import contextlib
import importlib
import json
import math
import os
import shutil
import uuid
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from noloco_jax.errors import TransientError, UserError
from noloco_jax.files import write_whole

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
_NAMED = 5  # the most line numbers that a warning lists


def _plain(value: Any) -> Any:
    """Convert nested numbers and arrays to Python values for JSON; NaN and infinity, which JSON lacks, become None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _scalars(name: str, value: Any) -> dict[str, float]:
    """Map TensorBoard tags to the numbers in a plain value: a list of numbers becomes name/0, name/1 and so on."""
    if isinstance(value, list | dict):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        return {f"{name}/{index}": entry for index, entry in entries if isinstance(entry, int | float)}
    return {name: value} if isinstance(value, int | float) else {}


class MetricWriter:
    """Writer of one JSON object a line to WORKDIR/metrics.jsonl, and of the same numbers to TensorBoard and W&B.

    Values are in the files when `write` returns, so that a killed process loses none.

    Args:
      workdir: the run's folder; made when missing.
      resume_step: the step that the run resumes from. Damaged lines and those of later steps, which will be written
        again, are dropped. None for a new run: the files of an earlier one are moved to metrics.jsonl.old and
        tensorboard.old.
      tensorboard: also write WORKDIR/tensorboard.
      wandb_project: the W&B project to log to, or None. A resumed run continues its W&B run, which keeps its history.
      wandb_labels: name and group of the W&B run; empty: W&B finds a name.
      run_config: the configuration that W&B shows for the run.
      writes: False on all processes of a run but the first: nothing is written or observed.
      observe: (step, kind, plain values) of every line that is written.
      evaluates_again: the evaluation of `resume_step` will be written again, too.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        *,
        resume_step: int | None,
        evaluates_again: bool = False,
        tensorboard: bool = True,
        wandb_project: str | None = None,
        wandb_labels: Mapping[str, str] = MappingProxyType({}),
        run_config: Mapping[str, Any] | None = None,
        writes: bool = True,
        observe: Callable[[int, str, Mapping[str, Any]], None] = lambda step, kind, values: None,
    ):
        self._file = self._tensorboard = self._wandb = None
        self._observe = observe
        if not writes:
            return
        wandb = _import_wandb() if wandb_project else None
        folder = Path(workdir)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / METRICS_FILE
        if path.exists():
            if resume_step is None:
                path.replace(path.with_name(path.name + ".old"))
            else:
                _drop_after(path, resume_step, evaluates_again)
        self._file = path.open("a", encoding="utf-8")
        try:
            if tensorboard:
                from noloco_jax.metrics.tensorboard import (
                    TensorBoardWriter,  # imported only here, since it loads protobuf
                )

                events = folder / TENSORBOARD_FOLDER
                if resume_step is None and events.exists():
                    shutil.rmtree(folder / "tensorboard.old", ignore_errors=True)
                    events.rename(folder / "tensorboard.old")
                self._tensorboard = TensorBoardWriter(events, None if resume_step is None else resume_step + 1)
            if wandb is not None:
                self._wandb = wandb.init(
                    project=wandb_project,
                    id=_wandb_id(folder, fresh=resume_step is None),
                    resume="allow",
                    dir=str(folder),
                    config=dict(run_config or {}),
                    **wandb_labels,
                )
        except BaseException:
            self.close()
            raise

    def write(self, step: int, kind: str, **values: Any) -> None:
        """Write the values of a step: numbers, arrays, lists and strings; `kind` is "train" or "eval".

        Raises:
          TransientError: if writing fails, as on a full disk.
        """
        if self._file is None:
            return
        values = {name: _plain(value) for name, value in values.items()}
        self._observe(int(step), kind, values)
        scalars = {}
        for name, value in values.items():
            scalars |= _scalars(f"{kind}/{name}", value)
        try:
            self._file.write(json.dumps({"step": int(step), "kind": kind, **values}) + "\n")
            self._file.flush()
            if self._tensorboard is not None:
                self._tensorboard.write(int(step), scalars)
        except OSError as error:
            raise TransientError(
                f"{self._file.name} or the TensorBoard files cannot be written ({error.strerror}): make room, the same "
                "command resumes from the last checkpoint"
            ) from None
        if self._wandb is not None:
            self._wandb.log(scalars, step=int(step))

    def close(self) -> None:
        """Flush and close all files; further calls of `write` do nothing."""
        with contextlib.suppress(OSError):  # `write` has flushed everything or raised the error
            if self._file is not None:
                self._file.close()
            if self._tensorboard is not None:
                self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()
        self._file = self._tensorboard = self._wandb = None

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_wandb() -> None:
    """Raise `UserError` if W&B is not installed."""
    _import_wandb()


def _import_wandb() -> Any:
    try:
        wandb = importlib.import_module("wandb")
        _ = wandb.init  # missing if Python found a folder named wandb, as of offline runs, instead of the package
        return wandb
    except (ImportError, AttributeError):
        raise UserError("--wandb needs the wandb package, which is not installed: pip install wandb") from None


def _wandb_id(folder: Path, fresh: bool) -> str:
    """Return the W&B run id of a workdir; a new run in the same place gets a new id."""
    path = folder / "wandb_run_id"
    if fresh or not path.exists():
        path.write_text(uuid.uuid4().hex[:12], encoding="utf-8")
    return path.read_text(encoding="utf-8")


def _drop_after(path: Path, step: int, evaluates_again: bool) -> None:
    """Rewrite a metrics file atomically without the lines of later steps, and perhaps the evaluation of this one."""
    kept = [
        line
        for line, entry in _entries(path, path.read_bytes())
        if entry["step"] <= step and not (evaluates_again and (entry["step"], entry["kind"]) == (step, "eval"))
    ]
    write_whole(path, b"".join(kept))


def _entries(path: Path, content: bytes, before: int = 0) -> list[tuple[bytes, dict[str, Any]]]:
    """Parse the lines of a metrics file; return (line, entry) pairs, and warn about damaged lines, which are omitted.

    An incomplete last line is omitted silently: the run is writing it, or was killed while it did.

    Args:
      path: path of the file.
      content: bytes of the file, from the beginning of a line on.
      before: number of lines before `content`.
    """
    entries, damaged = [], []
    for number, line in enumerate(content.split(b"\n")[:-1], start=before + 1):
        try:
            entry = json.loads(line)
        except ValueError:  # not JSON, or not UTF-8
            entry = None
        if isinstance(entry, dict) and type(entry.get("step")) is int and isinstance(entry.get("kind"), str):
            entries.append((line + b"\n", entry))
        else:
            damaged.append(number)
    if damaged:
        named = ", ".join(map(str, damaged[:_NAMED])) + (", ..." if len(damaged) > _NAMED else "")
        warnings.warn(
            f"{path}: {len(damaged)} damaged line{'s' * (len(damaged) > 1)} left out (line {named})", stacklevel=2
        )
    return entries


class NewLines:
    """Reader of the lines that a run has written since the last read.

    It starts over when the file is replaced: a run that resumes writes a new one, without the steps that it repeats.

    Args:
      workdir: folder of the run, which need not have begun.
    """

    def __init__(self, workdir: str | os.PathLike[str]):
        self._path = Path(workdir) / METRICS_FILE
        self._file: tuple[int, int] | None = None  # device and inode of the file
        self._read = self._lines = 0  # bytes and lines read

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the new complete lines, and True if they start a new file that replaces all earlier lines."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                is_new = self._file != (status.st_dev, status.st_ino) or status.st_size < self._read
                if is_new:
                    self._file, self._read, self._lines = (status.st_dev, status.st_ino), 0, 0
                file.seek(self._read)
                added = file.read()
        except FileNotFoundError:
            return [], False
        whole = added[: added.rfind(b"\n") + 1]
        entries = _entries(self._path, whole, before=self._lines)
        self._read += len(whole)
        self._lines += whole.count(b"\n")
        return [entry for _, entry in entries], is_new


def read_metrics(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the metrics of a run: a dict {"step", "kind", ...} a line, in the order of writing."""
    path = Path(workdir) / METRICS_FILE
    try:
        return [entry for _, entry in _entries(path, path.read_bytes())]
    except FileNotFoundError:
        raise UserError(f"{path} is not there: give the --workdir of a run that was started") from None
