"""Documents in files of JSON lines."""

import functools
import json
import reprlib
from collections.abc import Sequence
from contextlib import closing

from noloco_jax.data.find_files import HELD_OUT_EVERY
from noloco_jax.data.line_reader import COMPRESSED, Line, LinePosition, LineReader
from noloco_jax.data.reading import DamagedFileError, file_sizes, leave_out, versions_fact
from noloco_jax.data.source import GOLDEN_STEP, Source, SourceOptions, WindowShuffledShard, seeded_permutation
from noloco_jax.errors import UserError

# A plain .json is rarely one of lines.
SUFFIXES = (
    ".jsonl",
    ".ndjson",
    *(kind + suffix for kind in (".jsonl", ".ndjson", ".json") for suffix in COMPRESSED),
)
_START = (0, 0, 0, 0, 0)  # the seek hint of the first window


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
    raise DamagedFileError(
        f'{line.path}, line {line.number} is not a JSON object with a string "{name}" ({reason}): {remedy}'
    )


class JsonLinesSource(Source):
    """Source of JSON lines: a document is the text of a line, see `parse_text`.

    Shard i of N holds the files i, i + N, ... of the sorted list; where there are fewer files than shards, it holds
    every document of all files whose number is i modulo N. Shuffled, the files of a shard are in a new order in every
    epoch, and its documents are shuffled within windows of `shuffle_buffer`; 1 keeps the order of the files.

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
        if len(first) < 2:
            raise UserError(
                f"{self.name} holds {len(first)} documents: give {self.options.beside('validation_path')}, or at "
                "least two, for one to be held out for validation"
            )
        with_text = [line for line in first if self._text(line)] or first
        return self._fiftieth(with_text[len(with_text) // 2])

    def in_part(self, line: Line) -> bool:
        """Return True if the document on a line belongs to the part."""
        return self.part == "all" or (self._fiftieth(line) == self._held_out) == (self.part == "held_out")

    def count_documents(self, most: int) -> int:
        """Count documents, where there are fewer files than `most`. The first one has to be readable."""
        found, needed = 0, most if len(self.files) < most else 1
        with closing(LineReader(self.files)) as lines:
            while found < needed and (line := lines.next()) is not None:
                if found == 0:
                    parse_text(line, self.options)
                found += self.in_part(line)
        return most if found == needed else found

    def open_shard(self, epoch: int, shard: int, num_shards: int, seek_hint: tuple[int, ...]) -> "JsonLinesEpochShard":
        return JsonLinesEpochShard(self, epoch, shard, num_shards, seek_hint)

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
    """The documents of some files of a source; of few files, each whose number is the shard's modulo their number.

    A seek hint is (window, *`LinePosition`, documents of the part before): where this window begins.
    """

    def __init__(self, source: JsonLinesSource, epoch: int, shard: int, num_shards: int, seek_hint: tuple[int, ...]):
        seed, window_size = source.options.seed, source.options.shuffle_buffer
        super().__init__(window_size, (seed, epoch, shard, num_shards))
        self._source, self._remainder, self._modulus = source, shard, num_shards
        self._files, key = list(source.files), (epoch,)
        if len(self._files) >= num_shards:
            self._files, key = self._files[shard::num_shards], (epoch, shard, num_shards)
            self._remainder, self._modulus = 0, 1
        if window_size > 1:  # replicas that divide the documents of the same files read these in one order
            self._files = [self._files[k] for k in seeded_permutation(len(self._files), seed, *key)]
        self._go_to(seek_hint or _START)

    def _go_to(self, seek_hint: tuple[int, ...]) -> None:
        self._next_window, *position, self._number = seek_hint
        self._lines = LineReader(self._files, LinePosition(*position))

    def read_window(self, window: int) -> list[Line]:
        if window < self._next_window:
            self.close()
            self._go_to(_START)
        records: list[Line] = []
        while self._next_window <= window:
            self.seek_hint = (self._next_window, *self._lines.position, self._number)
            records = []
            while len(records) < self._window_size and (line := self._lines.next()) is not None:
                if self._source.in_part(line):
                    if self._number % self._modulus == self._remainder:
                        records.append(line)
                    self._number += 1
            self._next_window += 1
        return records

    def close(self) -> None:
        self._lines.close()
