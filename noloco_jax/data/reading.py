"""Damaged data files, which are refused or skipped, and lost processes that read."""

import re

from noloco_jax.errors import TransientError, UserError, tell


class DamagedFileError(UserError):
    """A data file whose bytes arrived and cannot be decoded."""


class WorkerLostError(TransientError):
    """A worker process was killed or broke down; another may make its chunks."""


_reported: set[str] = set()
_skipped: set[int] = set()  # documents, by the hashes of the errors


def stop_or_skip(error: UserError, on_bad_shard: str) -> None:
    """Raise `error` if `on_bad_shard` is "stop"; "skip" reports it to stderr, once in a process."""
    if on_bad_shard == "stop":
        raise error
    tell_once(f"warning: skipped, as data.on_bad_shard='skip' says: {error}")


def skip_document(error: UserError, on_bad_shard: str) -> None:
    """Raise `error` if `on_bad_shard` is "stop"; "skip" reports the 1st, 10th, 100th, ... document of a process."""
    if on_bad_shard == "stop":
        raise error
    number = len(_skipped)
    _skipped.add(hash(str(error)))
    if len(_skipped) > number and re.fullmatch("10*", str(len(_skipped))):
        total = f"{len(_skipped)} documents so far" if number else "further documents are only counted"
        tell(f"warning: skipped, as data.on_bad_shard='skip' says ({total}): {error}")


def tell_once(line: str) -> None:
    """Print a line to stderr, once in a process."""
    if line not in _reported:
        _reported.add(line)
        tell(line)
