"""Data files: those in a folder and below it, their division into training and validation, and their state."""

import functools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256

import numpy as np

from noloco_jax.data.source import SourceOptions
from noloco_jax.errors import UserError, tell
from noloco_jax.storage import is_remote, list_files, remote_facts, with_retries

_FIRST_BYTES = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd"}
COMPRESSED = tuple(_FIRST_BYTES)
# The names of each kind's files.
SUFFIXES = {
    "jsonl": (
        ".jsonl",
        ".ndjson",
        *(kind + suffix for kind in (".jsonl", ".ndjson", ".json") for suffix in COMPRESSED),
    ),
    "parquet": (".parquet",),
    "text": (".md", ".py", ".rst", ".txt"),
}
# Names of JSON lines where no file has one of those above -> the names beside which these are something else.
RARE_JSON_LINES = {".json": (".parquet", ".txt", *COMPRESSED), **dict.fromkeys(COMPRESSED, (".parquet",))}

_NO_RARE: Mapping[str, Sequence[str]] = {}

SKIPPED_FOLDERS = ("site-packages", "dist-packages", "__pycache__")
# Files of a run's workdir, the second from before its data are opened, and of the folder of a comparison of runs.
_OF_RUNS = ("metrics.jsonl", "trainer.lock", "comparison.lock")
HELD_OUT_EVERY = 50

# The names by which Hugging Face's `datasets` knows the splits of a folder of files.
_SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SPLIT_PATTERNS = {
    split: re.compile(rf"(?:^|[-._ 0-9])(?:{'|'.join(names)})(?:[-._ 0-9]|$)", re.IGNORECASE)
    for split, names in _SPLIT_NAMES.items()
}
READ_AT_ONCE = 16  # files: a server answers many at once
VERSIONS = "file versions"  # of files on a server, where these are facts about data


def compression_of(start: bytes) -> str | None:
    """Return the suffix of the compression that a file begins with, or None."""
    return next((suffix for suffix, first_bytes in _FIRST_BYTES.items() if start.startswith(first_bytes)), None)


def find_files(
    options: SourceOptions, suffixes: Sequence[str], rare: Mapping[str, Sequence[str]] = _NO_RARE
) -> list[str]:
    """Find the files below the folder `options.path` in sorted order, or the one file that it is.

    Where none ends with one of `suffixes`, those are read that end with a key of `rare`, if none ends with its values.

    Links to files and folders are followed. Hidden files and folders, and folders that hold caches, installed packages
    or runs of this package, are left out. So are the files below `options.exclude`, by their path or by the one that a
    link leads to, unless all of `options.path` is.

    Raises `UserError` if there is no such file.
    """
    root = options.root
    every = _remote_files(options) if is_remote(root) else _local_files(options)
    if every == [root]:
        return every
    of_runs = {file.rpartition("/")[0] for file in every if file.rpartition("/")[2] in _OF_RUNS} - {root}
    named, real = _full_path(options.exclude), real_path(options.exclude)
    excludes = options.exclude and not _is_below(real_path(root), real)

    def is_read(file: str) -> bool:
        *folders, name = parts_below(file, root)
        if name.startswith(".") or any(map(_is_skipped, folders)):
            return False
        if any(_is_below(file, run) for run in of_runs) or not (is_remote(file) or os.path.isfile(file)):
            return False
        return not (excludes and (_is_below(_full_path(file), named) or _is_below(real_path(file), real)))

    def ending(endings: Sequence[str]) -> list[str]:
        return [file for file in every if file.lower().endswith(tuple(endings)) and is_read(file)]

    if found := ending(suffixes):
        return found
    if found := [file for suffix, beside in rare.items() if not ending(beside) for file in ending([suffix])]:
        return sorted(found)
    others = [kind for kind, its_suffixes in SUFFIXES.items() if ending(its_suffixes)]
    patterns = ", ".join(f"*{suffix}" for suffix in (*suffixes, *rare))
    remedy = f", but files of another kind: give {options.beside('kind')}={' or '.join(others)}" if others else ""
    raise UserError(f"{options.name} holds no file {patterns}{remedy}")


def _remote_files(options: SourceOptions) -> list[str]:
    try:
        return list_files(options.path, recursive=True)
    except FileNotFoundError:
        login = ", or it needs a login: set HF_TOKEN" if options.path.startswith("hf://") else ""
        raise UserError(f"{options.name}: there is no such file, folder or bucket{login}") from None


def _local_files(options: SourceOptions) -> list[str]:
    """Return the sorted files; each folder is entered once, under the first of its names that is met."""
    root, found, entered = options.root, [], set()
    if os.path.isfile(root):
        return [root]
    if not os.path.isdir(root):
        raise UserError(f"{options.name}: there is no such file or folder")
    for folder, folders, files in os.walk(root, followlinks=True):
        if (real := os.path.realpath(folder)) in entered:
            folders.clear()
            continue
        entered.add(real)
        folders[:] = sorted(name for name in folders if not _is_skipped(name))
        found += [os.path.join(folder, name) for name in files]
    return sorted(found)


