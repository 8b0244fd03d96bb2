"""Runs of a comparison that other processes train, on this machine or on others that share its folder."""

import fcntl
from collections.abc import Iterable
from pathlib import Path

from noloco_jax.cluster.workdir_lock import Watch
from noloco_jax.compare.plan import Run

LOG_FILE = "log.txt"  # a trainer that a comparison starts holds its lock from the start


class Others:
    """Looks for trainers that are not this comparison's own.

    Args:
      runs: those of the comparison.
      workdir: its folder.
    """

    def __init__(self, runs: Iterable[Run], workdir: Path):
        self._workdir = workdir
        self._watches = {run: Watch(workdir / run.name) for run in runs}

    def trainer_of(self, run: Run) -> str | None:
        """Return who trains a run, or None."""
        holder = self._watches[run].holder()
        if holder is not None:
            return str(holder)
        return "a trainer that begins" if _is_locked(self._workdir / run.name / LOG_FILE) else None


def _is_locked(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
