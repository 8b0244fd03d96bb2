"""A checkpoint that was saved: its record, read once, and its arrays, compared with their digests before use."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from noloco_jax.checkpoint import digests, record
from noloco_jax.checkpoint.record import Totals
from noloco_jax.cluster.processes import Processes, is_of_exchange
from noloco_jax.config import Change, ModelConfig, TrainConfig, from_record
from noloco_jax.data import Tokenizer
from noloco_jax.errors import TransientError, UserError
from noloco_jax.formatting import format_bytes, format_seconds
from noloco_jax.model.architecture import param_shapes
from noloco_jax.spmd.programs import TrainState
from noloco_jax.spmd.stages import resize_vocabulary, vocabulary_axis

PyTree = Any
ITEMS = ("state", "data", "run")


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


class Saved:
    """Checkpoint of one step. Every process has to make the same calls.

    Args:
      step: its step.
      manager: Orbax's manager of the checkpoints beside it.
      config: the run that reads it.
      processes: the processes that read together.

    Attributes:
      step: its step.
      folder: where it lies.
      config: the configuration with which it was saved.
      changes: fields that differ from that configuration in the run that reads it, without those that may always.
      version_changes: a line for every package whose version differs from then.
      totals: the run's totals.
      positions: data position of each replica.
      source: facts that tell the run's data and tokenizer from others, see `RunData.facts`.
      sync_state: protocol state that an island saved with its weights; None for other runs.
      shape: sizes of its arrays.
      from_step: the step that its run had been told to go back to, or None.

    Raises:
      UserError: if it is damaged, or a field that must match has another value in its configuration.
    """

    def __init__(self, step: int, manager: ocp.CheckpointManager, config: TrainConfig, processes: Processes):
        self.step, self.folder = step, Path(manager.directory) / str(step)
        self._manager, self._model, self._processes = manager, config.model, processes
        self._line = ""  # what `verify` has found
        with self._reading():
            self._entries = digests.read_digests(self.folder)
            run, data = self._read("run"), self._read("data")
            self.config = from_record(run["config"])
            self.version_changes = record.version_changes(run)
            self.totals = Totals(**run["totals"])
            self.sync_state: Mapping[str, Any] | None = run.get("sync_state")
            self.shape = SavedShape(*(run[name] for name in SavedShape._fields))
            self.from_step: int | None = run["from_step"]
            self.positions: list[dict[str, Any]] = [data[str(replica)] for replica in range(len(data))]
            self.source: Mapping[str, Any] = run["source"]
        self.changes: list[Change] = record.permitted_changes(self.config, config, str(self.folder.parent))

    def _read(self, item: str) -> dict[str, Any]:
        """Read a JSON item; every process reads it, and so compares its digest."""
        names = [name for name in self._entries if name.startswith(f"{item}/")]
        digests.check_files(self.folder, {name: self._entries[name] for name in names})
        return self._manager.restore(self.step, args=ocp.args.Composite(**{item: ocp.args.JsonRestore()}))[item]

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raise `UserError` if the run was trained with another tokenizer, compared by fingerprint."""
        trained_with = self.source.get("tokenizer")  # None if the data were token ids
        if trained_with not in (None, tokenizer.fingerprint):
            raise UserError(
                f"the tokenizer {tokenizer.name!r} is not the one that the run in {self.folder.parents[1]} was trained "
                f"with (fingerprint {trained_with}, now {tokenizer.fingerprint}): restore its files, or name it"
            )

    def verify(self) -> str:
        """Compare all files with the digests that were saved with them; return a line on what was checked.

        Each process reads a share of the files. Later calls return at once; what reads arrays begins with one.

        Raises:
          UserError: if a file differs from its digest; it names the file.
        """
        if not self._line:
            started, damage = time.perf_counter(), None
            share = digests.share_of(self._entries, jax.process_index(), jax.process_count())
            try:
                digests.check_files(self.folder, share)
            except (digests.MismatchError, FileNotFoundError) as error:
                damage = str(error)
            found = [reason for reason in self._processes.gather(damage) if reason is not None]
            if found:
                raise self._damaged(found[0])
            size = format_bytes(sum(entry.size for entry in self._entries.values()))
            seconds = format_seconds(time.perf_counter() - started)
            files = f"{len(self._entries)} files, {size}, compared in {seconds}"
            self._line = f"the checkpoint of step {self.step} is as it was saved: {files}"
        return self._line

    def state(self, like: TrainState) -> TrainState:
        """Restore the state.

        Args:
          like: the saved shapes, dtypes, and the shardings to restore to; the mesh may differ from the saving one.
        """
        self.verify()
        arguments = ocp.args.Composite(state=ocp.args.StandardRestore(like._asdict()))
        with self._reading():
            return TrainState(**self._manager.restore(self.step, args=arguments)["state"])

    def each(self, like: TrainState, conversions: PyTree) -> TrainState:
        """Restore the state, converting each array before the next one is read.

        Args:
          like: see `state`.
          conversions: a tree like it of functions, saved array -> converted array.
        """
        self.verify()
        shapes, structure = jax.tree.flatten(like)

        def read(number: int, reader: ocp.PyTreeCheckpointer) -> jax.Array:
            others: list[Any] = [ocp.PLACEHOLDER] * len(shapes)
            others[number] = shapes[number]
            alone = structure.unflatten(others)._asdict()
            arguments = ocp.args.PyTreeRestore(alone, restore_args=jax.tree.map(_restore_args, alone))
            with self._reading():
                restored = reader.restore(self.folder / "state", args=arguments)
            (array,) = (x for x in jax.tree.leaves(restored) if x is not ocp.PLACEHOLDER)
            return array

        with ocp.PyTreeCheckpointer() as reader:
            converted = [
                jax.block_until_ready(convert(read(number, reader)))
                for number, convert in enumerate(jax.tree.leaves(conversions))
            ]
        return structure.unflatten(converted)

    def params(self, keep: Callable[[np.ndarray], np.ndarray] = lambda x: x) -> PyTree:
        """Restore the fast weights as numpy arrays with the replicas in front.

        Args:
          keep: array of all replicas -> the part to keep, again with replicas in front. It is applied before the next
            array is read, so that a caller who keeps one model never holds all of them.
        """
        self.verify()
        with ocp.PyTreeCheckpointer() as reader:

            def read(path: tuple[Any, ...], _: Any) -> np.ndarray:
                arguments = ocp.args.PyTreeRestore(
                    _nested(path, 0),
                    restore_args=_nested(path, ocp.RestoreArgs(restore_type=np.ndarray)),
                    partial_restore=True,
                )
                with self._reading():
                    (array,) = jax.tree.leaves(reader.restore(self.folder / "state", args=arguments))
                return keep(array)

            params = jax.tree.map_with_path(read, {"params": param_shapes(self._model)})["params"]
        return resize_vocabulary(self._model, params, self._model.vocab_size)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Report errors in the body that this checkpoint causes; it is read only after its digests have matched."""
        try:
            yield
        except (FileNotFoundError, digests.MismatchError) as error:
            raise self._damaged(error) from error
        except (ValueError, TypeError, KeyError) as error:  # of shapes and trees that differ
            if is_of_exchange(error):
                raise
            raise UserError(
                f"the checkpoint {self.folder} is whole, and cannot be restored for this configuration "
                f"({_said(error)}): resume with the replicas, stages and wire format of its run"
            ) from error

    def _damaged(self, reason: object) -> UserError:
        if not self.folder.exists():
            return TransientError(
                f"the checkpoint {self.folder} was deleted while it was read: the same command reads the newest one"
            )
        before = max((step for step in self._manager.all_steps() if step < self.step), default=None)
        remedy = "start anew in another --workdir, or restore that folder from a copy"
        if before is not None:
            remedy = (
                f"give --from_step={before} to go on from the one before it, which sets this one aside and deletes "
                "nothing, or restore that folder from a copy"
            )
        return UserError(f"the checkpoint {self.folder} cannot be read ({_said(reason)}): {remedy}")


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
