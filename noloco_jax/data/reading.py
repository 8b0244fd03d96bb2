"""Reading data files: transient errors are retried, damaged files refused or skipped, contents sampled for a digest."""

import errno
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from time import sleep
from typing import NamedTuple, TypeVar

from noloco_jax.errors import TransientError, UserError, tell

T = TypeVar("T")

# What a network file system reports while a server restarts, a mount comes back or a file is replaced.
TRANSIENT_ERRNOS = (errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.ENOENT)
RETRY_DELAYS = (0.1, 0.4, 1.0, 2.0, 4.0)  # seconds

_BYTES = 1 << 26  # read at most, of all files together
_FILES = 1 << 14  # sampled at most, evenly spaced
_PLACES = 1 << 10  # in all files together, as long as each has two
_READ_AT_ONCE = 16  # files: a network file system answers many at once


class DamagedFileError(UserError):
    """A data file whose bytes arrived and cannot be decoded."""


def read_with_retries(read: Callable[[], T], path: str) -> T:
    """Call `read`, again after each of `RETRY_DELAYS` while its error is a transient one, and return its result.

    Args:
      read: reads from the file `path`. It must be able to start again after an `OSError`.

    Raises:
      TransientError: if the error was still there at the last attempt.
      UserError: for any other error of the operating system.
      OSError: one without a number, as decoders raise it.
    """
    delays = iter(RETRY_DELAYS)
    while True:
        try:
            return read()
        except OSError as error:
            if error.errno is None:
                raise
            reason = error.strerror or str(error)
            if error.errno not in TRANSIENT_ERRNOS:
                raise UserError(f"{path} cannot be read ({reason}): make it readable") from None
            delay = next(delays, None)
            if delay is None:
                raise TransientError(
                    f"{path} cannot be read ({reason}), not even after {sum(RETRY_DELAYS):g} seconds of retries: "
                    "the same command continues once the file is back"
                ) from None
        sleep(delay)


_reported: set[str] = set()


def stop_or_skip(error: UserError, on_bad_shard: str) -> None:
    """Raise `error` if `on_bad_shard` is "stop"; "skip" reports it to stderr, once in a process."""
    if on_bad_shard == "stop":
        raise error
    if str(error) not in _reported:
        _reported.add(str(error))
        tell(f"warning: skipped, as data.on_bad_shard='skip' says: {error}")


class FileState(NamedTuple):
    """A file as far as the file system knows it, `modified` in nanoseconds, `size` in bytes."""

    path: str
    modified: int
    size: int


def file_state(path: str) -> FileState:
    """Ask the file system. Transient errors are retried."""
    stat = read_with_retries(functools.partial(os.stat, path), path)
    return FileState(path, stat.st_mtime_ns, stat.st_size)


def sampled_contents(files: Sequence[str]) -> str:
    """Digest samples of files, which tell them from others of the same sizes, whatever their names and times.

    Up to 64 MiB every byte counts. Of more, blocks at evenly spaced places count, a file's first and last among them:
    an insertion or a removal shifts what comes after it and is noticed; bytes that are overwritten in place between the
    blocks are not, unless the file ends in a checksum of all of it, as gzip has it. Nor is a change in a file beyond
    16,384 that is not sampled.

    Files are read once in a process, unless they change.
    """
    return _sampled_contents(tuple(map(file_state, files)))


@functools.lru_cache(maxsize=8)  # data sets, shared by the streams of a process
def _sampled_contents(files: tuple[FileState, ...]) -> str:
    sampled = files[:: -(-len(files) // _FILES) or 1]
    places = max(2, _PLACES // max(len(sampled), 1))
    block = max(_BYTES // (max(len(sampled), 1) * places), 1)
    found = sha256()
    with ThreadPoolExecutor(_READ_AT_ONCE) as pool:
        for digest in pool.map(functools.partial(_sample, places, block), sampled):
            found.update(digest)
    return found.hexdigest()[:16]


def _sample(places: int, block: int, file: FileState) -> bytes:
    """Digest a file's blocks of `block` bytes at `places` places, or all of a file that is no longer than these."""
    last = file.size - block
    starts = [last * k // (places - 1) for k in range(places)] if file.size > places * block else [0]
    size = block if len(starts) > 1 else file.size

    def read() -> bytes:
        found = sha256()
        with open(file.path, "rb", buffering=0) as opened:
            for start in starts:
                opened.seek(start)
                found.update(opened.read(size))
        return found.digest()

    return read_with_retries(read, file.path)
