"""Finds data files in a folder and the folders below it."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from noloco_jax.data.source import SourceOptions
from noloco_jax.errors import UserError

SKIPPED_FOLDERS = ("site-packages", "dist-packages", "__pycache__")


def find_files(options: SourceOptions, suffixes: Sequence[str]) -> list[Path]:
    """The files below the folder `options.path` in sorted order, or the one file that it is.

    Hidden files and folders, and folders that hold caches or installed packages, are left out. So are the files below
    `options.exclude` if that is inside `options.path`.

    Raises `UserError` if there is no such file.
    """
    root = Path(options.path).expanduser()
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise UserError(f"{options.name}: there is no such file or folder")
    exclude = Path(options.exclude).expanduser().resolve() if options.exclude else None
    if exclude is not None and root.resolve().is_relative_to(exclude):
        exclude = None
    found = [
        root / relative
        for relative in sorted(_files_below(root), key=Path.as_posix)
        if relative.name.endswith(tuple(suffixes))
        and (root / relative).is_file()
        and not (exclude and (root.resolve() / relative).is_relative_to(exclude))
    ]
    if not found:
        patterns = ", ".join(f"*{suffix}" for suffix in suffixes)
        raise UserError(f"{options.name} holds no file {patterns}")
    return found


def _files_below(root: Path) -> Iterator[Path]:
    """Paths relative to `root`."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith(".")]
        yield from (Path(folder, name).relative_to(root) for name in files if not name.startswith("."))
