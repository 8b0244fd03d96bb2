"""Reading of a workdir's checkpoints, and the checks of what is read."""

import contextlib
import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp

from noloco_jax.checkpoint import digests, record
from noloco_jax.checkpoint.totals import Totals
from noloco_jax.cluster.processes import Processes, is_of_exchange
from noloco_jax.config import Change, ModelConfig, TrainConfig, unchecked
from noloco_jax.data import Tokenizer
from noloco_jax.errors import StartError, TransientError, UserError
from noloco_jax.formatting import format_bytes, format_seconds
from noloco_jax.model.kind import param_shapes
from noloco_jax.spmd.programs import TrainState
from noloco_jax.spmd.stages import resize_vocabulary, vocabulary_axis

PyTree = Any
T = TypeVar("T")
ITEMS = ("state", "data", "run")
_NEWEST_ATTEMPTS = 5  # attempts to read the newest checkpoint before the training run prunes it


class SavedShape(NamedTuple):
    """Array sizes of a saved state that depend on the run and not on the model.

    Attributes:
      num_replicas: the leading axis of all arrays.
      padded_vocab_size: tokens of every table of tokens, with those that `stages.padded_vocab_size` adds.
    """

    num_replicas: int
    padded_vocab_size: int

    @classmethod
    def of(cls, model: ModelConfig, state: TrainState) -> "SavedShape":
        """Read the sizes from a state of a model, arrays or shapes."""
        leaves = jax.tree.leaves_with_path(state.params)
        tables = (x.shape[axis] for path, x in leaves if (axis := vocabulary_axis(model, path)) is not None)
        return cls(leaves[0][1].shape[0], next(tables, model.vocab_size))


class _Manager(ocp.CheckpointManager):
    """Orbax's manager, which does not ask JAX whether the run stops.

    It would ask with a number of its own, also from its thread, and JAX agrees on the number after the last that it was
    asked with: one that the run has passed, which would never hear of the stop.
    """

    def reached_preemption(self, step: int) -> bool:
        return False


