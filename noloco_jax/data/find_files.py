"""Finds data files in a folder and the folders below it."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from noloco_jax.data.source import SourceOptions
from noloco_jax.errors import UserError

SKIPPED_FOLDERS = ("site-packages", "dist-packages", "__pycache__")


def find_files(options: SourceOptions, suffixes: Sequence[str]) -> list[Path]:
    """The files below the folder `options.path` in sorted order, or the one file that it is.

    Links to files and folders are followed. Hidden files and folders, and folders that hold caches or installed
    packages, are left out. So are the files below `options.exclude`, by their path or by the one that a link leads to,
    unless all of `options.path` is.

    Raises `UserError` if there is no such file.
    """
    root = Path(options.path).expanduser()
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise UserError(f"{options.name}: there is no such file or folder")
    is_excluded = _excluder(root, Path(options.exclude).expanduser()) if options.exclude else lambda file: False
    found = [
        root / relative
        for relative in sorted(_files_below(root, tuple(suffixes)))
        if os.path.isfile(file := os.path.join(root, relative)) and not is_excluded(file)
    ]
    if not found:
        patterns = ", ".join(f"*{suffix}" for suffix in suffixes)
        raise UserError(f"{options.name} holds no file {patterns}")
    return found


def _excluder(root: Path, exclude: Path) -> Callable[[str], bool]:
    """Whether a file below `root` is at or below `exclude`, as it is named or where it really is."""
    named, real = os.path.abspath(exclude), os.path.realpath(exclude)
    if root.resolve().is_relative_to(real):
        return lambda file: False
    return lambda file: _is_below(os.path.abspath(file), named) or _is_below(os.path.realpath(file), real)


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def without_repeats(files: Iterable[Path]) -> list[str]:
    """The files without those that are one of the others under another name, by a link."""
    real_folders: dict[Path, str] = {}
    found: dict[str, str] = {}
    for file in files:
        if file.is_symlink():
            real = os.path.realpath(file)
        else:
            if file.parent not in real_folders:
                real_folders[file.parent] = os.path.realpath(file.parent)
            real = os.path.join(real_folders[file.parent], file.name)
        found.setdefault(real, str(file))
    return list(found.values())


def _files_below(root: Path, suffixes: tuple[str, ...]) -> Iterator[str]:
    """Paths relative to `root`; of thousands, strings take a tenth of the time.

    Each folder is entered once: those of `root` itself under their own names, then those that links lead to.
    """
    entered: set[str] = set()
    starts = [str(root)]
    while starts:
        links: list[str] = []
        for start in starts:
            for folder, folders, files in os.walk(start):
                real = os.path.realpath(folder)
                if real in entered:
                    folders.clear()
                    continue
                entered.add(real)
                folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith(".")]
                links += [path for name in folders if os.path.islink(path := os.path.join(folder, name))]
                below = os.path.relpath(folder, root)
                for name in files:
                    if name.endswith(suffixes) and not name.startswith("."):
                        yield name if below == os.curdir else f"{below}/{name}"
        starts = sorted(links)
