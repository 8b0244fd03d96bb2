"""Files by their addresses, on S3, Google Cloud Storage, the Hugging Face hub and web servers, beside local ones.

    s3://bucket/folder    gs://bucket/folder    hf://datasets/owner/name/folder    https://host/folder/file.jsonl

Everything is read by ranges, each a request of its own, so nothing is lost when a connection is: a request that fails
for a while is repeated, and decompressors keep their state. Nothing of a file is written to the disk.
"""

import contextlib
import errno
import functools
import io
import json
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from noloco_jax.errors import UserError, described
from noloco_jax.storage.retries import with_retries

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.fs as fs

T = TypeVar("T")

RETRY_DELAYS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # seconds
CONNECT_SECONDS, ANSWER_SECONDS = 10.0, 30.0  # timeouts: of a connection, and of one that delivers nothing
FIRST_BLOCK, LARGEST_BLOCK = 1 << 18, 1 << 23  # bytes of a request: doubled while a file is read in sequence

_OPEN_FILES = 64
_ANONYMOUS = "anonymous@"
_TRANSIENT_STATUS = (408, 425, 429)  # beside those from 500 on
_GONE_STATUS = (404, 410)


class RemoteFacts(NamedTuple):
    """A file's size in bytes, and what changes with its content: an ETag, a digest or the time of its last change."""

    size: int
    version: str


def is_writable_kind(path: str) -> bool:
    """Return True for an address of an object store, which can be written: s3:// or gs://."""
    scheme, separator, _ = path.partition("://")
    return bool(separator) and scheme in _REMEDIES


def is_remote(path: str) -> bool:
    """Return True for an address of one of the kinds above, False for a local path."""
    scheme, separator, _ = path.partition("://")
    return bool(separator) and scheme in _STORES


def list_files(path: str, *, recursive: bool) -> list[str]:
    """Return the sorted addresses of the files in the folder `path`, or `path` alone if it is a file.

    It is asked for once in a process. Raises `FileNotFoundError` if there is neither.
    """
    return list(_list_files(path.rstrip("/"), recursive))


@functools.cache
def _list_files(path: str, recursive: bool) -> tuple[str, ...]:
    return tuple(sorted(retried(lambda: _store(path).list_files(path, recursive), path)))


@functools.cache
def remote_facts(path: str) -> RemoteFacts:
    """Return the facts of a file at an address, which is asked for once in a process."""
    with _missing_told(path):
        return retried(lambda: _store(path).facts(path), path)


def read_range(path: str, start: int, size: int) -> bytes:
    """Read `size` bytes of the file at an address, which must have as many behind `start`."""

    def read() -> bytes:
        content = _store(path).read_range(path, start, size)
        if len(content) != size:
            raise failed(f"fewer than the {size} bytes that were asked for arrived")
        return content

    with _missing_told(path):
        return retried(read, path)


def read_file(path: str) -> bytes:
    """Read all of the file at an address."""
    return RemoteFile(path).read()


def retried(act: Callable[[], T], path: str, done: str = "read") -> T:
    """Call `act`, again after each of `RETRY_DELAYS` while it raises `failed`, and return its result."""
    return with_retries(act, path, done, delays=RETRY_DELAYS, transient=(errno.EIO,))


