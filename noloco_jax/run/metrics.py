"""A run's figures: written to metrics.jsonl, TensorBoard and W&B, and read back."""

import contextlib
import importlib
import json
import math
import os
import shutil
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from noloco_jax.errors import TransientError, UserError
from noloco_jax.files import write_whole

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
_NAMED = 5  # lines that a warning names by their numbers


def _plain(value: Any) -> Any:
    """Python values for JSON of numbers, arrays and nests of them; NaN and infinity, which JSON lacks, become None."""
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
    """The numbers in a plain value by TensorBoard tag: a list of numbers becomes name/0, name/1 and so on."""
    if isinstance(value, list | dict):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        return {f"{name}/{index}": entry for index, entry in entries if isinstance(entry, int | float)}
    return {name: value} if isinstance(value, int | float) else {}


class MetricWriter:
    """Writes one JSON object a line to WORKDIR/metrics.jsonl, and the same numbers to TensorBoard and W&B.

    What `write` was given is in the files when it returns, whatever becomes of the process.

    Args:
      workdir: the run's folder; made when missing.
      resume_step: the step that the run goes on from. Lines of later steps, which it will write again, and damaged
        ones are dropped. None for a new run: figures of an earlier one are moved to metrics.jsonl.old and
        tensorboard.old.
      tensorboard: whether to write WORKDIR/tensorboard as well.
      wandb_project: the W&B project to log to, or None. A resumed run goes on in its W&B run, which keeps what it has.
      enabled: False makes every method do nothing, for the processes that do not report.
      run_config: what W&B shows as the run's configuration.
      process: of a run of several, the number of this one; those after the first write metrics.PROCESS.jsonl.

    Attributes:
      last_round: the last outer step that a line tells of, of those kept from an earlier start; None without one.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        *,
        resume_step: int | None,
        tensorboard: bool = True,
        wandb_project: str | None = None,
        enabled: bool = True,
        run_config: Mapping[str, Any] | None = None,
        process: int = 0,
    ):
        self._file = self._tensorboard = self._wandb = None
        self.last_round: int | None = None
        if not enabled:
            return
        wandb = _import_wandb() if wandb_project else None
        folder = Path(workdir)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / _file_name(process)
        if path.exists():
            if resume_step is None:
                path.replace(path.with_name(path.name + ".old"))
            else:
                kept = _drop_after(path, resume_step)
                rounds = [line["round"] for line in kept if line.get("kind") == "train" and "round" in line]
                self.last_round = max(rounds, default=None)
        self._file = path.open("a", encoding="utf-8")
        if tensorboard:
            from noloco_jax.run.tensorboard import TensorBoardWriter  # here: it loads protobuf, most tools do without

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
            )

    def write(self, step: int, kind: str, **values: Any) -> None:
        """Writes the values of a step: numbers, arrays, lists and strings; `kind` is "train" or "eval".

        Raises `TransientError` where that fails, as on a full disk.
        """
        if self._file is None:
            return
        values = {name: _plain(value) for name, value in values.items()}
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
                f"{self._file.name} or its neighbours cannot be written ({error.strerror}): make room, the same "
                "command goes on from the last checkpoint"
            ) from None
        if self._wandb is not None:
            self._wandb.log(scalars, step=int(step))

    def close(self) -> None:
        """Flushes and closes what is open; further calls of `write` do nothing."""
        with contextlib.suppress(OSError):  # `write` has flushed all, or told why not
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
    """Raises `UserError` where W&B is not installed."""
    _import_wandb()


def _import_wandb() -> Any:
    try:
        wandb = importlib.import_module("wandb")
        _ = wandb.init  # lacking where a folder of that name, as of offline runs, is found in place of the package
        return wandb
    except (ImportError, AttributeError):
        raise UserError("--wandb needs the wandb package, which is not installed: pip install wandb") from None


def _wandb_id(folder: Path, fresh: bool) -> str:
    """The W&B run that belongs to a workdir; a new run in the same place gets a new one."""
    path = folder / "wandb_run_id"
    if fresh or not path.exists():
        path.write_text(uuid.uuid4().hex[:12], encoding="utf-8")
    return path.read_text(encoding="utf-8")


def _drop_after(path: Path, step: int) -> list[dict[str, Any]]:
    """Rewrites a metrics file without the lines of later steps, whole or not at all; returns those that stay."""
    kept = [(line, entry) for line, entry in _entries(path, path.read_bytes()) if entry["step"] <= step]
    write_whole(path, b"".join(line for line, _ in kept))
    return [entry for _, entry in kept]


def _entries(path: Path, content: bytes, before: int = 0) -> list[tuple[bytes, dict[str, Any]]]:
    """Return the lines of a metrics file, each with what it says; warn of those that are damaged and leave them out.

    A last line without its end is left out in silence: the run is writing it, or was killed meanwhile.

    Args:
      path: of the file.
      content: of the file, from the beginning of a line on.
      before: lines of the file before `content`.
    """
    entries, damaged = [], []
    for number, line in enumerate(content.split(b"\n")[:-1], start=before + 1):
        try:
            entry = json.loads(line)
        except ValueError:  # no JSON, or no text
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
    """Reads what a run has written since the last time, and all of it where the file is another: a run that goes on
    writes a new one, without the steps that it repeats.

    Args:
      workdir: of the run, which need not have begun.
    """

    def __init__(self, workdir: str | os.PathLike[str]):
        self._path = Path(workdir) / METRICS_FILE
        self._file: tuple[int, int] | None = None  # device and number of the file
        self._read = self._lines = 0  # bytes and lines of it

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """The whole lines that are new, and whether they begin the file anew, so that earlier ones count no more."""
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


def _file_name(process: int) -> str:
    return METRICS_FILE if process == 0 else f"metrics.{process}.jsonl"


def read_metrics(workdir: str | os.PathLike[str], process: int = 0) -> list[dict[str, Any]]:
    """What a process of a run has written so far, a dict {"step", "kind", ...} a line, in the order of writing."""
    path = Path(workdir) / _file_name(process)
    try:
        return [entry for _, entry in _entries(path, path.read_bytes())]
    except FileNotFoundError:
        raise UserError(f"{path} is not there: give the --workdir of a run that was started") from None
