"""Local copies of folders at addresses: where they lie, which addresses they stand for, how they come and go."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from noloco_jax.errors import UserError
from noloco_jax.files import folder_of_flag, full_disk_told
from noloco_jax.storage import objects
from noloco_jax.storage.addresses import is_remote, is_writable_kind, list_files, open_file

SCRATCH_VARIABLE = "NOLOCO_JAX_SCRATCH"
ADDRESS_FILE = ".address"  # in a copy: the address that it is of


class Address(str):
    """The address of a folder in a bucket, s3://BUCKET/FOLDER or gs://BUCKET/FOLDER."""

    __slots__ = ()


def workdir_of_flag(text: str) -> Path | Address:
    """The workdir that a flag names: a local folder, or an address in a bucket."""
    if not is_writable_kind(text):
        return folder_of_flag(text)
    scheme, _, rest = text.partition("://")
    parts = [part for part in rest.split("/") if part]
    if len(parts) < 2 or "." in parts or ".." in parts:
        raise UserError(f"{text} names no folder in a bucket: give {scheme}://BUCKET/FOLDER")
    return Address(f"{scheme}://{'/'.join(parts)}")


def scratch_folder(address: Address) -> Path:
    """Return the folder of this machine where the copy of a workdir lies, the same for all processes of its user."""
    root = os.environ.get(SCRATCH_VARIABLE) or Path(tempfile.gettempdir()) / f"noloco_jax-{os.getuid()}"
    return copy_below(Path(root).expanduser().absolute(), address)


def copy_below(root: Path, address: str) -> Path:
    """Return the folder below `root` for a copy of `address`."""
    return root / address.replace("://", "/")


def mark_as_copy(folder: Path, address: str) -> None:
    """Record the address that a folder is the copy of, for `named`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ADDRESS_FILE).write_text(address, encoding="utf-8")


def named(path: Path) -> str:
    """Return how people know a path: in the copy of a workdir by its address there, elsewhere as it is."""
    for folder in (path, *path.parents):
        marker = folder / ADDRESS_FILE
        if marker.is_file():
            address = marker.read_text(encoding="utf-8")
            return "/".join([address, *path.relative_to(folder).parts])
    return str(path)


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
        folder = copy_below(Path(root), path.rstrip("/"))
        with full_disk_told(folder):
            folder.mkdir(parents=True)
            for file in list_folder(path):
                if file.endswith(suffixes):
                    with open_file(file) as source, (folder / file.rpartition("/")[2]).open("wb") as target:
                        shutil.copyfileobj(source, target, 1 << 22)
        yield folder


@contextlib.contextmanager
def new_folder(target: Path | Address, last: str, root: Path) -> Iterator[Path]:
    """Give a folder that the body is to make: itself, or a temporary one whose files are uploaded afterwards.

    Args:
      target: a local folder or an address.
      last: the name of the file that is uploaded last, without which the folder is nothing.
      root: an empty folder for the temporary one, which stays there.

    Raises:
      UserError: for an address with something there, or that cannot be written.
    """
    if isinstance(target, Path):
        yield target
        return
    objects.check_bucket(target)
    if objects.list_objects(target):
        raise UserError(f"{target} already holds something: name a new folder")
    objects.check_writable(target)
    folder = copy_below(root, target)
    mark_as_copy(folder.parent, target.rpartition("/")[0])
    yield folder
    for file in sorted(folder.iterdir(), key=lambda file: (file.name == last, file.name)):
        objects.upload_file(file, f"{target}/{file.name}")
