"""Documents in files of JSON lines, plain or compressed, which are read as streams."""

import contextlib
import functools
import gzip
import io
import json
import reprlib
import threading
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import IO, Any, NamedTuple

from backports import zstd

from noloco_jax.data.file_shares import FileLength, FilePart, divide_files
from noloco_jax.data.find_files import (
    COMPRESSED,
    HELD_OUT_EVERY,
    READ_AT_ONCE,
    SUFFIXES,
    DamagedFileError,
    compression_of,
    file_sizes,
    leave_out,
    log_once,
    versions_fact,
)
from noloco_jax.data.source import GOLDEN_STEP, Source, SourceOptions, WindowShuffledShard, seeded_permutation
from noloco_jax.errors import UserError
from noloco_jax.storage import open_file, path_or_file, with_retries

_DAMAGE = (EOFError, OSError, zlib.error, zstd.ZstdError)
# An open file holds its window: 8 MiB as a rule, up to 2 GiB of `zstd --long=31`, which the Reddit dumps have.
_MAX_WINDOW_LOG = 31
_START = (0, 0, 0, 0, 0)  # the seek hint of the first window

# Bytes, as stored, that are read to learn the lengths of files: of all together, and at least of each.
_MEASURED_BYTES, _MEASURED_BYTES_EACH = 1 << 25, 1 << 17
_measuring = threading.Lock()  # replicas open their shards at once


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


FIRST_LINE = LinePosition(0, 0, 0)


def open_decompressed(path: str) -> IO[bytes]:
    """Open a file, decompressed if its name ends with one of `COMPRESSED`.

    Raises `UserError` for a compressed file of another name.
    """
    if path.lower().endswith(COMPRESSED):
        return _decompressed(path, path_or_file(path))
    with open_file(path) as opened:
        start = opened.read(8)
    if suffix := compression_of(start):
        raise UserError(f"{path} is compressed: name it {path}{suffix}")
    return open_file(path)


def _decompressed(path: str, given: Any) -> Any:
    """Return the content of `given`, a path or an open file, decompressed as the name of `path` says."""
    if path.lower().endswith(".zst"):
        return zstd.open(given, options={zstd.DecompressionParameter.window_log_max: _MAX_WINDOW_LOG})
    return gzip.open(given) if path.lower().endswith(".gz") else given


def first_lines(path: str, max_bytes: int) -> Iterator[Line]:
    """Yield the lines, blank ones too, of the first `max_bytes` of a file as it is stored.

    The last line may be incomplete. A file that is damaged ends there.
    """

    def read() -> bytes:
        with open_file(path) as opened:
            return opened.read(max_bytes)

    start = with_retries(read, path)
    with contextlib.suppress(*_DAMAGE), _decompressed(path, io.BytesIO(start)) as opened:
        for number, content in enumerate(opened, start=1):
            yield Line(path, number, content)


def _go_to(start: int, opened: IO[bytes], path: str) -> None:
    """Go to byte `start` of a text. A compressed file is decompressed up to there, as it has no index."""
    if not path.lower().endswith(COMPRESSED):
        opened.seek(start)
        return
    while start and (block := opened.read(min(start, 1 << 20))):
        start -= len(block)


