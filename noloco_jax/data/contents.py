"""Digests of files' contents from samples of them, so that terabytes cost no more than 64 MiB of reading."""

import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import NamedTuple

from noloco_jax.data.read_errors import read_with_retries

_BYTES = 1 << 26  # read at most, of all files together
_FILES = 1 << 14  # of more, some evenly spaced ones are sampled
_PLACES = 1 << 10  # in all files together, as long as each has two
_READ_AT_ONCE = 16  # files: a network file system answers many at once


class FileState(NamedTuple):
    """A file as far as the file system knows it, `modified` in nanoseconds, `size` in bytes."""

    path: str
    modified: int
    size: int


def file_state(path: str) -> FileState:
    """Asks the file system. Transient errors are retried."""
    stat = read_with_retries(functools.partial(os.stat, path), path)
    return FileState(path, stat.st_mtime_ns, stat.st_size)


def sampled_contents(files: Sequence[str]) -> str:
    """Tells files from others of the same sizes in the same order, whatever their names and times.

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
    """The digest of a file's blocks of `block` bytes at so many places, or of all of it where it is not longer."""
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
