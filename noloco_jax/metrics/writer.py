"""Metrics of a run, written to metrics.jsonl, TensorBoard and W&B, and read back."""

import contextlib
import importlib
import json
import math
import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from noloco_jax.errors import TransientError, UserError
from noloco_jax.files import write_whole

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"


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
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        *,
        resume_step: int | None,
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
                _drop_after(path, resume_step)
        if wandb is not None:
            self._wandb = wandb.init(
                project=wandb_project,
                id=_wandb_id(folder, fresh=resume_step is None),
                resume="allow",
                dir=str(folder),
                config=dict(run_config or {}),
                **wandb_labels,
            )
        self._file = path.open("a", encoding="utf-8")
        if tensorboard:
            events = folder / TENSORBOARD_FOLDER
            if resume_step is None and events.exists():
                shutil.rmtree(folder / "tensorboard.old", ignore_errors=True)
                events.rename(folder / "tensorboard.old")
            self._tensorboard = _EventFile(events, None if resume_step is None else resume_step + 1)

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


class _EventFile:
    """Event file for TensorBoard in a folder: a write is in the file when it returns.

    tensorboardX's `SummaryWriter` writes from a thread, where a full disk would be no error of the run.

    Args:
      folder: made when missing; TensorBoard reads its files in the order of creation.
      purge_step: the first step that will be written again: TensorBoard discards it and later steps from earlier files.
        None: no step is.
    """

    def __init__(self, folder: Path, purge_step: int | None):
        from tensorboardX.event_file_writer import EventsWriter  # loads protobuf
        from tensorboardX.proto import event_pb2, summary_pb2

        self._events: Any = event_pb2  # protobuf makes their classes at import, where no type checker sees them
        self._summaries: Any = summary_pb2
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard's default names have a resolution of one second, and a run may restart within it.
        self._file = EventsWriter(str(folder / "events"), f".{time.time_ns()}")
        if purge_step is not None:
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._write(step=purge_step, session_log=start)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the numbers of a step by their tags."""
        values = [self._summaries.Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._write(step=step, summary=self._summaries.Summary(value=values))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, **fields: Any) -> None:
        self._file.write_event(self._events.Event(wall_time=time.time(), **fields))
        self._file.flush()


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


def _drop_after(path: Path, step: int) -> None:
    """Rewrite a metrics file atomically without the lines of later steps."""
    write_whole(path, b"".join(line for line, entry in _entries_in(path) if entry["step"] <= step))


def _entries_in(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Return (line, entry) pairs of a metrics file, without lines that a killed process has left incomplete."""
    entries = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            entry = json.loads(line)
            entries.append((line + b"\n", {"step": int(entry["step"]), "kind": str(entry["kind"]), **entry}))
        except (ValueError, TypeError, KeyError):  # not JSON, not UTF-8, or no entry
            continue
    return entries


def read_metrics(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the metrics of a run: a dict {"step", "kind", ...} a line, in the order of writing."""
    path = Path(workdir) / METRICS_FILE
    try:
        return [entry for _, entry in _entries_in(path)]
    except FileNotFoundError:
        raise UserError(f"{path} is not there: give the --workdir of a run that was started") from None
