"""Documents in files of JSON lines: any such files, and C4 in its public form."""

import fnmatch
import functools
import json
import reprlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from noloco_jax.data.find_files import HELD_OUT_EVERY, remote_files, without_repeats
from noloco_jax.data.identity import content_fact, file_states
from noloco_jax.data.line_reader import COMPRESSED, Line, LinePosition, LineReader
from noloco_jax.data.reading import DamagedFileError, skip_document
from noloco_jax.data.source import GOLDEN_STEP, SourceOptions, WindowShuffledShard, seeded_permutation
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
    pattern = f"c4-{options.split}.*.json.gz"
    if is_remote(options.path):
        found = remote_files(options, recursive=False)
        files = [file for file in found if fnmatch.fnmatchcase(file.rpartition("/")[2], pattern)]
    else:
        folder = Path(options.path).expanduser()
        if not folder.is_dir():
            raise UserError(f"{options.name}: there is no such folder; give the one that holds {pattern}")
        files = without_repeats(map(str, sorted(folder.glob(pattern))))
    if not files:
        raise UserError(f"{options.name} holds no file {pattern}")
    return files


def parse_text(line: Line, options: SourceOptions) -> str:
    """Return the document on a line, the field `text_column` of a JSON object; `DamagedFileError` if it has none."""
    name = options.text_column

    def refuse(reason: str, remedy: str) -> NoReturn:
        raise DamagedFileError(
            f'{line.path}, line {line.number} is not a JSON object with a string "{name}" ({reason}): {remedy}'
        )

    if b"\0" in line.content:
        refuse("it holds NUL bytes, as files have that a crash cut off", "write the file again")
    try:
        text = line.content.decode("utf-8-sig", "surrogatepass")
        document = json.loads(text, parse_int=float)  # Python reads no integer of more than 4300 digits
    except json.JSONDecodeError as error:
        refuse(f"{error.msg} at column {error.colno}", "fetch the file again")
    except UnicodeDecodeError as error:
        refuse(str(error), "fetch the file again")
    except RecursionError:
        refuse("it is nested too deep to be read", "leave it out")
    if not isinstance(document, dict):
        refuse(f"it is {_JSON_KINDS[type(document)]}", "write it again or leave it out")
    if name not in document:
        fields = reprlib.repr(list(document))
        refuse(f"its fields are {fields}", f"give {options.text_column_field} the name of the text's")
    if not isinstance(document[name], str):
        refuse(f'"{name}" is {_JSON_KINDS[type(document[name])]}', "write it again or leave it out")
    return document[name]


