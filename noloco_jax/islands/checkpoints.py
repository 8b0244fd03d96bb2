"""Checkpoints of an island in a user's own loop: its arrays, and what its protocol needs to resume."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from noloco_jax.checkpoint import digests
from noloco_jax.checkpoint.quiet import quiet_saves
from noloco_jax.errors import UserError
from noloco_jax.islands.payload import ArraySpec

_SAVE_SECONDS = 24 * 3600  # as in `checkpoint.store`


class OwnCheckpoints:
    """Checkpoints under WORKDIR/checkpoints, numbered as they are saved; digests are checked before files are used.

    Args:
      workdir: the island's folder.
      specs: name -> spec of each array that is saved, and of what else has to be equal to resume.
      keep: number of checkpoints to keep.
    """

    def __init__(self, workdir: Path, specs: Mapping[str, ArraySpec | str], keep: int):
        quiet_saves()
        self._folder = workdir.absolute() / "checkpoints"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._specs = {name: str(spec) for name, spec in specs.items()}
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            cleanup_tmp_directories=True,
            async_options=ocp.AsyncOptions(
                timeout_secs=_SAVE_SECONDS,
                post_finalization_callback=lambda: digests.write_digests(self._unfinished()),
            ),
        )
        self._manager = ocp.CheckpointManager(self._folder, options=options, item_names=("state", "run"))

    def latest(self) -> int | None:
        """Return the number of the newest checkpoint, or None."""
        return self._manager.latest_step()

    def save(self, arrays: Sequence[Any], run: Mapping[str, Any]) -> None:
        """Start to save; JAX arrays may be donated and NumPy arrays changed as soon as this returns."""
        number = 0 if (last := self.latest()) is None else last + 1
        state = {_key(i): x.copy() if not isinstance(x, jax.Array) else x for i, x in enumerate(arrays)}
        run = {**run, "specs": self._specs}
        self._manager.save(
            number, args=ocp.args.Composite(state=ocp.args.StandardSave(state), run=ocp.args.JsonSave(run))
        )

    def restore(self, number: int, like: Sequence[jax.ShapeDtypeStruct]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arrays of a checkpoint, in the order saved, and what was saved with them.

        Raises `UserError` for a damaged checkpoint, and for one of other arrays.
        """
        folder = self._folder / str(number)
        try:
            entries = digests.read_digests(folder)
            digests.check_files(folder, entries or {})
            run = json.loads((folder / "run" / "metadata").read_bytes())
        except (digests.MismatchError, OSError, ValueError) as error:
            raise UserError(
                f"the checkpoint {folder} cannot be read ({error}): restore it from a copy, or move it aside to resume "
                "from the one before it, or from a peer"
            ) from None
        saved = run["specs"]
        changed = [name for name in {**saved, **self._specs} if saved.get(name) != self._specs.get(name)]
        if changed:
            name = changed[0]
            raise UserError(
                f"the checkpoint {folder} is of other arrays ({name}: {saved.get(name, 'none')} there, "
                f"{self._specs.get(name, 'none')} here): give another workdir"
            )
        # Numbers and NumPy arrays never become JAX arrays, which would cut their 64 bits to 32.
        target = {_key(i): x if x.sharding else np.empty(x.shape, x.dtype) for i, x in enumerate(like)}
        state = self._manager.restore(number, args=ocp.args.Composite(state=ocp.args.StandardRestore(target)))["state"]
        return [state[_key(i)] for i in range(len(like))], run

    def close(self) -> None:
        """Wait until everything is on disk."""
        self._manager.wait_until_finished()
        self._manager.close()

    def _unfinished(self) -> Path:
        """Return the folder of the checkpoint that is being saved."""
        return max(self._folder.glob(f"*{digests.UNFINISHED}"), key=lambda path: path.stat().st_mtime)


def _key(number: int) -> str:
    return f"{number:05d}"
