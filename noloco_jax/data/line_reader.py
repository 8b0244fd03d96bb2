"""Lines of plain and compressed files, read as streams."""

import contextlib
import gzip
import io
import os
import zlib
from collections.abc import Sequence
from typing import IO, Any, NamedTuple, cast

from isal import igzip, igzip_lib

from noloco_jax.data.reading import tell_once
from noloco_jax.errors import UserError
from noloco_jax.storage.addresses import open_file, path_or_file
from noloco_jax.storage.retries import with_retries

_BUFFER_BYTES = 1 << 16
_FIRST_BYTES = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd"}
COMPRESSED = tuple(_FIRST_BYTES)
_BadStream: type[Exception] = igzip_lib.IsalError  # pyright: ignore[reportAssignmentType]


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

    A `damaged` one gives all that can be decompressed of it, more slowly: with gzip from zlib, as ISA-L, three times as
    fast, keeps back what precedes the damage; with zstd byte by byte, as Arrow loses all of the read that meets it.

    Raises `UserError` for a compressed file of another name.
    """
    given: Any = path_or_file(path)
    suffix = os.path.splitext(path)[1].lower()
    if suffix == ".gz" and damaged:
        return cast(IO[bytes], gzip.open(given))
    if suffix == ".gz":
        # The outer buffer has a `readline` in C.
        return io.BufferedReader(igzip.open(given), _BUFFER_BYTES)  # pyright: ignore[reportArgumentType]
    if suffix == ".zst":
        import pyarrow as pa

        buffer_bytes = 1 if damaged else _BUFFER_BYTES
        return io.BufferedReader(pa.CompressedInputStream(given, "zstd"), buffer_bytes)
    with open_file(path) as opened:
        start = opened.read(8)
    if suffix := compression_of(start):
        raise UserError(f"{path} is compressed: name it {path}{suffix}")
    return open_file(path)


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
            except (EOFError, OSError, zlib.error, _BadStream) as error:
                if self._damaged != file:
                    self._damaged = file  # it is opened once more, to come up to the damage
                    continue
                tell_once(
                    f"warning: {path} cannot be decompressed after line {lines} ({error}): its rest is left out; fetch "
                    "it again before the next run"
                )
                content = b""
            if not content:
                self.close()
                self.position = LinePosition(file + 1, 0, 0)
                continue
            self.position = LinePosition(file, lines + 1, start + len(content))
            if not content.isspace():
                return Line(path, lines + 1, content)

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