@contextlib.contextmanager
def _missing_told(path: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file") from None


def path_or_file(path: str, *, read_ahead: bool = True) -> "str | RemoteFile":
    """Return what a library reads a file from: a local path itself, or an open file at an address."""
    return RemoteFile(path, read_ahead=read_ahead) if is_remote(path) else path


def open_file(path: str) -> io.BufferedReader:
    """Open a local file or one at an address."""
    return io.BufferedReader(RemoteFile(path), FIRST_BLOCK) if is_remote(path) else open(path, "rb")


class RemoteFile(io.RawIOBase):
    """A file at an address, read in blocks; with `read_ahead` they grow while they follow one another."""

    def __init__(self, path: str, *, read_ahead: bool = True):
        self._path, self._size, self._read_ahead = path, remote_facts(path).size, read_ahead
        self._position = 0
        self._block, self._block_start = b"", 0

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
        parts = []
        while size:
            inside = self._position - self._block_start
            if not 0 <= inside < len(self._block):
                self._fetch(size)
                inside = 0
            parts.append(self._block[inside : inside + size])
            self._position += len(parts[-1])
            size -= len(parts[-1])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def readinto(self, buffer: Any) -> int:
        content = self.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def _fetch(self, size: int) -> None:
        """Read the block that begins at the position, where `size` bytes are wanted."""
        follows = self._read_ahead and self._block and self._position == self._block_start + len(self._block)
        block = max(size, 2 * len(self._block) if follows else FIRST_BLOCK)
        size = min(block, LARGEST_BLOCK, self._size - self._position)
        self._block, self._block_start = read_range(self._path, self._position, size), self._position


class _Store(ABC):
    """One kind of storage.

    Its methods raise `FileNotFoundError` for what is not there, `_failed` for what may work again, and `UserError` for
    a refusal.
    """

    @abstractmethod
    def list_files(self, path: str, recursive: bool) -> list[str]:
        """Return the addresses below a folder, or the file's own."""

    @abstractmethod
    def facts(self, path: str) -> RemoteFacts: ...

    @abstractmethod
    def read_range(self, path: str, start: int, size: int) -> bytes:
        """Return at most `size` bytes from `start` on."""


def failed(reason: str) -> OSError:
    return OSError(errno.EIO, reason)


def _refused(path: str, reason: str, remedy: str) -> NoReturn:
    raise UserError(f"{path} is refused ({reason}): {remedy}") from None


class _ArrowStore(_Store):
    """S3 and Google Cloud Storage, by pyarrow."""

    def list_files(self, path: str, recursive: bool) -> list[str]:
        import pyarrow.fs as fs

        inside = inside_bucket(path)
        with arrow_errors(path):
            system = file_system(path)
            kind = system.get_file_info(inside).type if "/" in inside else fs.FileType.Directory
            if kind == fs.FileType.File:
                return [path]
            if kind == fs.FileType.NotFound:
                raise FileNotFoundError(path)
            found = system.get_file_info(fs.FileSelector(inside, recursive=recursive))
        return [path + file.path[len(inside) :] for file in found if file.type == fs.FileType.File]

    def facts(self, path: str) -> RemoteFacts:
        with arrow_errors(path):
            if path.startswith("gs://"):  # an open file there asks for the whole content before it tells its ETag
                found = file_system(path).get_file_info(inside_bucket(path))
                if found.size is None:
                    raise FileNotFoundError(path)
                return RemoteFacts(found.size, str(found.mtime_ns))
            opened = _arrow_file(path)
            return RemoteFacts(opened.size(), (opened.metadata() or {}).get("ETag", b"").decode())

    def read_range(self, path: str, start: int, size: int) -> bytes:
        with arrow_errors(path):
            return read_opened(_arrow_file(path), path, start, size)


def read_opened(opened: "pa.NativeFile", path: str, start: int, size: int) -> bytes:
    """Read a range of an object, or less than `size` bytes of it if the answer is too short.

    For S3 pyarrow returns a whole buffer for every answer (as of 26.0.1), so the buffer's last byte tells: it was not
    written if it keeps two values that were put there.
    """
    if path.startswith("gs://"):
        return opened.read_at(size, start)
    content = bytearray(size)
    for mark in (0, 255):
        content[-1] = mark
        opened.seek(start)
        opened.readinto(content)
        if content[-1] != mark:
            return bytes(content)
    return bytes(content[:-1])


def inside_bucket(path: str) -> str:
    """Return "bucket/key" of an address."""
    return path.partition("://")[2].removeprefix(_ANONYMOUS)


def addressed_like(path: str, other: str) -> str:
    """Return an address with the login of another in the same service, or without: both then name a file alike."""
    scheme, separator, _ = path.partition("://")
    if not separator or scheme != other.partition("://")[0] or scheme not in _REMEDIES:
        return path
    login = _ANONYMOUS if other.startswith(f"{scheme}://{_ANONYMOUS}") else ""
    return f"{scheme}://{login}{inside_bucket(path)}"


def file_system(path: str) -> "fs.FileSystem":
    scheme, _, rest = path.partition("://")
    return _open_file_system(scheme, inside_bucket(path).partition("/")[0], rest.startswith(_ANONYMOUS))


@functools.cache
def _open_file_system(scheme: str, bucket: str, anonymous: bool) -> "fs.FileSystem":
    try:
        import pyarrow.fs as fs

        kind = fs.S3FileSystem if scheme == "s3" else fs.GcsFileSystem
    except ImportError as error:
        raise UserError(f"{scheme}://{bucket}: this pyarrow cannot read it ({error}): pip install pyarrow") from None
    if scheme == "gs":
        emulator = os.environ.get("STORAGE_EMULATOR_HOST", "")
        protocol, _, host = emulator.rpartition("://")
        return kind(
            anonymous=anonymous or bool(host),
            endpoint_override=host or None,
            scheme=(protocol or "http") if host else None,
            retry_time_limit=timedelta(seconds=CONNECT_SECONDS),
        )
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    given = endpoint or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    return kind(
        anonymous=anonymous,
        region=None if given else fs.resolve_s3_region(bucket),
        endpoint_override=endpoint,
        connect_timeout=CONNECT_SECONDS,
        request_timeout=ANSWER_SECONDS,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1),  # `retried` repeats
        allow_delayed_open=True,  # a small file is one request, and no parts of it are left by a killed process
    )


