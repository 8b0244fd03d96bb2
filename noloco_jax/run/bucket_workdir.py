"""Local copy of a run's workdir in a bucket, and uploads of its files and checkpoints.

A checkpoint is written to the local copy, and uploaded whole in Orbax's background thread: first the files beside it,
so that metrics reach as far as it, then its files, its digests, and last `contents.json`, which makes it one. Files
beside checkpoints are small and replaced whole when they have changed: a killed process leaves the former one.

While a store fails, the run goes on: a checkpoint that could not be uploaded stays in the local copy and is tried
again, until a newer one takes its place. `AHEAD_FILE` marks a copy that holds more than the bucket: it is kept at the
end, and the next start uploads it, unless the workdir has gone on elsewhere.
"""

import contextlib
import itertools
import json
import shutil
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import jax

from noloco_jax.cluster.processes import Processes
from noloco_jax.cluster.workdir_lease import WorkdirLease, lease_holder
from noloco_jax.cluster.workdir_lock import LOCK_FILE, SILENT_SECONDS, Holder, workdir_locked
from noloco_jax.errors import TransientError, UserError, tell
from noloco_jax.files import check_writable, write_whole
from noloco_jax.run.bucket_reading import (
    CHECKPOINTS,
    CONTENTS_FILE,
    LISTED_FOLDERS,
    Contents,
    at_once,
    download_checkpoint,
    download_digests,
    download_files,
    download_newest,
    read_contents,
)
from noloco_jax.run.digests import DIGESTS_FILE, read_digests
from noloco_jax.storage import objects
from noloco_jax.storage.local_copies import ADDRESS_FILE, SCRATCH_VARIABLE, Address, mark_as_copy, scratch_folder

SET_ASIDE = "checkpoints_set_aside"
SYNC_SECONDS = 10.0  # between two looks for files that have changed
_BYTES_PER_SECOND = 1 << 20  # at most, of a file that is replaced again and again
_COPY_SECONDS = 3600.0  # within which the first process has copied what a run resumes from
AHEAD_FILE = ".ahead"  # in a copy that holds more than the bucket: the checkpoints that the bucket had, as JSON
_NOT_COPIED = (CHECKPOINTS, SET_ASIDE, LOCK_FILE, ADDRESS_FILE, AHEAD_FILE, "wandb", ".shared")


@contextlib.contextmanager
def opened_workdir(
    address: Address,
    processes: Processes,
    report: Callable[[str], None],
    *,
    from_step: int | None,
    read_only: bool,
) -> Iterator["BucketWorkdir"]:
    """Hold a workdir in a bucket for a run in the body, with a copy of what the run resumes from.

    Args:
      address: the workdir.
      processes: those of the run. Each has to call this; the first one takes the lease, downloads and uploads.
      report: is given lines for people.
      from_step: a checkpoint to copy beside the newest, if it is there.
      read_only: take no lease and write nothing.

    Raises:
      UserError: for a missing bucket, a refusal, a trainer that runs there, or processes without a common folder.
    """
    objects.check_bucket(address)
    if jax.process_index() == 0 and not read_only:
        objects.check_writable(address)
    folder = scratch_folder(address)
    folder = folder.with_name(f"{folder.name}.dry_run") if read_only else folder
    check_writable(folder)
    with workdir_locked(folder, processes, report), contextlib.ExitStack() as stack:
        if jax.process_index() > 0:
            workdir = BucketWorkdir(address, folder, Contents())
        else:
            lease = None if read_only else stack.enter_context(WorkdirLease(address, folder, report))
            contents, unfinished = _copy(address, folder, from_step, report)
            workdir = BucketWorkdir(address, folder, contents, lease, unfinished)
            stack.callback(_end, folder)
        _check_shared(folder, processes)
        with workdir.kept():
            yield workdir


