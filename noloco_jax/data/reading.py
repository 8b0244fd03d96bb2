"""Data files: their state, what is damaged in them, and lost processes that read."""

import functools
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256

from noloco_jax.errors import TransientError, UserError, tell
from noloco_jax.storage.addresses import is_remote, remote_facts
from noloco_jax.storage.retries import with_retries

READ_AT_ONCE = 16  # files: a server answers many at once
VERSIONS = "file versions"  # of files on a server, where these are facts about data


class DamagedFileError(UserError):
    """A data file whose bytes arrived and cannot be decoded."""


class WorkerLostError(TransientError):
    """A worker process was killed or broke down; another may make its chunks."""


def file_sizes(paths: Sequence[str]) -> list[int]:
    """Return the bytes of each file. Transient errors are retried; servers are asked for many files at once."""
    if not any(map(is_remote, paths[:1])):
        return [with_retries(functools.partial(os.path.getsize, path), path) for path in paths]
    with ThreadPoolExecutor(READ_AT_ONCE) as pool:
        return [facts.size for facts in pool.map(remote_facts, paths)]


def versions_fact(paths: Sequence[str]) -> dict[str, str]:
    """Return the fact `VERSIONS` of files on a server; nothing for local files, whose times change with a copy."""
    if not any(map(is_remote, paths[:1])):
        return {}
    versions = repr([remote_facts(path).version for path in paths])
    return {VERSIONS: sha256(versions.encode()).hexdigest()[:16]}


_reported: set[str] = set()
_left_out: set[int] = set()  # documents, by the hashes of the reasons


def leave_out(reason: str) -> None:
    """Report a document that cannot be read to stderr: the 1st, 10th, 100th, ... of a process."""
    if (key := hash(reason)) not in _left_out:
        _left_out.add(key)
        if re.fullmatch("10*", str(len(_left_out))):
            count = f"{len(_left_out)} unreadable document{'s' * (len(_left_out) > 1)}"
            tell(f"warning: {count} so far, taken as empty: {reason}")


def tell_once(line: str) -> None:
    """Print a line to stderr, once in a process."""
    if line not in _reported:
        _reported.add(line)
        tell(line)
