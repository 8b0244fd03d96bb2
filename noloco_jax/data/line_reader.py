"""Lines of plain and compressed files, read as streams."""

import contextlib
import gzip
import io
import zlib
from collections.abc import Sequence
from typing import IO, NamedTuple

from noloco_jax.data.read_errors import DamagedFileError, read_with_retries, stop_or_skip


class Line(NamedTuple):
    """A line of a file: its number counts from 1."""

    path: str
    number: int
    content: bytes


def open_decompressed(path: str) -> IO[bytes]:
    """Opens a file, decompressed if its name ends with .gz or .zst."""
    if path.endswith(".gz"):
        return gzip.GzipFile(path, "rb")  # pyright: ignore[reportReturnType]
    if path.endswith(".zst"):
        import pyarrow as pa

        return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(path, "rb"), "zstd"), 1 << 16)
    return open(path, "rb")


class LineReader:
    """Reads the lines of some files one after another, blank ones left out.

    `position` is (file, lines read of it); reading can begin at any such position.
    """

    def __init__(self, files: Sequence[str], position: tuple[int, int] = (0, 0), *, on_bad_shard: str = "stop"):
        self._files, self.position, self._on_bad_shard = files, position, on_bad_shard
        self._opened: IO[bytes] | None = None

    def next(self) -> Line | None:
        """The next document's line; None after the last one of the last file.

        Raises `DamagedFileError` for a file that cannot be decompressed, unless `on_bad_shard` is "skip": its further
        lines are then left out.
        """
        while True:
            file, line = self.position
            if file == len(self._files):
                return None
            path = self._files[file]
            try:
                content = read_with_retries(self._read_line, path)
            except (EOFError, OSError, zlib.error) as error:
                damaged = DamagedFileError(
                    f"{path} cannot be decompressed after line {line} ({error}): it is truncated or damaged; "
                    "fetch it again"
                )
                stop_or_skip(damaged, self._on_bad_shard)
                content = b""
            if not content:
                self.close()
                self.position = (file + 1, 0)
                continue
            self.position = (file, line + 1)
            if not content.isspace():
                return Line(path, line + 1, content)

    def _read_line(self) -> bytes:
        file, line = self.position
        try:
            if self._opened is None:
                self._opened = open_decompressed(self._files[file])
                for _ in range(line):
                    self._opened.readline()
            return self._opened.readline()
        except Exception:
            self.close()  # so that another attempt opens the file again
            raise

    def close(self) -> None:
        if self._opened is not None:
            with contextlib.suppress(OSError):
                self._opened.close()
            self._opened = None