def _copy(
    address: Address, folder: Path, from_step: int | None, report: Callable[[str], None]
) -> tuple[Contents, frozenset[str]]:
    """Make `folder` a copy of the workdir's files and of the checkpoints to resume from.

    A copy that is ahead of the bucket stays as it is.

    Returns:
      What is there, and the names of checkpoints that a killed process left unfinished: `contents.json` does not have
      them. Without that file nothing is known to be unfinished.
    """
    contents = read_contents(address)
    if _is_ahead(folder, contents, report):
        newest = max(_local_steps(folder), default=None)
    else:
        _empty(folder)
        mark_as_copy(folder, address)
        download_files(address, contents.files, folder)
        newest = download_newest(address, folder)
    if from_step in contents.checkpoints and from_step != newest:
        download_checkpoint(address, from_step, folder)
    unfinished: frozenset[str] = frozenset()
    if objects.exists(f"{address}/{CONTENTS_FILE}"):
        there = {name.split("/")[0] for name in objects.list_objects(f"{address}/{CHECKPOINTS}")}
        unfinished = frozenset(there - set(map(str, contents.checkpoints)))
    last = -1 if newest is None else newest
    return contents._replace(checkpoints=tuple(step for step in contents.checkpoints if step <= last)), unfinished


def _local_steps(folder: Path) -> list[int]:
    """Return the steps of the whole checkpoints of a local copy, sorted."""
    whole = (folder / CHECKPOINTS).glob(f"*/{DIGESTS_FILE}")
    return sorted(int(path.parent.name) for path in whole if path.parent.name.isdigit())


def _is_ahead(folder: Path, contents: Contents, report: Callable[[str], None]) -> bool:
    """Return True if the copy that a former start has left is one that the bucket has to catch up with."""
    try:
        known = json.loads((folder / AHEAD_FILE).read_bytes())
    except (FileNotFoundError, ValueError):
        return False
    steps = _local_steps(folder)
    if known != list(contents.checkpoints):
        report(
            f"{folder} holds what a former start could not upload, up to step {max(steps, default=0)}, and the workdir "
            "has gone on without it: it is dropped"
        )
        return False
    return max(steps, default=-1) >= max(known, default=-1)


def _end(folder: Path) -> None:
    """Delete the local copy, unless it is ahead of the bucket."""
    if (folder / AHEAD_FILE).exists():
        step = max(_local_steps(folder), default=0)
        tell(
            f"warning: what could not be uploaded, up to the checkpoint of step {step}, is kept in {folder}: the same "
            "command on this machine uploads it and resumes from it"
        )
    else:
        _empty(folder)


def _empty(folder: Path) -> None:
    """Delete what a folder holds but for its lock."""
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name != LOCK_FILE:
            entry.unlink(missing_ok=True)


def _check_shared(folder: Path, processes: Processes) -> None:
    """Wait until the copy is made; raise `UserError` where a process does not see it."""
    token, path = uuid.uuid4().hex, folder / ".shared"
    if jax.process_index() == 0:
        path.write_text(token, encoding="utf-8")
    processes.wait_at("workdir copied", _COPY_SECONDS)
    seen = processes.gather(path.read_text(encoding="utf-8") if path.is_file() else "")
    if set(seen) != {seen[0]}:
        raise UserError(
            f"the processes do not share {folder}, where checkpoints are put together before they are uploaded: set "
            f"{SCRATCH_VARIABLE} to a folder that all machines of the run share, or give a --workdir on one"
        )