class LineReader:
    """Reader of the lines of some files one after another, blank ones left out, from any `position` on.

    Of a file that cannot be decompressed to its end, the lines before the damage are read; a warning names it.
    """

    def __init__(self, files: Sequence[str], position: LinePosition = FIRST_LINE):
        self._files, self.position = files, position
        self._opened: IO[bytes] | None = None

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
                log_once(
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
                self._opened = open_decompressed(path)
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


def parse_text(line: Line, options: SourceOptions) -> str | None:
    """Return the document on a line, the field `text_column` of a JSON object, which may be null.

    Raises `DamagedFileError` if it has none.
    """
    name, remedy = options.text_column, "write it again, or leave it out"
    try:
        document = json.loads(line.content.decode("utf-8-sig", "surrogatepass"))
        if isinstance(document, dict) and name not in document:
            reason = f"its fields are {reprlib.repr(list(document))}"
            remedy = f"give {options.beside('text_column')} the name of the text's"
        elif isinstance(document, dict) and isinstance(document[name], str | None):
            return document[name]
        else:
            reason = f"it is {reprlib.repr(document)}"
    except (ValueError, RecursionError) as error:
        reason = str(error)
        for kind in ("parquet", "text"):
            if line.path.lower().endswith(SUFFIXES[kind]):
                remedy = f"give {options.beside('kind')}={kind}, if that is its kind"
    if line.number == 1 and line.content.lstrip().startswith(b"["):
        remedy = "the file is a JSON array: write each of its objects on a line, as `jq -c '.[]'` does"
    raise DamagedFileError(
        f'{line.path}, line {line.number} is not a JSON object with a string "{name}" ({reason}): {remedy}'
    )


class JsonLinesSource(Source):
    """Source of JSON lines: a document is the text of a line, see `parse_text`.

    Files are divided into shards of equal length, see `divide_files`. Lengths are counted, of long files estimated
    from their beginnings. Of fewer files than shards, shard i of N reads all and holds the documents whose number is i
    modulo N. Shuffled, the files are in a new order in every epoch, and a shard's documents are shuffled within windows
    of `shuffle_buffer`; 1 keeps the order of the files.

    Held out for validation is a fiftieth of the lines: those for which the line's number plus the file's, times the
    golden ratio, modulo 1, lies in one fiftieth of [0, 1). So reading a line is enough to know it, and lines that take
    turns (questions and answers) are all held out alike. It is the fiftieth of one of the first documents with text.
    """

    def __init__(self, options: SourceOptions, files: Sequence[str], part: str):
        super().__init__(options, files, part)
        self._file_numbers = {file: number for number, file in enumerate(files)}
        self._held_out = -1 if part == "all" else self._find_held_out()

    @functools.cached_property
    def fingerprint(self) -> dict[str, int | str]:
        sizes = file_sizes(self.files)
        return {
            "kind": "jsonl",
            "files": len(self.files),
            "bytes": sum(sizes),
            "names and sizes": self.options.digest(zip(self.files, sizes, strict=True)),
            **versions_fact(self.files),
            "part": self.part,
            "text column": self.options.text_column,
        }

    def _fiftieth(self, line: Line) -> int:
        """Return in which of `HELD_OUT_EVERY` parts of the lines a line is."""
        return (self._file_numbers[line.path] + line.number) * GOLDEN_STEP % 2**64 * HELD_OUT_EVERY >> 64

    def _find_held_out(self) -> int:
        with closing(LineReader(self.files)) as lines:
            first = [line for line in (lines.next() for _ in range(HELD_OUT_EVERY)) if line is not None]
        if first:
            parse_text(first[0], self.options)
        if len(first) < 2:
            raise UserError(
                f"{self.name} holds {'one document' if first else 'no document'}: give "
                f"{self.options.beside('validation_path')}, or at least two, for one to be held out for validation"
            )
        with_text = [line for line in first if self._text(line)] or first
        return self._fiftieth(with_text[len(with_text) // 2])

    def in_part(self, line: Line) -> bool:
        """Return True if the document on a line belongs to the part."""
        return self.part == "all" or (self._fiftieth(line) == self._held_out) == (self.part == "held_out")

    def count_documents(self, limit: int) -> int:
        """Count documents, at most `limit`. The first one has to be readable."""
        found = 0
        with closing(LineReader(self.files)) as lines:
            while found < limit and (line := lines.next()) is not None:
                if found == 0:
                    parse_text(line, self.options)
                found += self.in_part(line)
        return found

    def file_lengths(self) -> list[FileLength]:
        """Return the length of each file; of its documents that belong to the part."""
        with _measuring:
            return self._lengths

    @functools.cached_property
    def _lengths(self) -> list[FileLength]:
        max_bytes = max(_MEASURED_BYTES // len(self.files), _MEASURED_BYTES_EACH)
        with ThreadPoolExecutor(READ_AT_ONCE) as pool:
            return list(pool.map(functools.partial(self._measure, max_bytes), self.files, file_sizes(self.files)))

    def _measure(self, max_bytes: int, file: str, size: int) -> FileLength:
        documents = length = 0
        for line in first_lines(file, max_bytes):
            if not line.content.isspace() and self.in_part(line):
                documents, length = documents + 1, length + len(line.content)
        if size <= max_bytes:
            return FileLength(documents, length, is_counted=True)
        return FileLength(*(max(1, number * size // max_bytes) for number in (documents, length)), is_counted=False)

    def open_shard(self, epoch: int, shard: int, num_shards: int, seek_hint: tuple[int, ...]) -> "JsonLinesEpochShard":
        order = list(range(len(self.files)))
        if self.options.shuffle_buffer > 1:
            order = seeded_permutation(len(order), self.options.seed, epoch).tolist()
        is_divided = 1 < num_shards <= len(order)
        if is_divided:
            parts = divide_files(self.file_lengths(), order, num_shards)[shard]
        else:
            parts = [FilePart(file, shard, shard + 1, num_shards) for file in order]
        return JsonLinesEpochShard(self, parts, is_divided, (epoch, shard, num_shards), seek_hint)

    def load(self, records: Sequence[Line]) -> list[str]:
        return [self._text(line) for line in records]

    def _text(self, line: Line) -> str:
        try:
            text = parse_text(line, self.options)
        except DamagedFileError as error:
            leave_out(str(error))
            return ""
        if text is None:
            leave_out(f"{line.path}, line {line.number}: {self.options.text_column} is null")
        return text or ""


class JsonLinesEpochShard(WindowShuffledShard):
    """Parts of files of a source, one after another.

    A seek hint is (window, *`LinePosition`, number of the next document): where this window begins.

    Args:
      source: the files.
      parts: what belongs to the shard.
      is_numbered_by_file: whether documents are numbered in each file, as those of `divide_files`, or through all.
      key: integers that the shuffle depends on.
      seek_hint: an earlier one, or ().
    """

    def __init__(
        self,
        source: JsonLinesSource,
        parts: Sequence[FilePart],
        is_numbered_by_file: bool,
        key: tuple[int, ...],
        seek_hint: tuple[int, ...],
    ):
        super().__init__(source.options.shuffle_buffer, (source.options.seed, *key))
        self._source, self._parts, self._is_numbered_by_file = source, parts, is_numbered_by_file
        self._files = [source.files[part.file] for part in parts]
        self._go_to(seek_hint or _START)

    def _go_to(self, seek_hint: tuple[int, ...]) -> None:
        self._next_window, *position, self._number = seek_hint
        self._lines = LineReader(self._files, LinePosition(*position))
        self._file = self._lines.position.file if self._lines.position.lines else -1

    def read_window(self, window: int) -> list[Line]:
        if window < self._next_window:
            self.close()
            self._go_to(_START)
        records: list[Line] = []
        while self._next_window <= window:
            self.seek_hint = (self._next_window, *self._lines.position, self._number)
            records = []
            while len(records) < self._window_size and (line := self._lines.next()) is not None:
                if self._source.in_part(line) and self._holds_next():
                    records.append(line)
            self._next_window += 1
        return records

    def _holds_next(self) -> bool:
        """Count the document that was read; return True if it belongs to the shard."""
        file = self._lines.position.file
        if file != self._file:
            self._file = file
            if self._is_numbered_by_file:
                self._number = 0
        part, number = self._parts[file], self._number
        self._number += 1
        if part.ends and self._number >= part.stop:
            self._lines.skip_file()
        return part.holds(number)

    def close(self) -> None:
        self._lines.close()
