"""Documents in files of JSON lines: any such files, and C4 in its public form."""

import fnmatch
import functools
import json
import os
import reprlib
from collections.abc import Sequence
from contextlib import closing

from noloco_jax.data.find_files import HELD_OUT_EVERY, remote_files, without_repeats
from noloco_jax.data.line_reader import COMPRESSED, Line, LinePosition, LineReader
from noloco_jax.data.reading import DamagedFileError, file_states, skip_document, versions_fact
from noloco_jax.data.source import GOLDEN_STEP, Source, SourceOptions, WindowShuffledShard, seeded_permutation
from noloco_jax.errors import UserError
from noloco_jax.storage.addresses import is_remote

# A plain .json is rarely one of lines.
SUFFIXES = (
    ".jsonl",
    ".ndjson",
    *(kind + suffix for kind in (".jsonl", ".ndjson", ".json") for suffix in COMPRESSED),
)
_JSON_KINDS = {
    dict: "an object",
    list: "a list",
    str: "a string",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}
_START = (0, 0, 0, 0, 0)  # the seek hint of the first window


def find_c4_files(options: SourceOptions) -> list[str]:
    """Find the sorted files `c4-{split}.*.json.gz` of a folder."""
    pattern, root = f"c4-{options.split}.*.json.gz", options.root
    if is_remote(root):
        found = remote_files(options, recursive=False)
    elif os.path.isdir(root):
        found = [os.path.join(root, name) for name in sorted(os.listdir(root))]
    else:
        raise UserError(f"{options.name}: there is no such folder; give the one that holds {pattern}")
    files = without_repeats(file for file in found if fnmatch.fnmatchcase(file.rpartition("/")[2], pattern))
    if not files:
        raise UserError(f"{options.name} holds no file {pattern}")
    return files


def parse_text(line: Line, options: SourceOptions) -> str:
    """Return the document on a line, the field `text_column` of a JSON object; `DamagedFileError` if it has none."""
    name, remedy = options.text_column, "write it again or leave it out"
    try:
        text = line.content.decode("utf-8-sig", "surrogatepass")
        document = json.loads(text, parse_int=float)  # Python reads no integer of more than 4300 digits
        if isinstance(document, dict) and isinstance(document.get(name), str) and b"\0" not in line.content:
            return document[name]
        if not isinstance(document, dict):
            reason = f"it is {_JSON_KINDS[type(document)]}"
        elif name in document:
            reason = f'"{name}" is {_JSON_KINDS[type(document[name])]}'
        else:
            reason = f"its fields are {reprlib.repr(list(document))}"
            remedy = f"give {options.beside('text_column')} the name of the text's"
    except json.JSONDecodeError as error:
        reason, remedy = f"{error.msg} at column {error.colno}", "fetch the file again"
    except UnicodeDecodeError as error:
        reason, remedy = str(error), "fetch the file again"
    except RecursionError:
        reason = "it is nested too deep to be read"
    if b"\0" in line.content:
        reason, remedy = "it holds NUL bytes, as files have that a crash cut off", "write the file again"
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

    def __init__(self, options: SourceOptions, files: Sequence[str], part: str, kind: str):
        super().__init__(options, files, part)
        self._kind = kind
        self._file_numbers = {file: number for number, file in enumerate(files)}
        self._held_out = -1 if part == "all" else self._find_held_out()

    @functools.cached_property
    def fingerprint(self) -> dict[str, int | str]:
        sizes = [state.size for state in file_states(self.files)]
        return {
            "kind": self._kind,
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
        with closing(LineReader(self.files, on_bad_shard=self.options.on_bad_shard)) as lines:
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
        """Count documents, where there are fewer files than `most`; a folder of something else is found at once."""
        found, needed = 0, most if len(self.files) < most else 1
        with closing(LineReader(self.files, on_bad_shard=self.options.on_bad_shard)) as lines:
            while found < needed and (line := lines.next()) is not None:
                if found == 0:
                    self._text(line)
                found += self.in_part(line)
        return most if found == needed else found

    def open_shard(self, epoch: int, shard: int, num_shards: int, seek_hint: tuple[int, ...]) -> "JsonLinesEpochShard":
        return JsonLinesEpochShard(self, epoch, shard, num_shards, seek_hint)

    def load(self, records: Sequence[Line]) -> list[str]:
        return [self._text(line) for line in records]

    def _text(self, line: Line) -> str:
        try:
            return parse_text(line, self.options)
        except DamagedFileError as error:
            skip_document(error, self.options.on_bad_shard)
            return ""


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
        on_bad_shard = self._source.options.on_bad_shard
        self._lines = LineReader(self._files, LinePosition(*position), on_bad_shard=on_bad_shard)

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
