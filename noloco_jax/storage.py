"""Files by their addresses, on S3, Google Cloud Storage, the Hugging Face hub and web servers, beside local ones.

    s3://bucket/folder    gs://bucket/folder    hf://datasets/owner/name/folder    https://host/folder/file.jsonl

fsspec reads them, by ranges. Transient errors are retried: `RemoteFile` retries the read that failed, so decompressors
keep their state. Nothing of a data file is written to the disk.
"""

import contextlib
import errno
import functools
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import sleep
from typing import Any, NamedTuple, TypeVar

from noloco_jax.errors import TransientError, UserError, described, tell
from noloco_jax.files import full_disk_reported

# What a network file system reports while a server restarts, a mount comes back or a file is replaced.
TRANSIENT_ERRNOS = (errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.ENOENT)
DISK_DELAYS = (0.1, 0.4, 1.0, 2.0, 4.0)  # seconds
_TOLD_SECONDS = 8.0  # least delay of which people are told
T = TypeVar("T")

SERVER_DELAYS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # seconds, beside those of s3fs and gcsfs
CONNECT_SECONDS, ANSWER_SECONDS = 10.0, 30.0  # timeouts: of a connection, and of one that delivers nothing
REQUEST_BYTES = 1 << 20  # bytes of a request while a file is read in sequence

_BUFFER = 1 << 16
# Scheme -> the packages that fsspec needs for it, and what to do where it is refused.
_SCHEMES = {
    "s3": (
        "s3fs",
        "give the credentials in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or ~/.aws, with AWS_ENDPOINT_URL for "
        "another vendor; FSSPEC_S3_ANON=true reads public buckets",
    ),
    "gs": (
        "gcsfs",
        "log in by `gcloud auth application-default login` or name a key in GOOGLE_APPLICATION_CREDENTIALS; "
        "FSSPEC_GS_TOKEN=anon reads public buckets",
    ),
    "hf": ("huggingface_hub", "accept its terms on its page and set HF_TOKEN"),
    "https": ("aiohttp", "give an address that is open to all"),
    "http": ("aiohttp", "give an address that is open to all"),
}
_NO_LOGIN = ("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError", "RefreshError")


def with_retries(
    act: Callable[[], T],
    path: str,
    *,
    delays: Sequence[float] = DISK_DELAYS,
    transient: Sequence[int] = TRANSIENT_ERRNOS,
) -> T:
    """Call `act`, again after each of `delays` while its error is a transient one, and return its result.

    Args:
      act: reads the file `path`. It must be able to start again after an `OSError`.
      path: the file, for people.
      delays: seconds.
      transient: the numbers of such errors.

    Raises:
      TransientError: if the error was still there at the last attempt.
      UserError: for any other error of the operating system.
      OSError: one without a number, as decoders raise it.
    """
    left = iter(delays)
    while True:
        try:
            return act()
        except OSError as error:
            if error.errno is None:
                raise
            reason = error.strerror or str(error)
            if error.errno not in transient:
                raise UserError(f"{path} cannot be read ({reason}): make it accessible") from None
            delay = next(left, None)
            if delay is None:
                raise TransientError(
                    f"{path} cannot be read ({reason}), not even after {sum(delays):g} seconds of retries: "
                    "the same command continues once the storage is back"
                ) from None
            if delay >= _TOLD_SECONDS:
                tell(f"{path} cannot be read ({reason}): trying again in {delay:g} s")
        sleep(delay)


class RemoteFacts(NamedTuple):
    """A file's size in bytes, and its version: an ETag, a digest or a generation."""

    size: int
    version: str


def is_remote(path: str) -> bool:
    """Return True for an address of one of the kinds above, False for a local path."""
    scheme, separator, _ = path.partition("://")
    return bool(separator) and scheme in _SCHEMES


def list_files(path: str, *, recursive: bool) -> list[str]:
    """Return the sorted addresses of the files in the folder `path`, or `path` alone if it is a file.

    It is asked for once in a process. Raises `FileNotFoundError` if there is neither.
    """
    return list(_list_files(path.rstrip("/"), recursive))


@functools.cache
def _list_files(path: str, recursive: bool) -> tuple[str, ...]:
    if _scheme(path) in ("http", "https"):  # they list nothing
        remote_facts(path)
        return (path,)
    found = _retried(lambda system: system.find(path, maxdepth=None if recursive else 1), path)
    if not found:
        raise FileNotFoundError(path)
    return tuple(sorted(f"{_scheme(path)}://{name}" for name in found))


def list_folder(path: str) -> list[str]:
    """Return the addresses of the files in a folder; raise `UserError` if there is none."""
    try:
        return list_files(path, recursive=False)
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such folder") from None


@functools.cache
def remote_facts(path: str) -> RemoteFacts:
    """Return the facts of a file at an address, which is asked for once in a process."""
    with _missing_reported(path):
        info = _retried(lambda system: system.info(path), path)
    if info.get("size") is None:
        raise UserError(f"{path}: the server does not tell the file's size: download the file")
    names = ("generation", "ETag", "blob_id", "xet_hash", "LastModified", "Last-Modified")
    return RemoteFacts(int(info["size"]), next((str(info[name]) for name in names if info.get(name)), ""))


