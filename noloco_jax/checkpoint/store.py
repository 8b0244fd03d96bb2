"""Checkpoints of a run: everything needed to resume it as if it had never stopped."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy as preservation

from noloco_jax.checkpoint import digests, record
from noloco_jax.checkpoint.quiet import quiet_saves
from noloco_jax.checkpoint.record import Totals
from noloco_jax.checkpoint.saved import ITEMS, Saved, SavedShape
from noloco_jax.cluster.processes import Processes, is_of_exchange, run_processes
from noloco_jax.config import TrainConfig, to_dict
from noloco_jax.errors import TransientError, UserError, described, log_if_slow, tell
from noloco_jax.files import check_checkpoint_path, is_full_disk
from noloco_jax.spmd.programs import TrainState

T = TypeVar("T")
_SET_ASIDE = "checkpoints_set_aside"
_SAVE_SECONDS = 24 * 3600  # Orbax's default is 20 minutes, in which slow storage writes only some 50 GB
_WRITTEN = "async_write_complete"  # part of the name of the Orbax barrier after all processes have written


class _Manager(ocp.CheckpointManager):
    """Orbax's manager, which does not ask JAX whether the run stops.

    It would ask with a number of its own, also from its thread, and JAX agrees on the number after the last that it was
    asked with: one that the run has passed, which would never hear of the stop. No option turns that off in Orbax
    0.12.8, and its v1 interface asks too (findings/orbax_save_hides_sigterm.sh).
    """

    def reached_preemption(self, step: int) -> bool:
        return False


class Checkpointer:
    """Checkpoints of the runs of one workdir, under WORKDIR/checkpoints.

    A checkpoint is written under a temporary name and renamed when complete, so that a killed run leaves only complete
    ones. Every process writes its part of the arrays and their digests, against which restored files are checked.

    Args:
      workdir: the run's folder, the same for all processes.
      config: the run. A checkpoint with another value of a field that must match (`config.changes`) is refused; one
        with another number of replicas is refused unless `config.elastic` says how to convert it.
      processes: the processes that save together; None: all processes of JAX.
      from_step: the step that the run was told to go back to, recorded in its checkpoints.
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
        check_checkpoint_path(Path(workdir))
        self._folder = Path(workdir).absolute() / "checkpoints"
        self._config, self._processes, self._from_step = config, processes or run_processes(), from_step
        self._opened: dict[int, Saved] = {}
        if not read_only:
            self._folder.mkdir(parents=True, exist_ok=True)
        saves = ocp.AsyncOptions(
            timeout_secs=_SAVE_SECONDS,
            barrier_sync_fn=self._digest_and_wait,
            post_finalization_callback=lambda: digests.write_digests(self._unfinished()),
        )
        kept: list[preservation.PreservationPolicy] = [preservation.LatestN(config.keep_checkpoints)]
        if config.keep_period:
            kept.append(preservation.EveryNSteps(config.keep_period))
        options = ocp.CheckpointManagerOptions(
            preservation_policy=preservation.AnyPreservationPolicy([preservation.PreserveAll()] if read_only else kept),
            enable_async_checkpointing=not read_only,
            async_options=None if read_only else saves,
            cleanup_tmp_directories=not read_only,
            read_only=read_only,
            create=not read_only,
        )
        try:
            self._manager = _Manager(self._folder, options=options, item_names=ITEMS)
        except (TypeError, AttributeError, KeyError) as error:  # of Orbax's own notes, where they are damaged
            raise UserError(
                f"the checkpoints in {self._folder} cannot be listed ({described(error)}): restore that folder from a "
                "copy, or give another --workdir"
            ) from error

    def _digest_and_wait(self, *, key: str, timeout_ms: int) -> None:
        """Wait at an Orbax barrier; before the one that follows writing the arrays, write their digests.

        Orbax calls this in a thread of its own, and only if there are several processes.
        """
        if _WRITTEN in key:
            digests.write_own_digests(self._unfinished(), jax.process_index())
        ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)

    def _unfinished(self) -> Path:
        """Return the folder of the checkpoint that is being saved."""
        return max(self._folder.glob(f"*{digests.UNFINISHED}"), key=lambda path: path.stat().st_mtime)

    def steps(self) -> list[int]:
        """Return the steps that have checkpoints, complete or damaged."""
        return sorted(self._manager.all_steps())

    def open(self, step: int) -> Saved:
        """Open the checkpoint of a step; its record is read once. Every process has to call this."""
        if step not in self._opened:
            self._opened[step] = Saved(step, self._manager, self._config, self._processes)
        return self._opened[step]

    def newest(self) -> Saved | None:
        """Open the newest checkpoint, if there is one; raise as `start` does."""
        return self._agreed(self._manager.latest_step())

    def start(self) -> Saved | None:
        """Open the checkpoint to resume from, if there is one. Every process has to call this.

        It is the newest, or that of `from_step`. Once the run has saved checkpoints after going back to `from_step`, it
        is the newest of these, so that the same command resumes the run.

        Raises:
          UserError: if it is damaged, or of another run.
          TransientError: if the file system shows the processes different ones.
        """
        newest, wanted = self._manager.latest_step(), self._from_step
        if wanted is None or (newest is not None and self._went_back_to(newest) == wanted):
            return self._agreed(newest)
        steps = self.steps()
        if wanted not in steps:
            raise UserError(
                f"--from_step={wanted}: {self._folder} holds no checkpoint of that step (there are "
                f"{', '.join(map(str, steps)) or 'none'}): give one that is there, or leave the flag out"
            )
        return self._agreed(wanted)

    def _went_back_to(self, newest: int) -> int | None:
        try:
            return self.open(newest).from_step
        except TransientError:
            raise
        except UserError:  # a damaged checkpoint, which the run is to leave behind
            return None

    def _agreed(self, step: int | None) -> Saved | None:
        """Open a step, after checking that all processes chose the same one."""
        seen = self._processes.gather(step)
        if len(set(seen)) > 1:
            raise TransientError(
                f"the processes see different newest checkpoints in {self._folder} (steps "
                f"{', '.join(sorted({str(step) for step in seen}))}): start again once all see the same"
            )
        return None if step is None else self.open(step)

    def read_newest(self, read: Callable[[Saved | None], T]) -> T:
        """Apply `read` to the newest checkpoint while the run may still be training and pruning older ones.

        Args:
          read: checkpoint, None if there is none -> result. It is called again if it fails and a newer checkpoint has
            appeared, since the older one may have been deleted while it was read.

        Raises:
          UserError: see `start`, and what `read` raises.
        """
        while True:
            newest = self._manager.latest_step()
            try:
                return read(self.newest())
            except (UserError, OSError):
                self._manager.reload()
                if self._manager.latest_step() == newest:
                    raise

    def set_aside_after(self, step: int) -> int:
        """Move all later checkpoints to checkpoints_set_aside beside their folder; return their number.

        Every process has to call this. Nothing is deleted. A run that is killed here moves the rest when it restarts.
        """
        if self._from_step is None:
            return 0  # `step` is the newest
        later = [other for other in self._manager.all_steps() if other > step]
        if jax.process_index() == 0:
            for other in later:
                _move_to_new_name(self._folder / str(other), self._folder.with_name(_SET_ASIDE))
        self._processes.barrier("set aside")
        self._manager.reload()
        return len(later)

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        """Report failed writes in the body, of this save or the one before, as a storage error."""
        try:
            yield
        except (OSError, ValueError) as error:  # writing arrays raises ValueError for storage errors
            if is_of_exchange(error):
                raise
            reason = " ".join(str(error).split())[-300:]  # the end names the file and the error
            if is_full_disk(error):
                reason = f"{self._folder}: no space left on device"
            raise TransientError(
                f"a checkpoint could not be saved ({reason}): make room, or repair the storage; the same command "
                "resumes from the last complete checkpoint"
            ) from error

    def save(
        self,
        step: int,
        state: TrainState,
        data: Mapping[int, Mapping[str, Any]],
        totals: Totals | None = None,
        sync_state: Mapping[str, Any] | None = None,
    ) -> None:
        """Start to save the state after inner step `step`; the arrays may be donated as soon as this returns.

        Args:
          step: inner steps taken.
          state: arrays on their devices.
          data: replica -> position of its data stream, for the replicas of this process.
          totals: the run's totals; None: zeros.
          sync_state: protocol state of the run's exchanges, such as the journal of an island.

        Raises:
          TransientError: if this checkpoint or the one before could not be written, as on a full disk.
        """
        if step in self._manager.all_steps():
            return
        positions = {
            str(replica): position for part in self._processes.gather(data) for replica, position in part.items()
        }
        run = record.make_record(to_dict(self._config), positions["0"]["source"], self._from_step)
        run |= {"totals": asdict(totals or Totals()), **SavedShape.of(self._config.model, state)._asdict()}
        if sync_state:
            run["sync_state"] = dict(sync_state)
        with self._saving():
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state._asdict()),
                    data=ocp.args.JsonSave(positions),
                    run=ocp.args.JsonSave(run),
                ),
            )

    def close(self) -> None:
        """Wait until everything saved is on disk."""
        report = tell if jax.process_index() == 0 else lambda line: None
        with self._saving(), log_if_slow(f"waiting until checkpoints are in {self._folder}", report):
            self._manager.wait_until_finished()
            self._manager.close()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error a process cannot wait for saves of several processes: the others may never reach theirs.
        if kind is None or self._processes.alone:
            self.close()


def _move_to_new_name(path: Path, folder: Path) -> None:
    """Move `path` into `folder`, under its own name or, if that is taken, with a number appended."""
    folder.mkdir(exist_ok=True)
    names = itertools.chain([path.name], (f"{path.name}.{number}" for number in itertools.count(1)))
    path.rename(next(folder / name for name in names if not (folder / name).exists()))
