"""Checkpoints of a run: everything that it needs to continue as if it had never stopped."""

import contextlib
import functools
import itertools
import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp

from noloco_jax.cluster.processes import Processes, is_of_exchange, run_processes
from noloco_jax.config import Change, TrainConfig, load_saved
from noloco_jax.data import Tokenizer
from noloco_jax.errors import StartError, TransientError, UserError
from noloco_jax.files import check_name, is_full_disk
from noloco_jax.formatting import format_bytes, format_seconds
from noloco_jax.model.llama import param_shapes
from noloco_jax.run import digests, record
from noloco_jax.run.quiet import quiet_saves
from noloco_jax.run.totals import Totals
from noloco_jax.spmd.programs import TrainState
from noloco_jax.spmd.stages import resize_vocabulary

PyTree = Any
T = TypeVar("T")
_ITEMS = ("state", "data", "run")
_SET_ASIDE = "checkpoints_set_aside"
_SAVE_SECONDS = 24 * 3600  # orbax gives up after 20 minutes, in which slow storage takes some 50 GB
_WRITTEN = "async_write_complete"  # in the name of the barrier that orbax's processes come to once all have written
_NEWEST_ATTEMPTS = 5  # to read the newest checkpoint before the run that writes them prunes it


class SavedShape(NamedTuple):
    """The sizes of a saved state's arrays that are the run's and not the model's.

    Attributes:
      num_replicas: the leading axis of all arrays.
      padded_vocab_size: tokens of embedding and head, with those that `stages.padded_vocab_size` adds.
    """

    num_replicas: int
    padded_vocab_size: int

    @classmethod
    def of(cls, state: TrainState) -> "SavedShape":
        """The sizes of a state, arrays or shapes."""
        return cls(*state.params["embed"].shape[:2])


