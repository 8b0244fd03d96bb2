"""C4 in its public form: files of gzipped JSON lines, read as streams."""

import gzip
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from noloco_jax.data.shuffle import WindowShuffledShard, seeded_permutation
from noloco_jax.data.source import EncodeTexts, SourceOptions
from noloco_jax.errors import UserError


def find_c4_files(path: str, field: str, split: str) -> list[str]:
    """The sorted files `c4-{split}.*.json.gz` of a folder."""
    folder, pattern = Path(path).expanduser(), f"c4-{split}.*.json.gz"
    if not folder.is_dir():
        raise UserError(f"{field}={path!r}: there is no such folder; give the one that holds {pattern}")
    files = sorted(str(file) for file in folder.glob(pattern))
    if not files:
        raise UserError(f"{field}={path!r} holds no file {pattern}")
    return files


class JsonLine(NamedTuple):
    """A line of a file: its number counts from 1."""

    path: str
    number: int
    content: bytes

    def text(self) -> str:
        """The document on the line: the "text" of a JSON object. Raises `UserError` if it has none."""
        try:
            text = json.loads(self.content)["text"]
        except (ValueError, KeyError, TypeError):
            text = None
        if not isinstance(text, str):
            raise UserError(
                f'{self.path}, line {self.number} is not a JSON object with a string "text": fetch the file again'
            )
        return text


class LineReader:
    """Reads the lines of some files one after another, blank ones left out.

    `position` is (file, lines read of it, documents read of all files); reading can begin at any such position.
    """

    def __init__(self, files: Sequence[str], file: int = 0, line: int = 0, document: int = 0):
        self._files, self.position = files, (file, line, document)
        self._opened: gzip.GzipFile | None = None

    def next(self) -> JsonLine | None:
        """The next document's line; None after the last one of the last file."""
        while True:
            file, line, document = self.position
            if file == len(self._files):
                return None
            path = self._files[file]
            try:
                if self._opened is None:
                    self._opened = gzip.GzipFile(path, "rb")
                    for _ in range(line):
                        self._opened.readline()
                content = self._opened.readline()
            except (EOFError, OSError, zlib.error) as error:
                raise UserError(
                    f"{path} cannot be read after line {line} ({error}): it is truncated or damaged; fetch it again"
                ) from None
            if not content:
                self.close()
                self.position = (file + 1, 0, document)
            elif content.isspace():
                self.position = (file, line + 1, document)
            else:
                self.position = (file, line + 1, document + 1)
                return JsonLine(path, line + 1, content)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None


class C4Source:
    """Shard i of N holds the files i, i + N, ... of the sorted list; where there are fewer files than shards, it holds
    every document of all files whose number is i modulo N.

    Shuffled, the files of a shard are in a new order in every epoch, and its documents are shuffled within windows of
    `shuffle_buffer`; `shuffle_buffer` 1 keeps the order of the files.
    """

    num_columns = 1
    chunk_size = 32

    def __init__(self, options: SourceOptions, encode: EncodeTexts):
        self._options, self._encode = options, encode
        self._files = find_c4_files(options.path, options.field, options.split)
        self.fingerprint: dict[str, int | str] = {
            "kind": "c4",
            "files": len(self._files),
            "bytes": sum(Path(file).stat().st_size for file in self._files),
        }

    def check_replicas(self, num_replicas: int) -> None:
        """Also reads the first document, so that a folder of something else is found at once."""
        lines = LineReader(self._files)
        try:
            first = lines.next()
            if first is not None:
                first.text()
            needed = num_replicas if len(self._files) < num_replicas else 1
            while lines.position[2] < needed:
                if lines.next() is None:
                    raise UserError(
                        f"num_replicas={num_replicas}, but {self._options.name} holds {lines.position[2]} "
                        "documents: use fewer replicas or more files"
                    )
        finally:
            lines.close()

    def open_shard(self, epoch: int, shard: int, num_shards: int, seek_hint: tuple[int, ...]) -> "C4EpochShard":
        by_file = len(self._files) >= num_shards
        files = self._files[shard::num_shards] if by_file else self._files
        seed, window_size = self._options.seed, self._options.shuffle_buffer
        if window_size > 1:
            # Replicas that divide the documents of the same files must all read these in one order.
            key = (epoch, shard, num_shards) if by_file else (epoch,)
            files = [files[k] for k in seeded_permutation(len(files), seed, *key)]
        return C4EpochShard(
            files,
            remainder=0 if by_file else shard,
            modulus=1 if by_file else num_shards,
            window_size=window_size,
            key=(seed, epoch, shard, num_shards),
            seek_hint=seek_hint,
        )

    def load(self, records: Sequence[JsonLine]) -> list[np.ndarray]:
        return self._encode([line.text() for line in records])


class C4EpochShard(WindowShuffledShard):
    """The documents of some files whose number is `remainder` modulo `modulus`.

    A seek hint is (window, *position of a `LineReader` where this window begins).
    """

    def __init__(
        self,
        files: Sequence[str],
        *,
        remainder: int,
        modulus: int,
        window_size: int,
        key: tuple[int, ...],
        seek_hint: tuple[int, ...],
    ):
        super().__init__(window_size, key)
        self._files, self._remainder, self._modulus = files, remainder, modulus
        self._next_window, *position = seek_hint or (0, 0, 0, 0)
        self._lines = LineReader(files, *position)
        self._seek_hint: tuple[int, ...] = ()

    @property
    def seek_hint(self) -> tuple[int, ...]:
        return self._seek_hint

    def read_window(self, window: int) -> list[JsonLine]:
        if window < self._next_window:
            self._lines.close()
            self._next_window, self._lines = 0, LineReader(self._files)
        records: list[JsonLine] = []
        while self._next_window <= window:
            self._seek_hint = (self._next_window, *self._lines.position)
            records = []
            while len(records) < self._window_size:
                number = self._lines.position[2]
                line = self._lines.next()
                if line is None:
                    break
                if number % self._modulus == self._remainder:
                    records.append(line)
            self._next_window += 1
        return records

    def close(self) -> None:
        self._lines.close()
