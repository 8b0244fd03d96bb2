"""Local copies of workdirs in buckets: where they lie, and the addresses that they stand for."""

import os
import tempfile
from pathlib import Path

from noloco_jax.errors import UserError
from noloco_jax.files import folder_of_flag
from noloco_jax.storage.addresses import is_writable_kind

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


def copy_below(root: Path, address: Address) -> Path:
    """Return the folder below `root` for a copy of `address`."""
    return root / address.replace("://", "/")


def mark_as_copy(folder: Path, address: Address) -> None:
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
