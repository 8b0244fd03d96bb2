"""Folders at addresses: their lists, and temporary copies for libraries that read the file system."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from noloco_jax.errors import UserError
from noloco_jax.files import full_disk_told
from noloco_jax.storage.addresses import is_remote, list_files, open_file


def list_folder(path: str) -> list[str]:
    """Return the addresses of the files in a folder at an address; raise `UserError` if there is none."""
    try:
        return list_files(path, recursive=False)
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such folder") from None


@contextlib.contextmanager
def readable_folder(path: str, suffixes: tuple[str, ...]) -> Iterator[Path]:
    """Give a folder to libraries that read the file system: itself, or a temporary copy of one at an address.

    Args:
      path: a local path or an address.
      suffixes: of the files that are copied.
    """
    if not is_remote(path):
        yield Path(path).expanduser()
        return
    with tempfile.TemporaryDirectory(prefix="noloco_jax-") as root:
        folder = Path(root, path.rstrip("/").replace("://", "/"))
        with full_disk_told(folder):
            folder.mkdir(parents=True)
            for file in list_folder(path):
                if file.endswith(suffixes):
                    with open_file(file) as source, (folder / file.rpartition("/")[2]).open("wb") as target:
                        shutil.copyfileobj(source, target, 1 << 22)
        yield folder