def _arrow_file(path: str) -> "pa.NativeFile":
    """Open a file, once in a thread, as it has one position."""
    return _opened_in_thread(path, threading.get_ident())


@functools.lru_cache(maxsize=_OPEN_FILES)
def _opened_in_thread(path: str, thread: int) -> "pa.NativeFile":
    return file_system(path).open_input_file(inside_bucket(path))


# pyarrow passes on what the services' libraries write: "AWS Error NAME (HTTP status 403)", "Status(NAME: ...)".
_MISSING = re.compile(r"NO_SUCH_(BUCKET|KEY)|\bNOT_FOUND\b|Bucket '.*' not found|No such file or directory")
_DENIED = re.compile(
    r"ACCESS_DENIED|INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH|REQUEST_TIME_TOO_SKEWED|INVALID_CLIENT_TOKEN_ID"
    r"|ExpiredToken|InvalidToken|HTTP status (3\d\d|40[0135])|UNAUTHENTICATED|PERMISSION_DENIED"
)
_REMEDIES = {
    "s3": "give the credentials in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or ~/.aws, with AWS_ENDPOINT_URL for "
    f"another vendor; a public bucket is read as s3://{_ANONYMOUS}BUCKET/...",
    "gs": "log in by `gcloud auth application-default login` or name a key in GOOGLE_APPLICATION_CREDENTIALS; a public "
    f"bucket is read as gs://{_ANONYMOUS}BUCKET/...",
}


@contextlib.contextmanager
def arrow_errors(path: str) -> Iterator[None]:
    """Sort pyarrow's errors, which are told apart by their text alone."""
    import pyarrow as pa

    try:
        yield
    except (OSError, pa.ArrowInvalid) as error:
        _opened_in_thread.cache_clear()  # a file that is opened again says better what is wrong
        text = " ".join(str(error).split())
        if isinstance(error, pa.ArrowInvalid):
            raise UserError(f"{path}: {text[:200]}") from None
        if isinstance(error, FileNotFoundError) or _MISSING.search(text):
            raise FileNotFoundError(path) from None
        if _DENIED.search(text) or _lacks_google_login(text):
            _refused(path, text[:200], _REMEDIES[path.partition("://")[0]])
        raise failed(text[:300]) from None