class BucketWorkdir:
    """A workdir in a bucket and its local copy.

    Args:
      address: the workdir.
      folder: its local copy.
      contents: what the workdir holds.
      lease: is renewed before a checkpoint becomes one; None on all processes but the first: they write nothing.
      unfinished: names of checkpoints to delete before any is saved.

    Attributes:
      folder: the local copy.
    """

    def __init__(
        self,
        address: Address,
        folder: Path,
        contents: Contents,
        lease: WorkdirLease | None = None,
        unfinished: Iterable[str] = (),
    ):
        self.folder, self._unfinished = folder, sorted(unfinished)
        self._address, self._contents, self._lease = address, contents, lease
        self._is_ahead = (folder / AHEAD_FILE).exists()  # then nothing is known of what the bucket has
        self._sent = {} if self._is_ahead else {name: _state(folder / name) for name in self._files()}
        self._sent_at: dict[str, float] = {}
        self._turn, self._uploading = threading.RLock(), threading.RLock()
        self._kept: Callable[[list[int]], Iterable[int]] = lambda steps: steps
        self._refusal: UserError | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._sync_often, name="workdir sync", daemon=True)

    def __str__(self) -> str:
        return self._address

    def holder(self) -> Holder | None:
        """Return the trainer that holds the workdir's lease, or was killed while it did."""
        return lease_holder(self._address)

    def steps(self) -> list[int]:
        """Return the steps of the workdir's checkpoints, of which the local copy has some; the first process knows."""
        return list(self._contents.checkpoints)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Upload files that change during the body, and all of them at its end."""
        if self._lease is None:
            yield
            return
        for name in self._unfinished:
            objects.delete_folder(f"{self._address}/{CHECKPOINTS}/{name}")
        if self._is_ahead:
            self._catch_up()
        self._thread.start()
        try:
            yield
        except BaseException as error:
            self._stop()
            if not isinstance(error, TransientError):  # of which the store may be the cause: it has had its retries
                with contextlib.suppress(UserError, OSError):  # the body's error tells more
                    self._catch_up()
            raise
        self._stop()
        self._catch_up()

    def _catch_up(self) -> None:
        """Upload all that the bucket lacks; mark the local copy as ahead if that fails."""
        try:
            self.sync()
            with self._uploading:
                newest = max(self._contents.checkpoints, default=-1)
                for step in [step for step in _local_steps(self.folder) if step > newest]:
                    self._upload(step, self.folder / CHECKPOINTS / str(step))
        except (UserError, OSError):
            self._mark_ahead()
            raise
        self._unmark_ahead()

    def _mark_ahead(self) -> None:
        write_whole(self.folder / AHEAD_FILE, json.dumps(self._contents.checkpoints))
        self._is_ahead = True

    def _unmark_ahead(self) -> None:
        (self.folder / AHEAD_FILE).unlink(missing_ok=True)
        self._is_ahead = False

    def _stop(self) -> None:
        self._closed.set()
        self._thread.join()

    def _sync_often(self) -> None:
        while not self._closed.wait(SYNC_SECONDS):
            with contextlib.suppress(UserError, OSError):  # a save needs an upload, and raises the error
                self.sync(at_most=_BYTES_PER_SECOND)
                if self._is_ahead:
                    self._catch_up()

    def sync(self, at_most: int | None = None) -> None:
        """Upload the files beside the checkpoints that have changed, and delete renamed ones.

        Args:
          at_most: bytes a second of a file that changes often, on average; None: all of them now.
        """
        if self._lease is None:
            return
        with self._turn:
            self._lease.check_if_older(SILENT_SECONDS / 3)  # this process may have been held up
            files = self._files()
            for name in files:
                self._send(name, at_most)
            gone = {name for name in self._sent.keys() - set(files) if name.split("/")[0] in LISTED_FOLDERS}
            self._replace(files=tuple(sorted(self._sent.keys() - gone)))
            for name in gone:  # elsewhere a cleaner of temporary folders deletes, not the run
                objects.delete_object(f"{self._address}/{name}")
                del self._sent[name]

    def _send(self, name: str, at_most: int | None) -> None:
        path = self.folder / name
        try:
            state = _state(path)
            pause = 0.0 if at_most is None else state[1] / at_most
            if self._sent.get(name) == state or time.monotonic() - self._sent_at.get(name, -pause) < pause:
                return
            content = path.read_bytes()
        except FileNotFoundError:
            return  # it is being replaced
        objects.write_object(f"{self._address}/{name}", content)
        self._sent[name], self._sent_at[name] = state, time.monotonic()

    def _files(self) -> list[str]:
        """Return the names of the files of the local copy that belong to the bucket."""
        tops = [path for path in self.folder.iterdir() if path.name not in _NOT_COPIED]
        files = [file for top in tops for file in (top.rglob("*") if top.is_dir() else [top]) if file.is_file()]
        return sorted(file.relative_to(self.folder).as_posix() for file in files if file.suffix != ".tmp")

    def _replace(self, **changes: tuple) -> None:
        """Replace the record of what the workdir holds, where that changes."""
        contents = self._contents._replace(**changes)
        if contents != self._contents:
            objects.write_object(f"{self._address}/{CONTENTS_FILE}", json.dumps(contents._asdict()).encode())
            self._contents = contents

    def publish(self, step: int, folder: Path, kept: Callable[[list[int]], Iterable[int]]) -> None:
        """Upload a checkpoint, and delete those that are no longer kept.

        Where that fails, the checkpoint stays in the local copy for another attempt. `check_not_refused` raises what
        another attempt would not change.

        Args:
          step: its step.
          folder: its local folder, whole and with digests.
          kept: all steps -> those to keep.
        """
        self._kept = kept
        try:
            with self._uploading:
                self._upload(step, folder)
        except UserError as error:
            self._mark_ahead()
            if not isinstance(error, TransientError):
                self._refusal = error
                return
            warnings.warn(
                f"{error}; the run continues, and the checkpoint of step {step} is uploaded from {self.folder} as soon "
                "as that is possible",
                stacklevel=2,
            )
        else:
            self._unmark_ahead()

    def check_not_refused(self) -> None:
        """Raise `UserError` if the store has refused a checkpoint."""
        if self._refusal is not None:
            raise self._refusal

    def _upload(self, step: int, folder: Path) -> None:
        """Upload a checkpoint, and delete those that are no longer kept."""
        assert self._lease is not None
        target = f"{self._address}/{CHECKPOINTS}/{step}"
        self._lease.check()
        self.sync()
        at_once(lambda name: objects.upload_file(folder / name, f"{target}/{name}"), _digests_of(folder))
        objects.upload_file(folder / DIGESTS_FILE, f"{target}/{DIGESTS_FILE}")
        self._lease.check()
        with self._turn:
            steps = sorted({*self._contents.checkpoints, step})
            self._replace(checkpoints=tuple(steps))
            self._delete(set(steps) - set(self._kept(steps)))

    def _delete(self, steps: Iterable[int]) -> None:
        """Delete checkpoints; what cannot be deleted now, the next start deletes."""
        gone = set(steps)
        with self._turn:
            self._replace(checkpoints=tuple(step for step in self._contents.checkpoints if step not in gone))
        for step in sorted(gone):
            try:
                objects.delete_folder(f"{self._address}/{CHECKPOINTS}/{step}")
            except TransientError as error:
                warnings.warn(f"{error}; the run continues", stacklevel=2)

    def set_aside_after(self, step: int) -> int:
        """Move all later checkpoints to checkpoints_set_aside; return their number. A repetition continues."""
        later = [other for other in self._contents.checkpoints if other > step]
        for other in later:
            self._copy_aside(other)
        self._delete(later)
        return len(later)

    def _copy_aside(self, step: int) -> None:
        """Copy a checkpoint, under its own name or, if that is taken, with a number appended."""
        source = f"{self._address}/{CHECKPOINTS}/{step}"
        numbered = (f"{step}.{number}" for number in itertools.count(1))
        free = (name for name in itertools.chain([str(step)], numbered) if not self._is_aside(name))
        target = f"{self._address}/{SET_ASIDE}/{next(free)}"
        with tempfile.TemporaryDirectory(prefix="noloco_jax-") as folder:
            names = download_digests(source, Path(folder))
        at_once(lambda name: objects.copy_object(f"{source}/{name}", f"{target}/{name}"), names)
        objects.copy_object(f"{source}/{DIGESTS_FILE}", f"{target}/{DIGESTS_FILE}")

    def _is_aside(self, name: str) -> bool:
        return objects.exists(f"{self._address}/{SET_ASIDE}/{name}/{DIGESTS_FILE}")


def _digests_of(folder: Path) -> Iterable[str]:
    """Return the names of a whole checkpoint's files."""
    digests = read_digests(folder)
    if digests is None:
        raise FileNotFoundError(f"{folder} was deleted meanwhile, as newer checkpoints are kept")
    return digests


def _state(path: Path) -> tuple[int, int]:
    """Return what changes with a file: the time of its last change, and its size."""
    status = path.stat()
    return status.st_mtime_ns, status.st_size