def parts_below(file: str, root: str) -> list[str]:
    """Return the folders between the folder `root` and a file in it, and the file's name."""
    return file[len(root) :].strip("/").split("/")


def real_path(path: str) -> str:
    """Return the path that links lead to, or the address."""
    return path.rstrip("/") if is_remote(path) else os.path.realpath(os.path.expanduser(path))


def _full_path(path: str) -> str:
    return path.rstrip("/") if is_remote(path) else os.path.abspath(os.path.expanduser(path))


def _is_skipped(folder: str) -> bool:
    return folder in SKIPPED_FOLDERS or folder.startswith(".")


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def without_repeats(files: Iterable[str]) -> list[str]:
    """Return the files, each once where links give it several names."""
    found: dict[str, str] = {}
    for file in files:
        found.setdefault(real_path(file), file)
    return list(found.values())


class HoldOut:
    """The items, of those numbered 0 to count - 1, in a part of them: "all", the "held_out" ones or the "rest".

    Every 50th item is held out, from the 26th on; of fewer than 50 items, the middle one.
    """

    def __init__(self, count: int, part: str):
        self._part, self.count = part, count
        self._every = max(1, min(HELD_OUT_EVERY, count))

    def count_before(self, item: int) -> int:
        """Count the items in front of `item` that belong to the part."""
        held_out = (item - self._every // 2 + self._every - 1) // self._every
        return {"all": item, "held_out": held_out, "rest": item - held_out}[self._part]

    def mask(self, start: int, stop: int) -> np.ndarray:
        """Return a mask of the items start to stop - 1 that belong to the part: bool (stop - start,)."""
        if self._part == "all":
            return np.ones(stop - start, bool)
        held_out = np.arange(start, stop) % self._every == self._every // 2
        return held_out if self._part == "held_out" else ~held_out


def split_in_name(parts: Sequence[str]) -> str | None:
    """Return the split that the parts of a relative path name: "train", "validation", "test", or None.

    `train-00000-of-00002.parquet` and `val/0.jsonl` name one. The file's own name counts first, then the folder's.
    """
    return next((split for name in reversed(parts) if (split := _split_in_part(name))), None)


@functools.lru_cache(maxsize=1 << 14)
def _split_in_part(name: str) -> str | None:
    found = {split: match.start() for split, p in _SPLIT_PATTERNS.items() if (match := p.search(name))}
    return min(found, key=lambda split: found[split], default=None)


def split_files(
    options: SourceOptions, suffixes: Sequence[str], rare: Mapping[str, Sequence[str]] = _NO_RARE
) -> tuple[list[str], str]:
    """Return (sorted files of `options.split`, each once, part of their documents that belongs to it, see `HoldOut`).

    Where some files are named after a split, training reads those of "train" alone, or else those that name none, and
    prints which it leaves out where one might have expected them. Validation in the same folder reads those of
    "validation"; a part of the training files is held out if there are none. A validation folder of its own may also
    hold "test" files or files that name no split.

    Raises `UserError` if no file is left, or if one is there compressed and not.
    """
    files = find_files(options, suffixes, rare)
    _check_compressed_once(files)
    by_split: dict[str | None, list[str]] = {}
    for file in files:
        split = None if file == options.root else split_in_name(parts_below(file, options.root))
        by_split.setdefault(split, []).append(file)
    if options.split == "validation" and not options.holds_both_splits:
        return without_repeats(by_split.get("validation") or by_split.get("test") or files), "all"
    if options.split == "validation" and "validation" in by_split:
        return without_repeats(by_split["validation"]), "all"
    training = by_split.get("train") or by_split.get(None)
    if training is None:
        raise UserError(
            f"{options.name} holds no file to train on: the names of all {len(files)} say validation or test, as "
            f"{os.path.basename(files[0])}; rename them, or name a single file"
        )
    if options.split == "train":
        _log_left_out(options, by_split)
    return without_repeats(training), "all" if "validation" in by_split else options.part


def _check_compressed_once(files: Sequence[str]) -> None:
    """Raise `UserError` if a file and its compressed form lie in the same folder: both would be read."""
    names = set(files)
    for file in files:
        for suffix in COMPRESSED:
            if file + suffix in names:
                raise UserError(f"{file} and {file}{suffix} hold the same documents: move one of them elsewhere")


def _log_left_out(options: SourceOptions, by_split: dict[str | None, list[str]]) -> None:
    """Print which files training leaves out: those of other splits, or the unnamed where some are named "train"."""
    if "train" in by_split:
        left, why = by_split.get(None, []), "as others are named train"
    else:
        left = [file for split, files in by_split.items() if split is not None for file in files]
        why = "as their names say validation or test"
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        log_once(f"{options.name}: not trained on, {why}: {os.path.basename(left[0])}{more}")


class DamagedFileError(UserError):
    """A data file whose bytes arrived and cannot be decoded."""


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


def log_once(line: str) -> None:
    """Print a line to stderr, once in a process."""
    if line not in _reported:
        _reported.add(line)
        tell(line)
