"""Other processes that train runs of a comparison or write its results, also on machines that share its folder."""

import contextlib
import fcntl
from collections.abc import Iterable, Iterator
from pathlib import Path

from noloco_jax.cluster.workdir_lock import Watch, try_lock
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
        with path.open("r+b") as file:  # as NFS wants it for a lock
            return try_lock(file.fileno()) is False
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def writing_alone(workdir: Path) -> Iterator[None]:
    """Hold, in the body, the lock that comparisons of a folder take to write its results, where there are locks."""
    workdir.mkdir(parents=True, exist_ok=True)
    with (workdir / "comparison.lock").open("a") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
