"""Atomic writes, and checks of the folders that a user names."""

import contextlib
import errno
import fcntl
import io
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from noloco_jax.errors import TransientError, UserError
from noloco_jax.formatting import format_memory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COMPRESSED = 0.75  # of an array's size at least; 0.9 was measured of float32 after 40 steps


def folder_of_flag(text: str) -> Path:
    """The folder that a flag names; a shell leaves the ~ of `--flag=~/folder` to us.

    Raises `UserError` for an address such as gs://bucket/folder.
    """
    if re.match(r"\w[\w+.-]*:/", text):
        raise UserError(f"{text} is an address, where a folder of the file system is wanted: mount it, give its path")
    if not text:
        raise UserError("an empty text names no folder: give its path")  # as of a shell variable that is not set
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UserError(f"{text}: there is no user of this name here: give the folder's path") from None


def check_writable(folder: Path) -> None:
    """Raise `UserError` where `folder` cannot be written, or not be made; a folder is made to see it, and removed."""
    existing = _existing(folder)
    if not existing.is_dir():
        raise UserError(f"{folder} cannot be a folder: {existing} is in the way; give another, or move that aside")
    with full_disk_reported(folder, "the same command tries again"):
        try:
            os.rmdir(tempfile.mkdtemp(prefix=".noloco_jax-", dir=existing))
        except OSError as error:
            if is_full_disk(error):
                raise
            raise UserError(
                f"{folder} cannot be written: {existing} takes no new folder ({error.strerror}); give another folder"
            ) from None


def no_room_message(folder: Path, num_bytes: int) -> str:
    """Return a message where the disk of `folder` has no room for a checkpoint of `num_bytes` in memory, else ""."""
    disk = shutil.disk_usage(_existing(folder))
    if disk.total and disk.free < _COMPRESSED * num_bytes:  # some network file systems tell no size
        return (
            f"{folder}: a checkpoint takes about {format_memory(num_bytes)}, and {format_memory(disk.free)} are free: "
            "make room, or give another folder"
        )
    return ""


def _existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    absolute = folder.absolute()
    return next(path for path in (absolute, *absolute.parents) if os.path.lexists(path))


def check_checkpoint_path(workdir: Path) -> None:
    """Raise `UserError` for a path with characters that Orbax takes for a pattern: it could not restore from there."""
    path = str(workdir.absolute())
    if found := [character for character in "[]\\" if character in path]:
        raise UserError(f"checkpoints in {path} could not be read again for its {found[0]!r}: give another folder")


def is_full_disk(error: BaseException) -> bool:
    """Return True for an error of a full disk or quota; libraries other than Python say it in words."""
    numbers = (errno.ENOSPC, errno.EDQUOT)
    return getattr(error, "errno", None) in numbers or any(os.strerror(number) in str(error) for number in numbers)


@contextlib.contextmanager
def full_disk_reported(folder: Path, then: str = "the same command resumes from the last checkpoint") -> Iterator[None]:
    """Make a `TransientError` of a full disk that its body meets while it writes to `folder`; `then` follows room."""
    try:
        yield
    except OSError as error:
        if not is_full_disk(error):
            raise
        raise TransientError(f"{error.filename or folder}: no space left on device: make room, {then}") from error


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Write a file beside `path` and rename it, so that a process killed meanwhile leaves the former file or none.

    What it leaves beside is written over by the next write: so one process at a time may write a path. Text is written
    as UTF-8. The folder is made when missing. Returns the path.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)  # it may be what fills the disk
        raise
    return path


def write_picture(path: str | os.PathLike[str], figure: "Figure") -> Path:
    """Write a figure as a PNG, in the resolution that it has, as `write_whole` does."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import

    content = io.BytesIO()
    FigureCanvasAgg(figure).print_png(content)  # `savefig` draws twice, for its options
    return write_whole(path, content.getvalue())


@contextlib.contextmanager
def one_command_in(folder: Path, lock_file: str, in_use: str) -> Iterator[None]:
    """Hold a folder, made when missing, for one command; raise `UserError` with `in_use` while another one holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / lock_file).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{in_use}: wait for its end, or stop it") from None
        yield
