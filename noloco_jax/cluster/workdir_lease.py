"""A lease on a run's folder in a bucket, so that one trainer at a time writes there; readers take none."""

import contextlib
import json
import os
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from noloco_jax.cluster.workdir_lock import (
    BEAT_SECONDS,
    LOCK_FILE,
    SILENT_SECONDS,
    Holder,
    in_use,
    new_holder,
    watching,
)
from noloco_jax.errors import TransientError, UserError, tell
from noloco_jax.storage import objects

_SETTLE_SECONDS = 2.0  # after writing a lease, until a rival's write that crossed it has landed
_POLL_SECONDS = 2.0


class _Lease(NamedTuple):
    """The content of the object.

    Attributes:
      holder: the trainer.
      folder: its local copy, whose lock the trainers of one machine share: the machine's boot and the folder there.
      key: drawn by the trainer at its start.
      beat: counts its signs of life.
    """

    holder: Holder
    folder: str
    key: str
    beat: int


def lease_holder(address: str) -> Holder | None:
    """Return the trainer that has taken the lease of a workdir and not given it back; it may have been killed."""
    lease = _read(address)
    return None if lease is None else lease.holder


class WorkdirLease:
    """Lease of a folder in a bucket as a context, by the object `LOCK_FILE`: it names the holder, who deletes it.

    The holder renews it every `BEAT_SECONDS` with another number. Another trainer watches for that, by its own clock
    alone, and takes a lease that shows no change for `SILENT_SECONDS`. Of two that take it at once the later write
    stays, and the other finds the name of its rival `_SETTLE_SECONDS` later, or at its next beat at the latest, and
    ends. A conditional write would need no such wait, but pyarrow has none, and not every store knows it.

    The lease of a dead trainer on this machine is taken at once: the lock of the local folder decides there.

    Args:
      address: the workdir.
      folder: its local copy, whose `WorkdirLock` the caller holds.
      report: is given a line where a lease has to be watched.
    """

    def __init__(self, address: str, folder: Path, report: Callable[[str], None]):
        self._address, self._path, self._report = address, f"{address}/{LOCK_FILE}", report
        holder = new_holder(folder)
        self._lease = _Lease(holder, f"{holder.kernel} {holder.device} {folder}", uuid.uuid4().hex, 0)
        self._closed, self._turn = threading.Event(), threading.Lock()
        self._renewed = time.monotonic()
        self._thread = threading.Thread(target=self._beat, name="workdir lease", daemon=True)

    def __enter__(self) -> "WorkdirLease":
        first, since = None, time.monotonic()
        while True:
            seen = _read(self._address)
            is_silent = seen == first and time.monotonic() - since >= SILENT_SECONDS
            if seen is None or is_silent or self._is_dead_here(seen):
                self._write()
                time.sleep(_SETTLE_SECONDS)
                if self._is_mine(_read(self._address)):
                    break
                first, since = None, time.monotonic()
            elif first is None or seen.key != first.key:
                first, since = seen, time.monotonic()
                self._report(watching(self._path, "object", seen.holder))
            elif seen.beat != first.beat:
                raise in_use(self._address, seen.holder)
            time.sleep(_POLL_SECONDS)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._closed.set()
        self._thread.join()
        if kind is not None and issubclass(kind, TransientError):
            return  # the store may be what failed, and asking it would take as long again
        with contextlib.suppress(OSError, UserError):
            if self._is_mine(_read(self._address)):
                objects.delete_object(self._path)

    def check(self) -> None:
        """Renew the lease; end this process at once where another trainer has taken it."""
        with self._turn:
            if self._closed.is_set():
                raise TransientError(f"{self._path} was given back: nothing more is saved")
            seen = _read(self._address)
            if seen is not None and not self._is_mine(seen):
                tell(
                    f"error: {self._path} is now of {seen.holder}, who saw no life of this one: it ends, and saves "
                    "nothing"
                )
                os._exit(UserError.exit_status)
            self._write()

    def check_if_older(self, seconds: float) -> None:
        """Renew the lease, as `check` does, where it was not for so many seconds."""
        if time.monotonic() - self._renewed > seconds:
            self.check()

    def _is_mine(self, seen: _Lease | None) -> bool:
        return seen is not None and seen.key == self._lease.key

    def _is_dead_here(self, seen: _Lease) -> bool:
        return seen.holder.kernel != "" and seen.folder == self._lease.folder

    def _write(self) -> None:
        self._lease = self._lease._replace(beat=self._lease.beat + 1)
        content = self._lease._asdict() | {"holder": self._lease.holder._asdict()}
        objects.write_object(self._path, json.dumps(content).encode())
        self._renewed = time.monotonic()

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError, UserError):  # the store may be out of reach for a while
                self.check()


def _read(address: str) -> _Lease | None:
    """Return the lease; None where there is none.

    Raises `UserError` for what is no lease: of a trainer of another version, say, which may still run.
    """
    path = f"{address}/{LOCK_FILE}"
    try:
        content = objects.read_json(path)
        return _Lease(**content | {"holder": Holder(**content["holder"])})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError):
        raise UserError(
            f"{path} is damaged, or of another version: delete it once you know that no trainer runs there"
        ) from None
