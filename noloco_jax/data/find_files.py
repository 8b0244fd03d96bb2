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
    resolved = root.resolve()
    if exclude is not None and (resolved.is_relative_to(exclude) or not exclude.is_relative_to(resolved)):
        exclude = None
    found = [
        root / relative
        for relative in sorted(_files_below(root, tuple(suffixes)))
        if os.path.isfile(os.path.join(root, relative))
        and not (exclude and (resolved / relative).is_relative_to(exclude))
    ]
    if not found:
        patterns = ", ".join(f"*{suffix}" for suffix in suffixes)
        raise UserError(f"{options.name} holds no file {patterns}")
    return found


def _files_below(root: Path, suffixes: tuple[str, ...]) -> Iterator[str]:
    """Paths relative to `root`; of thousands, strings take a tenth of the time."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith(".")]
        below = os.path.relpath(folder, root)
        for name in files:
            if name.endswith(suffixes) and not name.startswith("."):
                yield name if below == os.curdir else f"{below}/{name}"
