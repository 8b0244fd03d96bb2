"""Identity of data files for the check at a resume: local ones by samples, others by their versions."""

import functools
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import NamedTuple

from noloco_jax.storage.addresses import is_remote, remote_facts
from noloco_jax.storage.retries import with_retries

_BYTES = 1 << 26  # read at most, of all files together
_FILES = 1 << 14  # sampled at most, evenly spaced
_PLACES = 1 << 10  # in all files together, as long as each has two
_READ_AT_ONCE = 16  # files: a network file system answers many at once


# Facts on the contents of files. Data that were moved between a disk and a server have one of them before, one after.
CONTENT_FACTS = ("sampled contents", "file versions")


class FileState(NamedTuple):
    """A file as far as its server knows it, `version` in nanoseconds where that is the file system, `size` in bytes."""

    path: str
    version: int | str
    size: int


def file_state(path: str) -> FileState:
    """Ask the file system, or a server once in a process. Transient errors are retried."""
    if is_remote(path):
        size, version = remote_facts(path)
        return FileState(path, version, size)
    stat = with_retries(functools.partial(os.stat, path), path)
    return FileState(path, stat.st_mtime_ns, stat.st_size)


def file_states(paths: Sequence[str]) -> tuple[FileState, ...]:
    """Return the state of each file; servers are asked for many at once."""
    if not any(map(is_remote, paths[:1])):
        return tuple(map(file_state, paths))
    with ThreadPoolExecutor(_READ_AT_ONCE) as pool:
        return tuple(pool.map(file_state, paths))


def content_fact(files: Sequence[str]) -> dict[str, str]:
    """Return a fact on the contents of the files, one of `CONTENT_FACTS`: samples of local ones, else versions."""
    if any(map(is_remote, files[:1])):
        versions = [state.version for state in file_states(files)]
        return {"file versions": sha256(json.dumps(versions).encode()).hexdigest()[:16]}
    return {"sampled contents": sampled_contents(files)}


def sampled_contents(files: Sequence[str]) -> str:
    """Digest samples of files, which tell them from others of the same sizes, whatever their names and times.

    Up to 64 MiB every byte counts. Of more, blocks at evenly spaced places count, a file's first and last among them:
    an insertion or a removal shifts what comes after it and is noticed; bytes that are overwritten in place between the
    blocks are not, unless the file ends in a checksum of all of it, as gzip has it. Nor is a change in a file beyond
    16,384 that is not sampled.

    """
    sampled = tuple(map(file_state, files))[:: -(-len(files) // _FILES) or 1]
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

    return with_retries(read, file.path)
