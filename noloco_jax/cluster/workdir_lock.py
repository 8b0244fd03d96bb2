"""A lock on a run's folder, so that one trainer at a time writes there; readers take none."""

import contextlib
import fcntl
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax

from noloco_jax.cluster.processes import Processes
from noloco_jax.errors import TransientError, UserError, tell

LOCK_FILE = "trainer.lock"
BEAT_SECONDS = 10.0  # between two signs of life
SILENT_SECONDS = 60.0  # without one, until a trainer on another machine is taken for dead; NFS may cache times as long
_FIRST_BEAT_SECONDS = 2.0  # two may take a lock at once where a file system keeps machines' flocks apart
_POLL_SECONDS = 0.5
_OTHERS_SECONDS = 600.0  # most that cold storage delays one process of a run behind another


class Holder(NamedTuple):
    """The trainer that a lock names.

    Attributes:
      host: its machine's name.
      process: its number there.
      started: the time when it took the lock.
      kernel: the boot of the machine; the containers of one machine share it.
      device: the file system there; containers may have mounts of their own, which know nothing of one another.
    """

    host: str
    process: int
    started: str
    kernel: str
    device: int

    def __str__(self) -> str:
        return f"the trainer on {self.host} (process {self.process}, since {self.started})"


def new_holder(folder: Path) -> Holder:
    """Return this process as a holder that takes a lock of `folder` now."""
    now = time.strftime("%Y-%m-%d %H:%M:%S %z")
    return Holder(socket.gethostname(), os.getpid(), now, _kernel(), folder.stat().st_dev)


def in_use(workdir: object, holder: Holder) -> UserError:
    """Return the error for a workdir whose trainer shows life."""
    return UserError(f"{workdir} is in use by {holder}: wait for its end, stop it, or give another --workdir")


def watching(lock: object, what: str, holder: Holder) -> str:
    """Return the line on a lock, a `what`, that is watched because its holder may be dead."""
    return (
        f"{lock} is of {holder}, and whether that still runs cannot be known from here: it shows life every "
        f"{BEAT_SECONDS:.0f} s while it does, so this one waits {SILENT_SECONDS:.0f} s for that (delete the {what} if "
        "you know that it has ended)"
    )


class _Seen(NamedTuple):
    """A lock that was not taken: its holder, the time of its last beat, and why it was not."""

    holder: Holder | None  # None: one that is about to write its name
    beat: int
    reason: str  # "alive": by this machine's kernel; "blocked": by the file system, for a machine that may be gone


