"""Lines of plain and compressed files, read as streams."""

import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from typing import IO, Any, NamedTuple, cast

from backports import zstd
from isal import igzip, igzip_lib

from noloco_jax.data.reading import tell_once
from noloco_jax.errors import UserError
from noloco_jax.storage.addresses import open_file, path_or_file
from noloco_jax.storage.retries import with_retries

_BUFFER_BYTES = 1 << 16
_FIRST_BYTES = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd"}
COMPRESSED = tuple(_FIRST_BYTES)
_IsalError: type[Exception] = igzip_lib.IsalError  # pyright: ignore[reportAssignmentType]
_DAMAGE = (EOFError, OSError, zlib.error, zstd.ZstdError, _IsalError)
# An open file holds its window: 8 MiB as a rule, up to 2 GiB of `zstd --long=31`, which the Reddit dumps have.
_MAX_WINDOW_LOG = 31


def compression_of(start: bytes) -> str | None:
    """Return the suffix of the compression that a file begins with, or None."""
    return next((suffix for suffix, first_bytes in _FIRST_BYTES.items() if start.startswith(first_bytes)), None)


class Line(NamedTuple):
    """A line of a file: its number counts from 1."""

    path: str
    number: int
    content: bytes


class LinePosition(NamedTuple):
    """Position to continue reading at: the number of a file, and the lines and bytes of its text before."""

    file: int
    lines: int
    bytes: int


_START = LinePosition(0, 0, 0)


def open_decompressed(path: str, *, damaged: bool = False) -> IO[bytes]:
    """Open a file, decompressed if its name ends with one of `COMPRESSED`.

    A `damaged` one gives all that can be decompressed of it, more slowly.

    Raises `UserError` for a compressed file of another name.
    """
    if path.lower().endswith(COMPRESSED):
        return _decompressed(path, path_or_file(path), damaged)
    with open_file(path) as opened:
        start = opened.read(8)
    if suffix := compression_of(start):
        raise UserError(f"{path} is compressed: name it {path}{suffix}")
    return open_file(path)


def _decompressed(path: str, given: Any, damaged: bool) -> IO[bytes]:
    """Return the content of `given`, a path or an open file, decompressed as the name of `path` says.

    Of what is damaged, ISA-L, three times as fast as zlib, keeps back what precedes the damage. So does a buffer.
    """
    if path.lower().endswith(".zst"):
        opened = zstd.open(given, options={zstd.DecompressionParameter.window_log_max: _MAX_WINDOW_LOG})
    elif path.lower().endswith(".gz"):
        opened = (gzip if damaged else igzip).open(given)
    else:
        return given
    if not damaged:
        opened = io.BufferedReader(opened, _BUFFER_BYTES)  # pyright: ignore[reportArgumentType]  # `readline` in C
    return cast(IO[bytes], opened)


def first_lines(path: str, max_bytes: int) -> Iterator[Line]:
    """Yield the lines, blank ones too, of the first `max_bytes` of a file as it is stored.

    The last line may be incomplete. A file that is damaged ends there.
    """

    def read() -> bytes:
        with open_file(path) as opened:
            return opened.read(max_bytes)

    start = with_retries(read, path)
    with contextlib.suppress(*_DAMAGE), _decompressed(path, io.BytesIO(start), True) as opened:
        for number, content in enumerate(opened, start=1):
            yield Line(path, number, content)


def _go_to(start: int, opened: IO[bytes], path: str) -> None:
    """Go to byte `start` of a text. A compressed one is read up to there: no form of it can be entered further on."""
    if not path.lower().endswith(COMPRESSED):
        opened.seek(start)
        return
    while start and (block := opened.read(min(start, 1 << 20))):
        start -= len(block)


class LineReader:
    """Reader of the lines of some files one after another, blank ones left out, from any `position` on.

    Of a file that cannot be decompressed to its end, the lines before the damage are read; a warning names it.
    """

    def __init__(self, files: Sequence[str], position: LinePosition = _START):
        self._files, self.position = files, position
        self._opened: IO[bytes] | None = None
        self._damaged: int | None = None  # number of the file

    def next(self) -> Line | None:
        """Read the next document's line; None after the last one of the last file."""
        while True:
            file, lines, start = self.position
            if file == len(self._files):
                return None
            path = self._files[file]
            try:
                content = with_retries(self._read_line, path)
            except _DAMAGE as error:
                if self._damaged != file:
                    self._damaged = file  # it is opened once more, to come up to the damage
                    continue
                tell_once(
                    f"warning: {path} cannot be decompressed after line {lines} ({error}): its rest is left out; fetch "
                    "it again before the next run"
                )
                content = b""
            if not content:
                self.skip_file()
                continue
            self.position = LinePosition(file, lines + 1, start + len(content))
            if not content.isspace():
                return Line(path, lines + 1, content)

    def skip_file(self) -> None:
        """Go to the next file."""
        self.close()
        self.position = LinePosition(self.position.file + 1, 0, 0)

    def _read_line(self) -> bytes:
        try:
            if self._opened is None:
                path = self._files[self.position.file]
                self._opened = open_decompressed(path, damaged=self._damaged == self.position.file)
                _go_to(self.position.bytes, self._opened, path)
            return self._opened.readline()
        except Exception:
            self.close()  # another attempt opens the file again
            raise

    def close(self) -> None:
        if self._opened is not None:
            with contextlib.suppress(OSError):
                self._opened.close()
            self._opened = None