def _lacks_google_login(text: str) -> bool:
    """Return True where no machine of Google's hands out a token and no file holds one."""
    files = (os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"), "~/.config/gcloud/application_default_credentials.json")
    unreachable = "access token" in text and "resolve hostname" in text
    return unreachable and not any(file and Path(file).expanduser().is_file() for file in files)


class _WebStore(_Store):
    """Single files of web servers, by the HTTP client of `huggingface_hub`."""

    def list_files(self, path: str, recursive: bool) -> list[str]:
        remote_facts(path)  # which fails if there is none
        return [path]

    def facts(self, path: str) -> RemoteFacts:
        headers, _ = _get(path, path, 0, 1)
        size = headers.get("content-range", "").rpartition("/")[2]
        if not size.isdecimal():
            raise UserError(f"{path}: the server does not tell the file's size: download the file")
        return RemoteFacts(int(size), headers.get("etag") or headers.get("last-modified") or "")

    def read_range(self, path: str, start: int, size: int) -> bytes:
        return _get(path, path, start, size)[1]


def _get(url: str, path: str, start: int, size: int, headers: Any = None) -> tuple[Any, bytes]:
    """Request a range of a file at a URL, where `path` names it to people: (headers of the answer, content)."""
    from huggingface_hub.utils import get_session

    asked = {"Range": f"bytes={start}-{start + size - 1}", "Accept-Encoding": "identity", **(headers or {})}
    with _web_errors(path), get_session().stream("GET", url, headers=asked, timeout=ANSWER_SECONDS) as answer:
        status = answer.status_code
        if status == 200:
            raise UserError(f"{path}: the server does not send parts of files, as reading here asks for: download it")
        if status not in (206, 416):  # the latter with the size of an empty file
            _refuse_status(path, status)
        return answer.headers, b"" if status == 416 else answer.read()


def _refuse_status(path: str, status: int) -> NoReturn:
    if status in _GONE_STATUS:
        raise FileNotFoundError(path)
    if status >= 500 or status in _TRANSIENT_STATUS:
        raise failed(f"HTTP status {status}")
    _refused(
        path,
        f"HTTP status {status}",
        "accept its terms on its page and set HF_TOKEN"
        if path.startswith("hf://")
        else "give an address that is open to all",
    )


@contextlib.contextmanager
def _web_errors(path: str) -> Iterator[None]:
    """Sort the errors of `huggingface_hub` and of its HTTP library, which changes with its version."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, OfflineModeIsEnabled

    try:
        yield
    except (UserError, FileNotFoundError):
        raise
    except OfflineModeIsEnabled:
        raise UserError(f"{path} cannot be read while HF_HUB_OFFLINE is set: unset it") from None
    except GatedRepoError:
        _refuse_status(path, 403)
    except HfHubHTTPError as error:
        _refuse_status(path, error.response.status_code)
    except json.JSONDecodeError as error:
        raise failed(f"the answer is no JSON: {error}") from None
    except (ValueError, NotImplementedError) as error:
        raise UserError(f"{path} is no address ({described(error)}): give one as hf://datasets/OWNER/NAME") from None
    except Exception as error:
        raise error if getattr(error, "errno", None) == errno.EIO else failed(described(error)) from None


class _HubStore(_Store):
    """The Hugging Face hub: lists from its file system, contents as from any web server."""

    def list_files(self, path: str, recursive: bool) -> list[str]:
        inside = path.partition("://")[2]
        with _web_errors(path):
            found = _hub().find(inside, maxdepth=None if recursive else 1)
        if not found:
            raise FileNotFoundError(path)
        return [path + file[len(inside) :] for file in found]

    def facts(self, path: str) -> RemoteFacts:
        with _web_errors(path):
            (found,) = _hub().ls(path, detail=True)
        digest = (found.get("lfs") or {}).get("sha256") or found.get("blob_id") or found.get("xet_hash")
        return RemoteFacts(found["size"], digest or "")

    def read_range(self, path: str, start: int, size: int) -> bytes:
        from huggingface_hub.utils import build_hf_headers

        with _web_errors(path):
            url = _hub().url(path)
        return _get(url, path, start, size, build_hf_headers())[1]


def _hub() -> Any:
    from huggingface_hub import HfFileSystem

    return HfFileSystem()  # it is made once in a process


_STORES: dict[str, _Store] = {
    "s3": _ArrowStore(),
    "gs": _ArrowStore(),
    "hf": _HubStore(),
    "https": _WebStore(),
    "http": _WebStore(),
}


def _store(path: str) -> _Store:
    return _STORES[path.partition("://")[0]]
