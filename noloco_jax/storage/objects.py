"""Objects of S3 and Google Cloud Storage: written whole or not at all, read, copied, listed and deleted.

Every function takes addresses as `s3://bucket/folder/name`, repeats requests that fail for a while, and raises
`TransientError` if they still do, `UserError` for a refusal, and `FileNotFoundError` for what is not there.
"""

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from noloco_jax.errors import UserError
from noloco_jax.files import full_disk_told
from noloco_jax.storage.addresses import LARGEST_BLOCK, arrow_errors, failed, file_system, inside_bucket, read_opened
from noloco_jax.storage.addresses import retried as _retried

_DELAYS = (0.05, 0.1, 0.2, 0.4)  # seconds

PROBE = ".writable"  # the name of what `check_writable` writes

T = TypeVar("T")


def check_bucket(path: str) -> None:
    """Raise `UserError` where the bucket of an address does not exist, or these credentials may not see it."""
    import pyarrow.fs as fs

    bucket = inside_bucket(path).partition("/")[0]
    if not bucket:
        raise UserError(f"{path} names no bucket: give {path.partition('://')[0]}://BUCKET/FOLDER")
    found = _do(lambda: file_system(path).get_file_info(bucket), path, "read")
    if found.type == fs.FileType.NotFound:
        raise UserError(f"{path}: there is no bucket {bucket!r}: create it, or give the name of one that exists")


def check_writable(path: str) -> None:
    """Raise `UserError` where these credentials may not write below an address: an object is written and deleted."""
    write_object(f"{path}/{PROBE}", b"")
    delete_object(f"{path}/{PROBE}")


def read_object(path: str) -> bytes:
    """Read an object as it is now."""

    def read() -> bytes:
        opened = file_system(path).open_input_file(inside_bucket(path))
        return _read_part(opened, path, 0, opened.size())

    return _do(read, path, "read")


def exists(path: str) -> bool:
    """Return True if an object is there now."""
    try:
        read_object(path)
    except FileNotFoundError:
        return False
    return True


def read_json(path: str) -> Any:
    """Read an object of JSON as it is now; raise `ValueError` if it is none.

    pyarrow asks for the size first, so an object that is replaced in between may come cut off: it is read again.
    """
    left = iter(_DELAYS)
    while True:
        try:
            return json.loads(read_object(path))
        except ValueError:
            delay = next(left, None)
            if delay is None:
                raise
        time.sleep(delay)


def write_object(path: str, content: bytes) -> None:
    """Write an object whole: whoever reads meanwhile, or after a kill, finds the former one or none."""

    def write() -> None:
        with file_system(path).open_output_stream(inside_bucket(path)) as stream:
            stream.write(content)  # at once: a stream that an error leaves between two writes commits the first

    _write(write, path)


def upload_file(file: Path, path: str) -> None:
    """Copy a local file of any size to an object."""

    with file.open("rb") as source:

        def upload() -> None:
            source.seek(0)
            with file_system(path).open_output_stream(inside_bucket(path)) as stream:
                while piece := source.read(LARGEST_BLOCK):
                    stream.write(piece)

        _write(upload, path)


def download_file(path: str, file: Path) -> None:
    """Copy an object of any size to a local file; its folder is made when missing."""
    with full_disk_told(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
        while not _is_downloaded(path, file):
            pass


def _is_downloaded(path: str, file: Path) -> bool:
    """Copy an object to a local file; return False if one of another size has taken its place meanwhile."""
    opened, size = _do(lambda: _opened(path), path, "read")

    def read(start: int) -> bytes | None:
        nonlocal opened
        if opened is None:
            opened, now = _opened(path)
            if now != size:
                return None
        asked, opened = opened, None  # after an error it is opened anew
        part = _read_part(asked, path, start, min(LARGEST_BLOCK, size - start))
        opened = asked
        return part

    with file.open("wb") as target:
        for start in range(0, size, LARGEST_BLOCK):
            part = _do(lambda start=start: read(start), path, "read")
            if part is None:
                return False
            target.write(part)
    return True


def copy_object(source: str, target: str) -> None:
    """Copy an object within its bucket, without a download."""
    system = file_system(source)
    _do(lambda: system.copy_file(inside_bucket(source), inside_bucket(target)), source, "copied")


def delete_object(path: str) -> None:
    """Delete an object that may be there."""
    with contextlib.suppress(FileNotFoundError):
        _do(lambda: file_system(path).delete_file(inside_bucket(path)), path, "deleted")


def delete_folder(path: str) -> None:
    """Delete all objects below an address."""
    with contextlib.suppress(FileNotFoundError):
        _do(lambda: file_system(path).delete_dir(inside_bucket(path)), path, "deleted")


def list_objects(path: str) -> list[str]:
    """Return the sorted names of the objects below an address, relative to it; a store may leave out recent ones."""
    import pyarrow.fs as fs

    folder = inside_bucket(path)
    selector = fs.FileSelector(folder, allow_not_found=True, recursive=True)
    found = _do(lambda: file_system(path).get_file_info(selector), path, "listed")
    return sorted(file.path[len(folder) + 1 :] for file in found if file.type == fs.FileType.File)


def _do(act: Callable[[], T], path: str, done: str) -> T:
    def guarded() -> T:
        with arrow_errors(path):
            return act()

    return _retried(guarded, path, done)


def _write(act: Callable[[], None], path: str) -> None:
    def guarded() -> None:
        try:
            with arrow_errors(path):
                act()
        except FileNotFoundError:  # services that lose an upload want it begun anew
            raise failed("the upload is lost, or its bucket gone") from None

    _retried(guarded, path, "written")


def _opened(path: str):
    opened = file_system(path).open_input_file(inside_bucket(path))
    return opened, opened.size()


def _read_part(opened, path: str, start: int, size: int) -> bytes:
    if size == 0:
        return b""
    content = read_opened(opened, path, start, size)
    if len(content) != size:
        raise failed(f"fewer than the {size} bytes that were asked for arrived")
    return content