class CheckpointFiles:
    """Complete checkpoints of a run.

    Args:
      folder: where they lie.
      config: the run that reads them.
      processes: the processes that read together.
      options: of Orbax's manager.
    """

    def __init__(self, folder: Path, config: TrainConfig, processes: Processes, options: ocp.CheckpointManagerOptions):
        self._folder, self._config, self._processes = folder, config, processes
        self._verified: dict[int, str] = {}
        self._check_step_metadata()
        self._manager = _Manager(folder, options=options, item_names=ITEMS)

    def _check_step_metadata(self) -> None:
        """Raise `UserError` for a damaged metadata file, on which Orbax would crash when it lists the checkpoints."""
        for path in self._folder.glob(f"*/{digests.STEP_METADATA}"):
            try:
                content = json.loads(path.read_bytes())
            except (ValueError, FileNotFoundError):
                continue  # Orbax ignores this file then
            if not isinstance(content, dict):
                raise UserError(
                    f"the checkpoint {path.parent} is not whole ({path.name} is no JSON object): delete that "
                    "folder to resume from the one before it, or restore it"
                )

    def verify(self, step: int) -> str:
        """Compare all files of the checkpoint of `step` with the digests that were saved with them.

        Every process has to call this, and reads a share of the files. Later calls return at once; `restore`,
        `restore_each` and `restore_params` begin with one.

        Returns:
          A line on what was checked.

        Raises:
          UserError: if a file differs from its digest; it names the file.
        """
        if step not in self._verified:
            self._verified[step] = self._verify(step)
        return self._verified[step]

    def _verify(self, step: int) -> str:
        folder, started = self._folder / str(step), time.perf_counter()
        entries, damage = {}, None
        try:
            entries = digests.read_digests(folder)
            digests.check_files(folder, digests.share_of(entries, jax.process_index(), jax.process_count()))
        except (digests.MismatchError, FileNotFoundError) as error:
            damage = str(error)
        found = [reason for reason in self._processes.gather(damage) if reason is not None]
        if found:
            raise self._damaged(step, found[0])
        size = format_bytes(sum(entry.size for entry in entries.values()))
        seconds = format_seconds(time.perf_counter() - started)
        return f"the checkpoint of step {step} is as it was saved: {len(entries)} files, {size}, compared in {seconds}"

    def steps(self) -> list[int]:
        """Return the steps that have checkpoints, complete or damaged."""
        return sorted(self._manager.all_steps())

    def latest_step(self) -> int | None:
        """Return the step of the newest checkpoint, or None; raise if it is damaged or of another run.

        Every process has to call this.
        Raises:
          UserError: if a field that must match has another value than in the run that saved it.
          StartError: if the file system shows the processes different ones.
        """
        return self._agreed(self._manager.latest_step())

    def _agreed(self, step: int | None) -> int | None:
        """Check that all processes chose the same step and that its checkpoint fits the run; return the step."""
        seen = self._processes.gather(step)
        if len(set(seen)) > 1:
            raise StartError(
                f"the processes see different newest checkpoints in {self._folder} (steps "
                f"{', '.join(sorted({str(step) for step in seen}))}): start again once all see the same"
            )
        if step is not None:
            self.changes(step)
        return step

    def changes(self, step: int) -> list[Change]:
        """Return the fields that differ from the run that saved `step`; raise `UserError` if one of them must match."""
        return record.permitted_changes(self.saved_config(step), self._config, str(self._folder))

    def saved_config(self, step: int) -> TrainConfig:
        """Return the configuration with which the run saved `step`."""
        return unchecked(self._record(step)["config"])

    def totals(self, step: int) -> Totals:
        """Return the run's totals at `step`."""
        run = self._record(step)
        with self._reading(step):
            return Totals.from_json(run["totals"])

    def check_tokenizer(self, step: int, tokenizer: Tokenizer) -> None:
        """Raise `UserError` if the run was trained with another tokenizer, compared by fingerprint."""
        then = self._record(step)["source"].get("tokenizer")  # None if the data were token ids
        if then not in (None, tokenizer.fingerprint):
            raise UserError(
                f"the tokenizer {tokenizer.name!r} is not the one that the run in {self._folder.parent} was "
                f"trained with (fingerprint {then}, now {tokenizer.fingerprint}): restore its files, or name it"
            )

    def version_changes(self, step: int) -> list[str]:
        """Return a line for every package whose version differs from when `step` was saved."""
        return record.version_changes(self._record(step))

    def read_newest(self, read: Callable[[int | None], T]) -> T:
        """Apply `read` to the newest step while the run may still be training and pruning older checkpoints.

        Args:
          read: step -> result; the step is None if there is no checkpoint. It is called again if it fails and a newer
            checkpoint has appeared, since the older one may have been deleted while it was read.

        Raises:
          TransientError: if each attempt came too late.
          UserError: see `latest_step`, and what `read` raises.
        """
        newest = None
        for _ in range(_NEWEST_ATTEMPTS):
            newest = self._manager.latest_step()
            try:
                return read(self.latest_step())
            except (UserError, OSError):
                self._manager.reload()
                if self._manager.latest_step() == newest:
                    raise
        raise TransientError(
            f"checkpoints in {self._folder} are deleted before they are read, the last of step {newest}: try "
            "again with faster storage, or let the run keep more checkpoints (keep_checkpoints)"
        )

    def saved_shape(self, step: int) -> SavedShape:
        """Return the sizes of the state saved at `step`."""
        run = self._record(step)
        with self._reading(step):
            return SavedShape(*(run[name] for name in SavedShape._fields))

    def _record(self, step: int) -> dict[str, Any]:
        missing = [name for name in ITEMS if not (self._folder / str(step) / name / "commit_success.txt").exists()]
        if missing:
            raise self._damaged(step, f"no complete {' or '.join(missing)}")
        return self._json(step, "run")

    def _json(self, step: int, item: str) -> dict[str, Any]:
        """Read a JSON item of a checkpoint; every process reads it, and so compares its digest."""
        folder = self._folder / str(step)
        with self._reading(step):
            entries = digests.read_digests(folder)
            names = [name for name in entries if name.startswith(f"{item}/")]
            digests.check_files(folder, {name: entries[name] for name in names})
            content = self._manager.restore(step, args=ocp.args.Composite(**{item: ocp.args.JsonRestore()}))[item]
            if not isinstance(content, dict):
                raise ValueError(f"{item}/metadata is no JSON object")
            return content

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        """Report errors in the body as a damaged checkpoint, except those of storage, memory, devices or exchanges."""
        try:
            yield
        except FileNotFoundError as error:
            raise self._damaged(step, error) from error
        except (UserError, OSError, MemoryError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:  # truncated or undecodable files raise many kinds of errors
            if is_of_exchange(error):
                raise
            if self._verified.get(step):  # never a reason to delete it
                raise UserError(
                    f"the checkpoint {self._folder / str(step)} is whole, and cannot be restored for this "
                    f"configuration ({_said(error)}): resume with the replicas, stages and wire format of its run"
                ) from error
            raise self._damaged(step, error) from error

    def _damaged(self, step: int, reason: object) -> UserError:
        if not (self._folder / str(step)).exists():
            return TransientError(
                f"the checkpoint {self._folder / str(step)} was deleted while it was read: the same command "
                "reads the newest one"
            )
        return UserError(
            f"the checkpoint {self._folder / str(step)} is not whole ({_said(reason)}): delete that folder to "
            "resume from the one before it, or restore it"
        )

    def beside(self, step: int) -> dict[str, Any] | None:
        """Return the protocol state that an island saved with the weights at `step`; None for other runs."""
        return self._record(step).get("island")

    def restore(self, step: int, like: TrainState) -> TrainState:
        """Restore the state at `step`.

        Args:
          step: a step that was saved.
          like: the saved shapes, dtypes, and the shardings to restore to; the mesh may differ from the saving one.
        """
        self.verify(step)
        arguments = ocp.args.Composite(state=ocp.args.StandardRestore(like._asdict()))
        with self._reading(step):
            return TrainState(**self._manager.restore(step, args=arguments)["state"])

    def restore_each(self, step: int, like: TrainState, conversions: PyTree) -> TrainState:
        """Restore the state at `step`, converting each array before the next one is read.

        Every process has to call this.

        Args:
          step: a step that was saved.
          like: see `restore`.
          conversions: a tree like it of functions, saved array -> converted array.
        """
        self.verify(step)
        shapes, structure = jax.tree.flatten(like)

        def read(number: int, reader: ocp.PyTreeCheckpointer) -> jax.Array:
            others: list[Any] = [ocp.PLACEHOLDER] * len(shapes)
            others[number] = shapes[number]
            alone = structure.unflatten(others)._asdict()
            arguments = ocp.args.PyTreeRestore(alone, restore_args=jax.tree.map(_restore_args, alone))
            with self._reading(step):
                restored = reader.restore(self._folder / str(step) / "state", args=arguments)
            (array,) = (x for x in jax.tree.leaves(restored) if x is not ocp.PLACEHOLDER)
            return array

        with ocp.PyTreeCheckpointer() as reader:
            converted = [
                jax.block_until_ready(convert(read(number, reader)))
                for number, convert in enumerate(jax.tree.leaves(conversions))
            ]
        return structure.unflatten(converted)

    def positions(self, step: int) -> list[dict]:
        """Return the data position of every replica at `step`, in the order of replicas."""
        saved = self._json(step, "data")
        with self._reading(step):
            data = {int(replica): position for replica, position in saved.items()}
            return [data[replica] for replica in range(len(data))]

    def restore_params(self, step: int, keep: Callable[[np.ndarray], np.ndarray] = lambda x: x) -> PyTree:
        """Restore the fast weights at `step` as numpy arrays with the replicas in front.

        Args:
          step: a step that was saved.
          keep: array of all replicas -> the part to keep, again with replicas in front. It is applied before the next
            array is read, so that a caller who keeps one model never holds all of them.
        """
        self.verify(step)
        with ocp.PyTreeCheckpointer() as reader:

            def read(path: tuple[Any, ...], _: Any) -> np.ndarray:
                arguments = ocp.args.PyTreeRestore(
                    _nested(path, 0),
                    restore_args=_nested(path, ocp.RestoreArgs(restore_type=np.ndarray)),
                    partial_restore=True,
                )
                with self._reading(step):
                    (array,) = jax.tree.leaves(reader.restore(self._folder / str(step) / "state", args=arguments))
                return keep(array)

            params = jax.tree.map_with_path(read, {"params": param_shapes(self._config.model)})["params"]
        return resize_vocabulary(self._config.model, params, self._config.model.vocab_size)


def _restore_args(x: Any) -> ocp.RestoreArgs:
    """Return Orbax's restore arguments for an array like `x`; empty for a placeholder."""
    if x is ocp.PLACEHOLDER:
        return ocp.RestoreArgs()
    return ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape, dtype=x.dtype)


def _nested(path: tuple[Any, ...], leaf: Any) -> PyTree:
    """Build nested dicts that contain only `leaf`, at a JAX key path."""
    return functools.reduce(lambda inner, key: {key.key: inner}, reversed(path), leaf)


def _said(reason: object) -> str:
    """Return the first line of a reason, or of the cause of an error."""
    while isinstance(reason, BaseException) and reason.__cause__ is not None:
        reason = reason.__cause__  # Orbax's own error names one of its methods instead of the file
    return (str(reason).strip().splitlines() or [type(reason).__name__])[0][:200]