class Checkpointer:
    """Saves and restores the runs of one workdir, under WORKDIR/checkpoints.

    A checkpoint is written beside the others and renamed when it is whole, so that a killed run leaves only whole ones.
    Several processes each write their part of the arrays, and its digests: what is read again is compared with them.

    Args:
      workdir: the run's folder, the same for all processes.
      config: the run. A checkpoint with another value of a field that must match (`config.changes`) is refused, one of
        another number of replicas unless the configuration says what is to become of them.
      processes: those that save together; None: all that JAX knows of.
      from_step: the step that the run was told to go back to, which its checkpoints remember.
      read_only: never write or delete.
    """

    def __init__(
        self,
        workdir: str | Path,
        config: TrainConfig,
        processes: Processes | None = None,
        *,
        from_step: int | None = None,
        read_only: bool = False,
    ):
        quiet_saves()
        check_name(Path(workdir))
        self._folder = Path(workdir).absolute() / "checkpoints"
        self._config = config
        self._from_step = from_step
        self._processes = processes or run_processes()
        self._verified: dict[int, str] = {}
        if not read_only:
            self._folder.mkdir(parents=True, exist_ok=True)
        self._check_step_metadata()
        saves = ocp.AsyncOptions(
            timeout_secs=_SAVE_SECONDS,
            barrier_sync_fn=self._digest_and_wait,
            post_finalization_callback=lambda: digests.write_digests(self._unfinished()),
        )
        options = ocp.CheckpointManagerOptions(
            max_to_keep=None if read_only else config.keep_checkpoints,
            keep_period=config.keep_period or None,
            enable_async_checkpointing=not read_only,
            async_options=None if read_only else saves,
            cleanup_tmp_directories=not read_only,
            read_only=read_only,
            create=not read_only,
        )
        self._manager = ocp.CheckpointManager(self._folder, options=options, item_names=_ITEMS)

    def _check_step_metadata(self) -> None:
        """Raise `UserError` for a file that Orbax reads of each checkpoint, and stumbles over, to list them."""
        for path in self._folder.glob(f"*/{digests.STEP_METADATA}"):
            try:
                content = json.loads(path.read_bytes())
            except (ValueError, FileNotFoundError):
                continue  # Orbax does without; where that checkpoint is restored, its digest tells
            if not isinstance(content, dict):
                raise UserError(
                    f"the checkpoint {path.parent} is not whole ({path.name} is no JSON object): delete that folder to "
                    "go on from the one before it, or restore it"
                )

    def _digest_and_wait(self, *, key: str, timeout_ms: int) -> None:
        """Wait at a barrier of Orbax, before the one after the arrays are written with their digests written too.

        Orbax calls this in a thread of its own, and only of several processes.
        """
        if _WRITTEN in key:
            digests.write_own_digests(self._unfinished(), jax.process_index())
        ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)

    def _unfinished(self) -> Path:
        """Return the folder of the checkpoint that is being saved."""
        return max(self._folder.glob(f"*{digests.UNFINISHED}"), key=lambda path: path.stat().st_mtime)

    def verify(self, step: int) -> str:
        """Compare all files of the checkpoint of `step` with the digests that were saved with them.

        Of several processes, each has to call this, and reads a share of the files. Once is enough: later calls return
        at once, and `restore`, `restore_each` and `restore_params` begin with one.

        Returns:
          A line on what was checked; none where an earlier version saved no digests, which is warned of.

        Raises:
          UserError: if a file is not as it was saved, by its name.
        """
        if step not in self._verified:
            self._verified[step] = self._verify(step)
        return self._verified[step]

    def _verify(self, step: int) -> str:
        folder, started = self._folder / str(step), time.perf_counter()
        entries, damage = None, None
        try:
            entries = digests.read_digests(folder)
            if entries is not None:
                digests.check_files(folder, digests.share_of(entries, jax.process_index(), jax.process_count()))
        except (digests.MismatchError, FileNotFoundError) as error:
            damage = str(error)
        found = [reason for reason in self._processes.gather(damage) if reason is not None]
        if found:
            raise self._damaged(step, found[0])
        if entries is None:
            with self._reading(step):
                self._manager.item_metadata(step)  # the names and shapes of arrays, and of their files nothing
            if jax.process_index() == 0:
                warnings.warn(
                    f"the checkpoint {folder} is unchecked: it was saved without digests, as by an earlier version, "
                    "and a bit that has flipped in it would not be noticed",
                    stacklevel=2,
                )
            return ""
        size = format_bytes(sum(entry.size for entry in entries.values()))
        seconds = format_seconds(time.perf_counter() - started)
        return f"the checkpoint of step {step} is as it was saved: {len(entries)} files, {size}, compared in {seconds}"

    def steps(self) -> list[int]:
        """Those of which there are checkpoints, whole or not."""
        return sorted(self._manager.all_steps())

    def latest_step(self) -> int | None:
        """The step of the newest checkpoint, or None; an error if it is damaged or not this run's.

        Of several processes, each has to ask.

        Raises:
          UserError: if a field that must match has another value than in the run that saved it.
          StartError: if the file system shows the processes different ones.
        """
        return self._agreed(self._manager.latest_step())

    def start_step(self) -> int | None:
        """The step of the checkpoint to go on from, or None; errors are those of `latest_step`.

        It is the newest, or that of `from_step`: but once the run has saved checkpoints after going back to that step,
        the newest of these, so that the same command goes on.
        """
        newest, wanted = self._manager.latest_step(), self._from_step
        if wanted is None or (newest is not None and self._record(newest)["from_step"] == wanted):
            return self._agreed(newest)
        steps = self.steps()
        if wanted not in steps:
            raise UserError(
                f"--from_step={wanted}: {self._folder} holds no checkpoint of that step (there are "
                f"{', '.join(map(str, steps)) or 'none'}): give one that is there, or leave the flag out"
            )
        return self._agreed(wanted)

    def _agreed(self, step: int | None) -> int | None:
        """A step that all processes chose, whose checkpoint fits the run."""
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
        """The fields that have another value than in the run that saved `step`; an error where one must match."""
        saved = self.saved_config(step)
        return record.permitted_changes(saved, self._config, self._folder)

    def saved_config(self, step: int) -> TrainConfig:
        """The configuration of the run that saved `step`, as it was then."""
        return record.saved_config(self._record(step), self._folder / str(step))

    def totals(self, step: int) -> Totals:
        """What the run had come to at `step`; of an earlier version's checkpoint the tokens alone are known."""
        run = self._record(step)
        with self._reading(step):
            if "totals" not in run:
                return Totals(tokens=step * self.saved_config(step).tokens_per_step)
            return Totals.from_json(run["totals"])

    def check_tokenizer(self, step: int, tokenizer: Tokenizer) -> None:
        """Raises `UserError` where the run trained on the tokens of another tokenizer, whatever its name."""
        then = self._record(step)["source"].get("tokenizer")  # none where the data were tokens already
        if then not in (None, tokenizer.fingerprint):
            raise UserError(
                f"data.tokenizer={tokenizer.name!r} is not the one that the run in {self._folder.parent} was trained "
                f"with (fingerprint {then}, now {tokenizer.fingerprint}): restore its files"
            )

    def version_changes(self, step: int) -> list[str]:
        """A line for every package of another version than when `step` was saved."""
        return record.version_changes(self._record(step))

    def set_aside_after(self, step: int) -> int:
        """Moves all later checkpoints to checkpoints_set_aside beside their folder; returns how many there were.

        Each process calls this. Nothing is deleted. A run that is killed meanwhile does the rest when it starts again.
        """
        if self._from_step is None:
            return 0  # and `step` is the newest
        later = [other for other in self._manager.all_steps() if other > step]
        if jax.process_index() == 0:
            for other in later:
                _move_to_new_name(self._folder / str(other), self._folder.with_name(_SET_ASIDE))
        self._processes.barrier("set aside")
        self._manager.reload()
        return len(later)

    def read_newest(self, read: Callable[[int | None], T]) -> T:
        """Returns what `read` makes of the newest step, while the run may go on: it prunes older ones.

        Args:
          read: step -> result; None where there is no checkpoint. Called again where a newer one has appeared by the
            time that it fails, so that the older may have been deleted under its hands.

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
            f"checkpoints in {self._folder} are deleted before they are read, the last of step {newest}: try again "
            "with faster storage, or have the run keep more of them (keep_checkpoints)"
        )

    def saved_shape(self, step: int) -> SavedShape:
        """The sizes of the state saved at `step`."""
        run = self._record(step)
        with self._reading(step):
            return SavedShape(*(run[name] for name in SavedShape._fields))

    def _record(self, step: int) -> dict[str, Any]:
        missing = [name for name in _ITEMS if not (self._folder / str(step) / name / "commit_success.txt").exists()]
        if missing:
            raise self._damaged(step, f"no complete {' or '.join(missing)}")
        return self._json(step, "run")

    def _json(self, step: int, item: str) -> dict[str, Any]:
        """Return what a checkpoint holds beside its arrays; each process reads it, and so compares its digest."""
        folder = self._folder / str(step)
        with self._reading(step):
            entries = digests.read_digests(folder)
            if entries is not None:
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
        except Exception as error:  # of many kinds: what is cut short or does not decode
            if is_of_exchange(error):
                raise
            raise self._damaged(step, error) from error

    def _damaged(self, step: int, reason: object) -> UserError:
        if not (self._folder / str(step)).exists():
            return TransientError(
                f"the checkpoint {self._folder / str(step)} was deleted while it was read: the same command takes the "
                "newest that is there"
            )
        while isinstance(reason, BaseException) and reason.__cause__ is not None:
            reason = reason.__cause__  # what orbax raises itself names a method of its own instead of the file
        reason = (str(reason).strip().splitlines() or [type(reason).__name__])[0][:200]
        return UserError(
            f"the checkpoint {self._folder / str(step)} is not whole ({reason}): delete that folder to go on from the "
            "one before it, or restore it"
        )

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        """Tells of storage that takes no more, which a save, or a later one or the wait for it, reports."""
        try:
            yield
        except (OSError, ValueError) as error:  # the latter is how arrays tell of it
            if is_of_exchange(error):
                raise
            reason = " ".join(str(error).split())[-300:]  # which ends with the file and what is wrong with it
            if is_full_disk(error):
                reason = f"{self._folder}: no space left on device"
            raise TransientError(
                f"a checkpoint could not be saved ({reason}): make room, or mend what it says; the same command goes "
                "on from the last one that is whole"
            ) from error

    def beside(self, step: int) -> dict[str, Any] | None:
        """Return what the exchanges of an island have saved beside the state of `step`; None for a run without."""
        return self._record(step).get("island")

    def save(
        self,
        step: int,
        state: TrainState,
        data: dict[int, dict],
        totals: Totals | None = None,
        beside: Mapping[str, Any] | None = None,
    ) -> None:
        """Starts to save the state after inner step `step`; the arrays may be donated as soon as this returns.

        Args:
          step: inner steps taken.
          state: arrays on their devices.
          data: replica -> where its data stream stands, for the replicas of this process.
          totals: what the run has come to; None: nothing is known of it but its steps.
          beside: what the run's exchanges keep beside the state, as the journal of an island.

        Raises:
          TransientError: if the storage did not take this checkpoint or the one before, as a full disk does not.
        """
        if step in self._manager.all_steps():
            return
        positions = {
            str(replica): position for part in self._processes.gather(data) for replica, position in part.items()
        }
        run = record.make_record(self._config, positions["0"]["source"], self._from_step)
        if totals is not None:
            run["totals"] = totals.to_json()
        if beside:
            run["island"] = dict(beside)
        with self._saving():
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state._asdict()),
                    data=ocp.args.JsonSave(positions),
                    run=ocp.args.JsonSave(run | SavedShape.of(state)._asdict()),
                ),
            )

    def restore(self, step: int, like: TrainState) -> TrainState:
        """Returns the state at `step`.

        Args:
          step: a step that was saved.
          like: shapes as they were saved, dtypes and shardings; the mesh may be another than the one that saved.
        """
        self.verify(step)
        arguments = ocp.args.Composite(state=ocp.args.StandardRestore(like._asdict()))
        with self._reading(step):
            return TrainState(**self._manager.restore(step, args=arguments)["state"])

    def restore_each(self, step: int, like: TrainState, conversions: PyTree) -> TrainState:
        """Returns the state at `step`, each array of it converted before the next one is read.

        Of several processes, each has to call this.

        Args:
          step: a step that was saved.
          like: see `restore`.
          conversions: a tree like it of functions, array as saved -> what to keep of it.
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
        """The data position at `step` of every replica, in their order."""
        saved = self._json(step, "data")
        with self._reading(step):
            data = {int(replica): position for replica, position in saved.items()}
            return [data[replica] for replica in range(len(data))]

    def restore_params(self, step: int, keep: Callable[[np.ndarray], np.ndarray] = lambda x: x) -> PyTree:
        """The fast weights alone at `step`, as numpy arrays with the replicas in front.

        Args:
          step: a step that was saved.
          keep: array of all replicas -> what to keep of it, again with replicas in front. Applied before the next array
            is read: whoever keeps one model never holds all.
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
        return resize_vocabulary(params, self._config.model.vocab_size)

    def close(self) -> None:
        """Waits until what was saved is on disk."""
        with self._saving():
            self._manager.wait_until_finished()
            self._manager.close()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error, saves of several processes cannot be waited for: the others may never come to theirs.
        if kind is None or self._processes.alone:
            self.close()


def _restore_args(x: Any) -> ocp.RestoreArgs:
    """How orbax restores an array of the shape `x`; of a placeholder nothing."""
    if x is ocp.PLACEHOLDER:
        return ocp.RestoreArgs()
    return ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape, dtype=x.dtype)


def _nested(path: tuple[Any, ...], leaf: Any) -> PyTree:
    """The dicts along a path of jax, with nothing else in them."""
    return functools.reduce(lambda inner, key: {key.key: inner}, reversed(path), leaf)


def _move_to_new_name(path: Path, folder: Path) -> None:
    """Moves `path` into `folder`, under its own name or, where that is taken, with a number behind it."""
    folder.mkdir(exist_ok=True)
    names = itertools.chain([path.name], (f"{path.name}.{number}" for number in itertools.count(1)))
    path.rename(next(folder / name for name in names if not (folder / name).exists()))


def load_for_export(
    workdir: str | Path, replica: int | None = None, tokenizer: Tokenizer | None = None
) -> tuple[TrainConfig, PyTree]:
    """The configuration and the weights of one model of a run's newest checkpoint; the run may be training.

    Args:
      workdir: the run's folder.
      replica: which replica; None: the merged model, the plain mean of all.
      tokenizer: what the model is to be used with, which has to be the run's; None: unchecked.

    Returns:
      The run's configuration, and parameters without a replica axis, as numpy arrays: put them on the devices that
      they belong on. One array of all replicas is read at a time, which orbax may hold twice while it decodes it.

    Raises:
      UserError: if there is no checkpoint, or no such replica, or the tokenizer is another.
    """
    config = load_saved(workdir)
    checkpointer = Checkpointer(workdir, config, read_only=True)

    def read(step: int | None) -> PyTree:
        if step is None:
            raise UserError(f"{workdir} holds no checkpoint: train first, or give another folder")
        if tokenizer is not None:
            checkpointer.check_tokenizer(step, tokenizer)
        num_replicas = checkpointer.saved_shape(step).num_replicas
        if replica is not None and not 0 <= replica < num_replicas:
            raise UserError(f"replica {replica} does not exist: the run has 0 to {num_replicas - 1}")
        return checkpointer.restore_params(step, one)

    def one(x: np.ndarray) -> np.ndarray:
        if replica is not None:
            return x[[replica]]  # a copy: a slice would hold on to the others
        return x.mean(axis=0, dtype=np.float32, keepdims=True).astype(x.dtype, copy=False)

    params = checkpointer.read_newest(read)
    checkpointer.close()
    return config, jax.tree.map(lambda x: x[0], params)