@contextlib.contextmanager
def workdir_locked(workdir: Path, processes: Processes, report: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of `workdir` in the body, for all processes of a run: the first one takes it.

    Args:
      workdir: the run's folder; made when missing.
      processes: those of the run. Each has to call this, and enters its body when the lock is taken.
      report: is given lines for people.

    Raises:
      UserError: if another run holds the lock.
    """
    with WorkdirLock(workdir, report) if jax.process_index() == 0 else contextlib.nullcontext():
        processes.wait_at("workdir", SILENT_SECONDS + _OTHERS_SECONDS)
        yield


def holder_of(workdir: Path) -> Holder | None:
    """Return the trainer that has taken the lock of `workdir` and not given it back; it may have been killed."""
    with contextlib.suppress(OSError):
        return _parse((workdir / LOCK_FILE).read_bytes())
    return None


class Watch:
    """Look at the lock of a folder, again and again, without taking it.

    Args:
      workdir: the folder; may not exist yet.
    """

    def __init__(self, workdir: Path):
        self._path = workdir / LOCK_FILE
        self._seen: tuple[int, float] | None = None  # the last beat of another machine's, and when it was new here

    def holder(self) -> Holder | None:
        """Return the trainer that holds the lock, or None.

        Of this machine the kernel tells. Of another one, it holds the lock until it has shown no sign of life for
        `SILENT_SECONDS` of being looked at.
        """
        try:
            file = os.open(self._path, os.O_RDWR)
        except OSError:
            return None
        try:
            locked = try_lock(file)
            holder, status = _parse(os.pread(file, 4096, 0)), os.fstat(file)
        finally:
            os.close(file)
        if holder is None or (locked is not None and _is_here(holder, status.st_dev)):
            return holder if locked is False else None
        if self._seen is None or self._seen[0] != status.st_mtime_ns:
            self._seen = status.st_mtime_ns, time.monotonic()
        return holder if time.monotonic() - self._seen[1] < SILENT_SECONDS else None


class WorkdirLock:
    """Lock of a folder as a context, by `LOCK_FILE`: a file that names the holder and is deleted at the end.

    On one machine the kernel's `flock` of the file decides: it ends with its process, however that ends, and whatever
    process gets the same number later. Some shared file systems do not pass it on to other machines, and some keep that
    of a machine that is gone. So the holder also renews the file's time every `BEAT_SECONDS`. A trainer on another
    machine watches for that, by its own clock alone, and takes the lock after `SILENT_SECONDS` without. A holder that
    was only held up finds the other's name in the file at its next beat, and ends at once.

    Args:
      workdir: the folder; made when missing.
      report: is given a line where a lock has to be watched.
    """

    def __init__(self, workdir: Path, report: Callable[[str], None]):
        self._workdir, self._path, self._report = workdir, workdir / LOCK_FILE, report
        self._file = -1  # an open file, while the lock is held
        self._line = b""  # the content written last
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="workdir lock", daemon=True)

    def __enter__(self) -> "WorkdirLock":
        self._workdir.mkdir(parents=True, exist_ok=True)
        first, since = None, 0.0
        while (seen := self._try(first if time.monotonic() - since >= SILENT_SECONDS else None)) is not None:
            if first is None or seen.holder != first.holder:
                first, since = seen, time.monotonic()
                if seen.holder is not None and seen.reason != "alive":
                    self._report(watching(self._path, "file", seen.holder))
            elif seen.holder is not None and (seen.reason == "alive" or seen.beat != first.beat):
                raise in_use(self._workdir, seen.holder)
            elif time.monotonic() - since >= SILENT_SECONDS + 2 * _POLL_SECONDS:
                raise TransientError(
                    f"{self._path} is locked by {seen.holder or 'a trainer'}, which shows no life, and the file system "
                    "keeps the lock: try again, or delete that file once you know that no trainer runs there"
                )
            time.sleep(_POLL_SECONDS)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            if self._path.read_bytes() == self._line:
                self._path.unlink()
        self._let_go()

    def _try(self, given_up: _Seen | None) -> _Seen | None:
        """Take the lock if it is free, its holder is dead, or it is still as `given_up`; else return it as seen."""
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        except PermissionError as error:
            raise UserError(
                f"{self._path} cannot be opened ({error.strerror}): it is of another user's trainer; delete it once "
                "you know that none runs there, or give another --workdir"
            ) from None
        try:
            locked = try_lock(file)
            holder, status = _parse(os.pread(file, 4096, 0)), os.fstat(file)
            here = locked is not None and holder is not None and _is_here(holder, status.st_dev)
            seen = _Seen(holder, status.st_mtime_ns, "alive" if here else "blocked" if locked is False else "other")
            if locked is False or not (holder is None or here or seen == given_up):
                return seen
            if not self._is_at_path(status):  # its holder has just deleted it
                return _Seen(None, 0, "other")
            self._line = _line_of(new_holder(self._workdir))
            os.pwrite(file, self._line, 0)  # before the end is cut off: readers take the first line
            os.ftruncate(file, len(self._line))
            os.fsync(file)  # NFS shows it to other machines only then
            self._file, file = file, -1
            return None
        finally:
            if file >= 0:
                os.close(file)

    def _is_at_path(self, status: os.stat_result) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.stat(self._path), status)
        return False

    def _let_go(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _beat(self) -> None:
        for seconds in itertools.chain([_FIRST_BEAT_SECONDS], itertools.repeat(BEAT_SECONDS)):
            if self._closed.wait(seconds):
                return
            with contextlib.suppress(OSError, UserError):  # storage may be out of reach for a while
                self._show_life()

    def _show_life(self) -> None:
        try:
            line = self._path.read_bytes()
        except FileNotFoundError:
            line = b""
        if line == self._line:
            os.utime(self._path)
        elif (holder := _parse(line)) is None:  # somebody has deleted it
            self._let_go()
            self._try(None)
        else:
            message = f"{self._path} is now of {holder}, who saw no life of this one: it ends, and saves nothing"
            tell(f"error: {message}")
            os._exit(UserError.exit_status)


def try_lock(file: int) -> bool | None:
    """Lock an open file, which may be written to; return None where its file system has no such locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _line_of(holder: Holder) -> bytes:
    return json.dumps(holder._asdict()).encode() + b"\n"


def _parse(content: bytes) -> Holder | None:
    """Return the holder that a lock's file names; None for a file that is empty or damaged."""
    try:
        return Holder(**json.loads(content.partition(b"\n")[0]))
    except (ValueError, TypeError):
        return None


def _is_here(holder: Holder, device: int) -> bool:
    """Return whether this machine's `flock` tells if the holder is alive."""
    return (holder.kernel, holder.device) == (_kernel(), device) and holder.kernel != ""


def _kernel() -> str:
    """Return what tells this boot of this machine from all others; nothing where that is not known."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""
