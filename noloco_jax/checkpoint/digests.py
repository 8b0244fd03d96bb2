"""Digests of a checkpoint's files, which detect flipped bits in storage or transfer.

Orbax has no such check: its zarr3 codec checksums the index of an array's chunks but not the chunks, and OCDBT its tree
but not the values in it.
"""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import xxhash

from noloco_jax.files import write_whole

DIGESTS_FILE = "digests.txt"
UNFINISHED = ".orbax-checkpoint-tmp"  # Orbax's suffix of a folder that is not completely written
# Orbax's notes on a checkpoint: times, names of handlers, marks of completion. They have no digest, as a thread of
# Orbax's may write them anew after the digests; a restore does without what they say.
_NOTES = ("_CHECKPOINT_METADATA", "commit_success.txt")
_PIECE = 4 << 20  # bytes read at a time: few enough to stay in a core's cache
_FILES_AT_ONCE = 8


class Entry(NamedTuple):
    """The size in bytes and the XXH3 digest (128 bits, hexadecimal) of a file."""

    size: int
    digest: str


class MismatchError(Exception):
    """Raised for a file that differs from its digest; the message begins with the file's name."""


def write_own_digests(step_folder: Path, process: int) -> None:
    """Write the digests of the arrays that this process has saved, while their files are likely in its page cache.

    Args:
      step_folder: folder of a checkpoint that several processes are saving.
      process: number of the calling process.
    """
    files = step_folder.glob(f"state*/ocdbt.process_{process}/**/*")
    _write_file(
        step_folder / f"{DIGESTS_FILE}.{process}", _entries_of({_name(step_folder, file): file for file in files})
    )


def write_digests(step_folder: Path) -> None:
    """Write the digests of all files of a checkpoint, including those from `write_own_digests`."""
    parts = list(step_folder.glob(f"{DIGESTS_FILE}.*"))
    entries: dict[str, Entry] = {}
    for part in parts:
        entries |= _read_file(part)
    files = {
        _name(step_folder, file): file
        for file in step_folder.rglob("*")
        if file not in parts and file.name not in _NOTES
    }
    _write_file(step_folder / DIGESTS_FILE, entries | _entries_of(files, without=entries.keys()))
    for part in parts:
        part.unlink()


def read_digests(step_folder: Path) -> dict[str, Entry]:
    """Return the entries of a checkpoint by file name.

    Raises:
      MismatchError: if the digests themselves are missing or damaged.
    """
    path = step_folder / DIGESTS_FILE
    if not path.exists():
        raise MismatchError(f"{DIGESTS_FILE} is missing")
    return _read_file(path)


def share_of(entries: Mapping[str, Entry], index: int, count: int) -> dict[str, Entry]:
    """Return the files that reader `index` of `count` reads, with about equal bytes for all readers."""
    largest_first = sorted(entries, key=lambda name: (-entries[name].size, name))
    return {name: entries[name] for name in largest_first[index::count]}


def check_files(step_folder: Path, expected: Mapping[str, Entry]) -> None:
    """Read files of a checkpoint and compare them with their digests.

    Raises:
      MismatchError: for the first file by name that is missing or differs.
    """
    found = _entries_of({name: step_folder / name for name in expected})
    for name in sorted(expected):
        if name not in found:
            raise MismatchError(f"{name} is missing")
        if found[name].size != expected[name].size:
            raise MismatchError(f"{name} has {found[name].size} bytes, it was saved with {expected[name].size}")
        if found[name].digest != expected[name].digest:
            raise MismatchError(f"{name} does not match its digest in {DIGESTS_FILE}")


def _name(step_folder: Path, file: Path) -> str:
    """Return the name of a file in the finished checkpoint."""
    return file.relative_to(step_folder).as_posix().replace(f"{UNFINISHED}/", "/")


def _entries_of(files: Mapping[str, Path], without: Iterable[str] = ()) -> dict[str, Entry]:
    """Compute the entries of all files, skipping folders, in several threads: xxhash and reading release the GIL."""
    names = [name for name, file in files.items() if name not in without and file.is_file()]
    with ThreadPoolExecutor(_FILES_AT_ONCE) as threads:
        return dict(zip(names, threads.map(lambda name: _entry(files[name]), names), strict=True))


def _entry(file: Path) -> Entry:
    digest, size, buffer = xxhash.xxh3_128(), 0, memoryview(bytearray(_PIECE))
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return Entry(size, digest.hexdigest())


def _write_file(path: Path, entries: Mapping[str, Entry]) -> None:
    lines = "".join(f"{entry.digest} {entry.size} {name}\n" for name, entry in sorted(entries.items())).encode()
    write_whole(path, xxhash.xxh3_128_hexdigest(lines).encode() + b"\n" + lines)


def _read_file(path: Path) -> dict[str, Entry]:
    head, _, lines = path.read_bytes().partition(b"\n")
    if xxhash.xxh3_128_hexdigest(lines) != head.decode(errors="replace"):
        raise MismatchError(f"{path.name} does not match the digest in its first line")
    entries = (line.split(" ", 2) for line in lines.decode().splitlines())
    return {name: Entry(int(size), digest) for digest, size, name in entries}