class JsonLinesSource:
    """Source of JSON lines: a document is the text of a line, see `parse_text`.

    Shard i of N holds the files i, i + N, ... of the sorted list; where there are fewer files than shards, it holds
    every document of all files whose number is i modulo N. Shuffled, the files of a shard are in a new order in every
    epoch, and its documents are shuffled within windows of `shuffle_buffer`; 1 keeps the order of the files.

    Held out for validation is a fiftieth of the lines: those for which the line's number plus the file's, times the
    golden ratio, modulo 1, lies in one fiftieth of [0, 1). So reading a line is enough to know it, and lines that take
    turns (questions and answers) are all held out alike. It is the fiftieth of one of the first documents with text.
    """

    num_columns = 1
    chunk_size = 32

    def __init__(self, options: SourceOptions, files: Sequence[str], part: str, kind: str):
        self.name = options.name
        self._options, self.files, self.part, self._kind = options, files, part, kind
        self._file_numbers = {file: number for number, file in enumerate(files)}
        self._held_out = -1 if part == "all" else self._find_held_out()

    @functools.cached_property
    def fingerprint(self) -> dict[str, int | str]:
        sizes = [state.size for state in file_states(self.files)]
        return {
            "kind": self._kind,
            "files": len(self.files),
            "bytes": sum(sizes),
            "names and sizes": self._options.digest(zip(self.files, sizes, strict=True)),
            **content_fact(self.files),
            "part": self.part,
            "text column": self._options.text_column,
        }

    def _fiftieth(self, line: Line) -> int:
        """Return in which of `HELD_OUT_EVERY` parts of the lines a line is."""
        return (self._file_numbers[line.path] + line.number) * GOLDEN_STEP % 2**64 * HELD_OUT_EVERY >> 64

    def _find_held_out(self) -> int:
        lines = LineReader(self.files, on_bad_shard=self._options.on_bad_shard)
        first = [line for line in (lines.next() for _ in range(HELD_OUT_EVERY)) if line is not None]
        lines.close()
        if len(first) < 2:
            raise UserError(
                f"{self._options.name} holds {len(first)} documents: give {self._options.validation_field}, or at "
                "least two, for one to be held out for validation"
            )
        with_text = [line for line in first if self._text(line)] or first
        return self._fiftieth(with_text[len(with_text) // 2])

    def _in_part(self, line: Line) -> bool:
        return self.part == "all" or (self._fiftieth(line) == self._held_out) == (self.part == "held_out")

    def check_replicas(self, num_replicas: int) -> None:
        """Count documents up to `num_replicas`, and parse the first: a folder of something else is found at once."""
        lines = LineReader(self.files, on_bad_shard=self._options.on_bad_shard)
        needed = num_replicas if len(self.files) < num_replicas else 1
        found = 0
        try:
            while found < needed:
                line = lines.next()
                if line is None:
                    raise UserError(
                        f"num_replicas={num_replicas}, but {self._options.name} holds {found} "
                        f"{self._options.split} documents: use fewer replicas or more data"
                    )
                if found == 0:
                    self._text(line)
                found += self._in_part(line)
        finally:
            lines.close()

    def open_shard(self, epoch: int, shard: int, num_shards: int, seek_hint: tuple[int, ...]) -> "JsonLinesEpochShard":
        by_file = len(self.files) >= num_shards
        files = list(self.files[shard::num_shards] if by_file else self.files)
        seed, window_size = self._options.seed, self._options.shuffle_buffer
        if window_size > 1:
            # Replicas that divide the documents of the same files must all read these in one order.
            key = (epoch, shard, num_shards) if by_file else (epoch,)
            files = [files[k] for k in seeded_permutation(len(files), seed, *key)]
        return JsonLinesEpochShard(
            files,
            self._in_part,
            remainder=0 if by_file else shard,
            modulus=1 if by_file else num_shards,
            window_size=window_size,
            key=(seed, epoch, shard, num_shards),
            seek_hint=seek_hint,
            on_bad_shard=self._options.on_bad_shard,
        )

    def load(self, records: Sequence[Line]) -> list[str]:
        return [self._text(line) for line in records]

    def _text(self, line: Line) -> str:
        try:
            return parse_text(line, self._options)
        except DamagedFileError as error:
            skip_document(error, self._options.on_bad_shard)
            return ""


class JsonLinesEpochShard(WindowShuffledShard):
    """The documents of some files in a part of them; of these, each whose number is `remainder` modulo `modulus`.

    A seek hint is (window, *`LinePosition`, documents of the part before): where this window begins.
    """

    def __init__(
        self,
        files: Sequence[str],
        in_part: Callable[[Line], bool],
        *,
        remainder: int,
        modulus: int,
        window_size: int,
        key: tuple[int, ...],
        seek_hint: tuple[int, ...],
        on_bad_shard: str,
    ):
        super().__init__(window_size, key)
        self._files, self._in_part, self._on_bad_shard = files, in_part, on_bad_shard
        self._remainder, self._modulus = remainder, modulus
        self._go_to(seek_hint or _START)
        self._seek_hint: tuple[int, ...] = ()

    def _go_to(self, seek_hint: tuple[int, ...]) -> None:
        self._next_window, *position, self._number = seek_hint
        self._lines = LineReader(self._files, LinePosition(*position), on_bad_shard=self._on_bad_shard)

    @property
    def seek_hint(self) -> tuple[int, ...]:
        return self._seek_hint

    def read_window(self, window: int) -> list[Line]:
        if window < self._next_window:
            self._lines.close()
            self._go_to(_START)
        records: list[Line] = []
        while self._next_window <= window:
            self._seek_hint = (self._next_window, *self._lines.position, self._number)
            records = []
            while len(records) < self._window_size:
                line = self._lines.next()
                if line is None:
                    break
                if self._in_part(line):
                    if self._number % self._modulus == self._remainder:
                        records.append(line)
                    self._number += 1
            self._next_window += 1
        return records

    def close(self) -> None:
        self._lines.close()
