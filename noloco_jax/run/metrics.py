"""A run's figures: written to metrics.jsonl, TensorBoard and W&B, read back, and the speed among them."""

import collections
import importlib
import json
import math
import os
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from noloco_jax.config.fields import TrainConfig
from noloco_jax.errors import UserError

METRICS_FILE = "metrics.jsonl"


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
    if isinstance(value, list):
        return {f"{name}/{index}": entry for index, entry in enumerate(value) if isinstance(entry, int | float)}
    return {name: value} if isinstance(value, int | float) else {}


class MetricWriter:
    """Writes one JSON object a line to WORKDIR/metrics.jsonl, and the same numbers to TensorBoard and W&B.

    Args:
      workdir: the run's folder; made when missing.
      resume_step: the step that the run goes on from. Lines of later steps, which it will write again, and a torn last
        line are dropped. None for a new run: metrics of an earlier one are moved to metrics.jsonl.old.
      tensorboard: whether to write WORKDIR/tensorboard as well.
      wandb_project: the W&B project to log to, or None. A resumed run goes on in its W&B run, which keeps what it has.
      enabled: False makes every method do nothing, for the processes that do not report.
      run_config: what W&B shows as the run's configuration.
      process: of a run of several, the number of this one; those after the first write metrics.PROCESS.jsonl.
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
                _drop_after(path, resume_step)
        self._file = path.open("a", encoding="utf-8")
        if tensorboard:
            from tensorboardX import SummaryWriter  # here, because it loads protobuf and most tools do without

            purge_step = None if resume_step is None else resume_step + 1
            self._tensorboard = SummaryWriter(str(folder / "tensorboard"), purge_step=purge_step)
        if wandb is not None:
            self._wandb = wandb.init(
                project=wandb_project,
                id=_wandb_id(folder, fresh=resume_step is None),
                resume="allow",
                dir=str(folder),
                config=dict(run_config or {}),
            )

    def write(self, step: int, kind: str, **values: Any) -> None:
        """Writes the values of a step: numbers, arrays, lists and strings; `kind` is "train" or "eval"."""
        if self._file is None:
            return
        values = {name: _plain(value) for name, value in values.items()}
        self._file.write(json.dumps({"step": int(step), "kind": kind, **values}) + "\n")
        self._file.flush()
        scalars = {}
        for name, value in values.items():
            scalars |= _scalars(f"{kind}/{name}", value)
        if self._tensorboard is not None:
            for tag, value in scalars.items():
                self._tensorboard.add_scalar(tag, value, step)
        if self._wandb is not None:
            self._wandb.log(scalars, step=int(step))

    def close(self) -> None:
        """Flushes and closes what is open; further calls of `write` do nothing."""
        if self._file is not None:
            self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()
        self._file = self._tensorboard = self._wandb = None


def _import_wandb() -> Any:
    try:
        return importlib.import_module("wandb")
    except ImportError:
        raise UserError("--wandb needs the wandb package, which is not installed: pip install wandb") from None


def _wandb_id(folder: Path, fresh: bool) -> str:
    """The W&B run that belongs to a workdir; a new run in the same place gets a new one."""
    path = folder / "wandb_run_id"
    if fresh or not path.exists():
        path.write_text(uuid.uuid4().hex[:12], encoding="utf-8")
    return path.read_text(encoding="utf-8")


def _drop_after(path: Path, step: int) -> None:
    """Rewrites a metrics file without the lines of later steps, whole or not at all."""
    kept = [line for line, entry in _entries(path) if entry["step"] <= step]
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    unfinished.write_text("".join(kept), encoding="utf-8")
    unfinished.replace(path)


def _entries(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """(line, parsed line) of a metrics file, without a last line that a killed run left torn."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    entries = []
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            int(entry["step"])
        except (ValueError, TypeError, KeyError):
            raise UserError(f"{path} line {number} is not a metrics line: mend or remove it") from None
        entries.append((line, entry))
    return entries


def _file_name(process: int) -> str:
    return METRICS_FILE if process == 0 else f"metrics.{process}.jsonl"


def read_metrics(workdir: str | os.PathLike[str], process: int = 0) -> list[dict[str, Any]]:
    """What a process of a run has written so far, a dict {"step", "kind", ...} a line, in the order of writing."""
    path = Path(workdir) / _file_name(process)
    try:
        return [entry for _, entry in _entries(path)]
    except FileNotFoundError:
        raise UserError(f"{path} is not there: give the --workdir of a run that was started") from None


class Throughput:
    """Tokens per second over the last `window` steps.

    `reset()` starts the clock anew, after what is no training step: a compilation, an evaluation, a checkpoint.
    """

    def __init__(self, window: int = 50, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._marks: collections.deque[tuple[float, int]] = collections.deque(maxlen=window + 1)
        self.reset()

    def reset(self) -> None:
        """Forgets the steps so far; the next one is timed from now."""
        self._marks.clear()
        self._marks.append((self._clock(), 0))

    def step(self, tokens: int) -> None:
        """Counts a finished step's tokens."""
        self._marks.append((self._clock(), self._marks[-1][1] + tokens))

    @property
    def tokens_per_second(self) -> float:
        """0 before the first step."""
        (start, before), (end, after) = self._marks[0], self._marks[-1]
        return (after - before) / (end - start) if end > start else 0.0


def model_flops_per_token(config: TrainConfig) -> float:
    """Floating point operations that training on one token takes, counted as the model needs them, not as run.

    Forward, per token: 2 per weight of a matrix multiplication (attention's q, k, v and o, the MLP's three, the head;
    the embedding is a lookup and counts nothing), and causal attention once, with half of the T x T scores:
    2 products (scores, values) x 2 x T/2 x heads x head size per layer. The backward pass takes twice the forward one,
    so the sum is three times that. Recomputation (remat) is no use to the model and is not counted.
    """
    model, length = config.model, config.data.sequence_length
    head_size = model.hidden_size // model.num_heads
    queries, keys = model.num_heads * head_size, model.num_kv_heads * head_size
    layer = model.hidden_size * (2 * queries + 2 * keys + 3 * model.intermediate_size)
    weights = model.num_layers * layer + model.hidden_size * model.vocab_size
    attention = model.num_layers * 2 * length * queries
    return 3.0 * (2 * weights + attention)


def mfu(tokens_per_second: float, flops_per_token: float, peak_flops_per_second: float) -> float:
    """Model FLOP utilisation: the part, 0 to 1, of the devices' peak rate that the model's own operations fill."""
    return tokens_per_second * flops_per_token / peak_flops_per_second