def path_or_file(path: str, *, read_ahead: bool = True) -> "str | RemoteFile":
    """Return a local path as it is, or an open file at an address, for libraries that read either."""
    return RemoteFile(path, read_ahead=read_ahead) if is_remote(path) else path


def open_file(path: str) -> io.BufferedReader:
    """Open a local file or one at an address."""
    return io.BufferedReader(RemoteFile(path), _BUFFER) if is_remote(path) else open(path, "rb")


class RemoteFile(io.RawIOBase):
    """A file at an address. A read that fails with a transient error is retried on a newly opened file.

    With `read_ahead` a request asks for `REQUEST_BYTES` bytes more than are wanted, otherwise for no more.
    """

    def __init__(self, path: str, *, read_ahead: bool = True):
        self._path, self._size, self._position = path, remote_facts(path).size, 0
        self._cache = "readahead" if read_ahead else "none"
        self._opened: Any = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(self._size - self._position, 0)
        size = left if size < 0 else min(size, left)
        if not size:
            return b""
        with _missing_reported(self._path):
            content = _retried(lambda system: self._read(system, size), self._path)
        self._position += size
        return content

    def _read(self, system: Any, size: int) -> bytes:
        opened, self._opened = self._opened, None  # after an error it is opened anew
        if opened is None:
            opened = system.open(self._path, "rb", block_size=REQUEST_BYTES, cache_type=self._cache)
        opened.seek(self._position)
        content = opened.read(size)
        if len(content) != size:
            raise OSError(errno.EIO, f"fewer than the {size} bytes that were asked for arrived")
        self._opened = opened
        return content

    def readinto(self, buffer: Any) -> int:
        content = self.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)


@contextlib.contextmanager
def local_folder(path: str, suffixes: tuple[str, ...]) -> Iterator[Path]:
    """Give a folder to libraries that read the file system: itself, or a temporary copy of one at an address.

    Args:
      path: a local path or an address.
      suffixes: of the files that are copied.

    Raises `UserError` if there is no folder at the address.
    """
    if not is_remote(path):
        yield Path(path).expanduser()
        return
    files = list_folder(path)
    with tempfile.TemporaryDirectory(prefix="noloco_jax-") as root:
        folder = Path(root, path.replace("://", "/").rstrip("/"))
        with full_disk_reported(folder):
            folder.mkdir(parents=True)
            for file in files:
                if file.endswith(suffixes):
                    with open_file(file) as source, (folder / file.rpartition("/")[2]).open("wb") as target:
                        shutil.copyfileobj(source, target, 1 << 22)
        yield folder


def _scheme(path: str) -> str:
    return path.partition("://")[0]


@functools.cache
def _file_system(scheme: str) -> Any:
    """Make the file system of a scheme, once in a process; its options are also taken from `FSSPEC_SCHEME_OPTION`."""
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # asks each bucket's kind by gRPC
    import fsspec

    options: dict[str, Any] = {}
    if scheme == "s3":
        options["config_kwargs"] = {"connect_timeout": CONNECT_SECONDS, "read_timeout": ANSWER_SECONDS}
    if scheme in ("http", "https"):
        import aiohttp

        timeout = aiohttp.ClientTimeout(sock_connect=CONNECT_SECONDS, sock_read=ANSWER_SECONDS)
        options["client_kwargs"] = {"timeout": timeout}
    return fsspec.filesystem(scheme, skip_instance_cache=True, **options)


def _retried(act: Callable[[Any], T], path: str) -> T:
    """Call `act` with the file system of `path`; retry transient errors after each of `SERVER_DELAYS`."""

    def classified() -> T:
        try:
            return act(_file_system(_scheme(path)))
        except Exception as error:  # the file systems' libraries have errors of their own
            raise _classify(error, path) from None

    return with_retries(classified, path, delays=SERVER_DELAYS, transient=(errno.EIO,))


def _classify(error: Exception, path: str) -> Exception:
    """Return `FileNotFoundError` for a missing file, `UserError` for a refusal, else an `OSError`, which is retried."""
    packages, remedy = _SCHEMES[_scheme(path)]
    if _scheme(path) in ("http", "https") and isinstance(error.__cause__, Exception):
        error = error.__cause__  # fsspec takes every failure there for a missing file
    text = described(error)[:300]
    status = getattr(error, "status", None) or getattr(error, "code", None)
    status = getattr(getattr(error, "response", None), "status_code", None) or status
    if isinstance(error, UserError):
        return error
    if isinstance(error, ImportError):
        return UserError(f"{path} needs a package that is not installed ({text}): pip install {packages}")
    if isinstance(error, PermissionError) or status in (401, 403) or type(error).__name__ in _NO_LOGIN:
        return UserError(f"{path} is refused ({text}): {remedy}")
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return FileNotFoundError(path)
    if type(error).__name__ == "OfflineModeIsEnabled":
        return UserError(f"{path} cannot be read while HF_HUB_OFFLINE is set: unset it")
    if isinstance(error, ValueError | NotImplementedError) or type(error).__name__ == "ParamValidationError":
        return UserError(f"{path} cannot be read ({text}): check the address, or download the file")
    return OSError(errno.EIO, text)


@contextlib.contextmanager
def _missing_reported(path: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file") from None
