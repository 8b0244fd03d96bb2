"""Lock of a run's folder, so that one trainer at a time writes there; readers take none."""

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax

from noloco_jax.cluster.processes import Processes
from noloco_jax.errors import UserError

LOCK_FILE = "trainer.lock"
_OTHERS_SECONDS = 600.0  # most that cold storage delays one process of a run behind another


class Holder(NamedTuple):
    """The trainer that a lock names.

    Attributes:
      host: its machine's name.
      process: its number there.
      started: the time when it took the lock.
      boot: the boot of the machine, which its containers share.
    """

    host: str
    process: int
    started: str
    boot: str

    def __str__(self) -> str:
        return f"the trainer on {self.host} (process {self.process}, since {self.started})"

    @property
    def is_here(self) -> bool:
        """Return True if this machine's kernel knows whether the holder is alive."""
        return self.host == socket.gethostname() or self.boot == _boot()


@contextlib.contextmanager
def workdir_locked(workdir: Path, processes: Processes, *, force: bool) -> Iterator[None]:
    """Hold the lock of `workdir` in the body, for all processes of a run: the first one takes it.

    Raises:
      UserError: if another run holds the lock.
    """
    with WorkdirLock(workdir, force=force) if jax.process_index() == 0 else contextlib.nullcontext():
        processes.wait_at("workdir", _OTHERS_SECONDS)
        yield


class WorkdirLock:
    """Lock of a folder as a context, by `LOCK_FILE`: a file that names the holder, and is empty without one.

    The kernel's `flock` of the file decides. It ends with its process, however that ends. As some shared file systems
    do not pass it on to other machines, a lock that names another machine is refused although it may be free.

    Args:
      workdir: the folder; made when missing.
      force: take the lock of a trainer on another machine, which is known to have ended.
    """

    def __init__(self, workdir: Path, *, force: bool = False):
        self._workdir, self._force = workdir, force
        self._open = contextlib.ExitStack()

    def __enter__(self) -> "WorkdirLock":
        self._workdir.mkdir(parents=True, exist_ok=True)
        path = self._workdir / LOCK_FILE
        with contextlib.suppress(FileNotFoundError):
            holder = _parse(path.read_bytes())
            if holder is not None and not holder.is_here:
                if not self._force:
                    raise UserError(
                        f"{self._workdir} is locked by {holder}: wait for its end, or give --force_unlock once you "
                        "know that it has ended"
                    )
                path.unlink()  # the file system may keep the lock of a machine that is gone
        with contextlib.ExitStack() as opened:
            try:
                file = opened.enter_context(path.open("ab"))
            except PermissionError as error:
                raise UserError(
                    f"{path} cannot be opened ({error.strerror}): it is of another user's trainer; give another "
                    "--workdir"
                ) from None
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"{self._workdir} is in use by {_parse(path.read_bytes()) or 'a trainer'}: wait for its end, stop "
                    "it, or give another --workdir"
                ) from None
            except OSError:
                pass  # the file system has no such locks
            now = time.strftime("%Y-%m-%d %H:%M:%S %z")
            file.truncate(0)
            file.write(json.dumps(Holder(socket.gethostname(), os.getpid(), now, _boot())._asdict()).encode())
            file.flush()
            os.fsync(file.fileno())  # NFS shows it to other machines only then
            opened.callback(file.truncate, 0)
            self._open = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()


def _parse(content: bytes) -> Holder | None:
    """Return the holder that a lock's file names; None for a file that is empty or damaged."""
    try:
        return Holder(**json.loads(content))
    except (ValueError, TypeError):
        return None


def _boot() -> str:
    """Return what tells this boot of this machine from all others; a text of its own where that is not known."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return socket.gethostname()
