"""Parquet files: their footers, batches of rows, and rows as documents, which are tokens or text to be tokenized."""

import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

from noloco_jax.data.find_files import READ_AT_ONCE, DamagedFileError, HoldOut, log_once, versions_fact
from noloco_jax.data.parquet_rows import RowConverter, is_binary
from noloco_jax.data.source import Source, SourceOptions, WindowShuffledShard, seeded_permutation
from noloco_jax.errors import UserError
from noloco_jax.storage import is_remote, path_or_file, remote_facts, with_retries

T = TypeVar("T")

_ROWS_PER_BATCH = 128
_COLUMN_BUFFER_BYTES = 1 << 20  # without it pyarrow holds whole row groups in memory
_REMOTE_BUFFER_BYTES = 1 << 23
_USUAL_TEXT_COLUMN = "text"  # beside tokens it holds their source, not other documents
_DECODED_FOOTERS = 128  # kept in memory, where a row group takes 2 kB, however many streams read the file


class FileFooter(NamedTuple):
    """Facts of a file's footer: the columns to read, the rows and bytes of each row group."""

    columns: tuple[str, ...]
    group_rows: tuple[int, ...]
    group_bytes: tuple[int, ...]  # before compression; it changes with most changes of the values


def read_footers(files: Sequence[str], text_column: str) -> list[FileFooter]:
    """Read the footer of each file.

    Raises `UserError` for a file that is not Parquet, and for unknown columns.
    """

    def read(path: str) -> FileFooter:
        with _open(path) as opened:
            columns = choose_columns(path, opened.schema_arrow, text_column)
            groups = [opened.metadata.row_group(group) for group in range(opened.num_row_groups)]
        rows, group_bytes = tuple(g.num_rows for g in groups), tuple(g.total_byte_size for g in groups)
        return FileFooter(columns, rows, group_bytes)

    with ThreadPoolExecutor(READ_AT_ONCE) as pool:
        return list(pool.map(read, files))


@functools.lru_cache(maxsize=_DECODED_FOOTERS)
def _decoded_footer(path: str, version: int | str) -> pq.FileMetaData:
    return _decoding(path, lambda: pq.read_metadata(path_or_file(path, read_ahead=False)))


def _open(path: str) -> pq.ParquetFile:
    version = remote_facts(path).version if is_remote(path) else with_retries(lambda: os.stat(path).st_mtime_ns, path)
    footer = _decoded_footer(path, version)
    buffer_bytes = _REMOTE_BUFFER_BYTES if is_remote(path) else _COLUMN_BUFFER_BYTES

    def read() -> pq.ParquetFile:
        file = path_or_file(path, read_ahead=False)
        return pq.ParquetFile(
            file, metadata=footer, pre_buffer=False, buffer_size=buffer_bytes, page_checksum_verification=True
        )

    return _decoding(path, read)


def _decoding(path: str, read: Callable[[], T]) -> T:
    """Call `read` with retries and return its result; `DamagedFileError` for bytes that cannot be decoded."""
    try:
        return with_retries(read, path)
    except (pa.ArrowException, OSError) as error:
        raise DamagedFileError(f"{path} is no readable Parquet file ({_one_line(error)}): fetch it again") from None


def choose_columns(path: str, schema: pa.Schema, text_column: str) -> tuple[str, ...]:
    """Choose the columns of a file to read: `input_ids` and what its labels are made from, or the one of text.

    Tokens with labels or a mask come before a column `text` beside them, those alone after it. A text column of another
    name is read whatever there is.

    Raises `UserError` if there are none of these types.
    """
    types_of = dict(zip(schema.names, schema.types, strict=True))
    has_text = text_column in types_of and _is_text(types_of[text_column])
    if text_column == _USUAL_TEXT_COLUMN:
        names = ("input_ids", "labels", "label", "attention_mask")
        lists = [name for name in names if name in types_of and _lists_integers(types_of[name])]
        if lists[:1] == ["input_ids"] and (len(lists) > 1 or not has_text):
            return *lists[:2], *(name for name in lists[2:] if name == "attention_mask")
    if has_text:
        return (text_column,)
    raise UserError(
        f"{path} has the columns {', '.join(f'{name} ({found})' for name, found in types_of.items())}: expected "
        f"strings in {text_column!r} (data.text_column names another), or lists of integers in input_ids, and perhaps "
        "in labels (equal to them, as Hugging Face has it), label (the ids that follow) or attention_mask"
    )


def _lists_integers(column_type: pa.DataType) -> bool:
    listed = types.is_list(column_type) or types.is_large_list(column_type) or types.is_fixed_size_list(column_type)
    return listed and (types.is_integer(column_type.value_type) or types.is_boolean(column_type.value_type))


def _is_text(column_type: pa.DataType) -> bool:
    if types.is_dictionary(column_type):
        column_type = column_type.value_type
    return (
        types.is_string(column_type)
        or types.is_large_string(column_type)
        or types.is_string_view(column_type)
        or is_binary(column_type)
    )


def read_batches(path: str, groups: range, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield some row groups of a file, a few rows at a time.

    Transient errors are retried. Raises `DamagedFileError` where the file cannot be decoded.
    """

    def from_start() -> Iterator[pa.RecordBatch]:
        with _open(path) as opened:
            yield from opened.iter_batches(_ROWS_PER_BATCH, row_groups=groups, columns=columns, use_threads=False)

    batches, num_read = from_start(), 0

    def read() -> pa.RecordBatch | None:
        nonlocal batches
        try:
            return next(batches, None)
        except Exception:
            batches = itertools.islice(from_start(), num_read, None)  # without those that were read before
            raise

    while True:
        try:
            batch = with_retries(read, path)
        except (pa.ArrowException, OSError) as error:
            raise DamagedFileError(
                f"{path} is damaged after row group {groups.start} ({_one_line(error)}): fetch it again"
            ) from None
        if batch is None:
            return
        num_read += 1
        yield batch


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


class RowBlock(NamedTuple):
    """Consecutive row groups of a file, from `first_group` to before `end_group`."""

    file: int
    first_group: int
    end_group: int
    first_row: int  # counted over all files
    first_row_in_file: int
    num_rows: int


def _blocks(footers: Sequence[FileFooter], min_rows: int) -> list[RowBlock]:
    """Divide the files into blocks of at least `min_rows` rows, fewer at a file's end."""
    blocks, file_start = [], 0
    for file, footer in enumerate(footers):
        first_group, first_row, row = 0, 0, 0
        for group, size in enumerate(footer.group_rows):
            row += size
            if row - first_row >= min_rows or group == len(footer.group_rows) - 1:
                block = RowBlock(file, first_group, group + 1, file_start + first_row, first_row, row - first_row)
                blocks.append(block)
                first_group, first_row = group + 1, row
        file_start += row
    return blocks


class ParquetSource(Source):
    """Source of Parquet rows, each a document of any length: of text, or of tokens and the labels beside them.

    A row of `sequence_length` tokens is a sequence; a longer one is split, shorter ones are packed one after another,
    as all documents are. The label of a token is made from the column beside `input_ids`:

    * `labels`, as Hugging Face has it: the label of the next token of the row;
    * `label`: the stored one;
    * `attention_mask` alone: the next token of the row, where both are attended to;
    * none: the next token of the row.

    A label of -100 is out of the loss. Without `label`, so is the last token of a row, and sequences at a
    row's end are left out if they are padding alone: without a label, or not attended to. What `attention_mask` leaves
    out comes behind the tokens of its row, wherever it stood, and no token attends to it.

    Shard i of N is the i-th N-th of the rows in the epoch's order of blocks: consecutive row groups of together at
    least `shuffle_buffer` rows (a single group where it is larger), which are shuffled anew in every epoch. A block is
    never as a whole in memory. Rows are shuffled within windows of `shuffle_buffer`; 1 keeps the order of the files.
    """

    chunk_size = 16

    def __init__(
        self,
        options: SourceOptions,
        files: Sequence[str],
        part: str,
        sequence_length: int,
        vocab_size: int | None,
    ):
        super().__init__(options, files, part)
        self._footers = read_footers(files, options.text_column)
        self._converters = [
            RowConverter(file, footer.columns, footer.columns == (options.text_column,), sequence_length, vocab_size)
            for file, footer in zip(files, self._footers, strict=True)
        ]
        texts, tokens = ([c.path for c in self._converters if c.is_text is text] for text in (True, False))
        if texts and tokens:
            raise UserError(
                f"{self.name} holds text in {texts[0]} and tokens in {tokens[0]}: give files of one of them"
            )
        self.num_columns = 1 if texts else 2
        self._blocks = _blocks(self._footers, options.shuffle_buffer)
        rows = sum(block.num_rows for block in self._blocks)
        if rows < (1 if part == "all" else 2):
            raise UserError(
                f"{self.name} holds {rows} rows: give {options.beside('validation_path')} or more rows"
                if rows
                else f"{self.name} holds Parquet files without a row"
            )
        self._hold_out = HoldOut(rows, part)
        # Rows of each block that belong to the part.
        self._part_rows = np.array([self._count_part(block.first_row, block.num_rows) for block in self._blocks])
        self._total = int(self._part_rows.sum())

    @functools.cached_property
    def fingerprint(self) -> dict[str, int | str]:
        facts: dict[str, int | str] = {"kind": "parquet"}
        if self.num_columns == 1:
            facts["text column"] = self.options.text_column
        return facts | {
            "files": len(self.files),
            "rows": self._hold_out.count,
            "documents": self._total,
            "names and sizes": self.options.digest(zip(self.files, self._footers, strict=True)),
            **versions_fact(self.files),
        }

    def _count_part(self, first_row: int, num_rows: int) -> int:
        return self._hold_out.count_before(first_row + num_rows) - self._hold_out.count_before(first_row)

    def count_documents(self, limit: int) -> int:
        """Count rows and read the first one, so that ids outside the vocabulary may be found at once."""
        if self._total >= limit:
            next(self.rows(np.arange(len(self._blocks)), 0))
        return min(limit, self._total)

    def open_shard(self, epoch: int, shard: int, num_shards: int, seek_hint: tuple[int, ...]) -> "ParquetEpochShard":
        count, seed, window_size = len(self._blocks), self.options.seed, self.options.shuffle_buffer
        order = seeded_permutation(count, seed, epoch) if window_size > 1 else np.arange(count)
        start, stop = (k * self._total // num_shards for k in (shard, shard + 1))
        return ParquetEpochShard(self, order, start, stop, window_size, (seed, epoch, shard, num_shards))

    def rows(self, order: np.ndarray, start: int) -> Iterator[Any]:
        """The part's rows of the blocks in `order`, from row number `start` of these on: see `RowConverter.rows`."""
        ends = np.cumsum(self._part_rows[order])
        first = int(np.searchsorted(ends, start, side="right"))
        skip = start - int(ends[first] - self._part_rows[order[first]])
        for block in order[first:]:
            yield from self._block_rows(block, skip)
            skip = 0

    def _block_rows(self, number: int, skip: int) -> Iterator[Any]:
        """The part's rows of a block from number `skip` on; a few at a time are in memory.

        Where the file is damaged, the rest of the block's rows are empty, so that all rows keep their numbers.
        """
        block = self._blocks[number]
        converter, group, row = self._converters[block.file], block.first_group, block.first_row
        left = int(self._part_rows[number]) - skip
        for size in self._footers[block.file].group_rows[block.first_group : block.end_group]:
            inside = self._count_part(row, size)
            if inside > skip:
                break
            group, row, skip = group + 1, row + size, skip - inside  # no row of this group is wanted
        try:
            for batch in read_batches(converter.path, range(group, block.end_group), converter.columns):
                mask = self._hold_out.mask(row, row + batch.num_rows)
                rows = converter.rows(batch, row - block.first_row + block.first_row_in_file)
                row += batch.num_rows
                for k in np.flatnonzero(mask)[skip:].tolist():
                    left -= 1
                    yield rows[k]
                skip = max(0, skip - int(mask.sum()))
        except DamagedFileError as error:
            log_once(f"warning: {error}; the rest of these rows is left out")
            for _ in range(left):
                yield converter.empty_row


class ParquetEpochShard(WindowShuffledShard):
    """Rows `start` to `stop` - 1 of a source's rows in an order of blocks."""

    def __init__(
        self,
        source: ParquetSource,
        order: np.ndarray,
        start: int,
        stop: int,
        window_size: int,
        key: tuple[int, ...],
    ):
        super().__init__(window_size, key)
        self._source, self._order, self._start, self._stop = source, order, start, stop
        self._rows: Any = None
        self._next_row = -1  # number of the row that `_rows` yields next

    def read_window(self, window: int) -> list[Any]:
        start = min(self._start + window * self._window_size, self._stop)
        stop = min(start + self._window_size, self._stop)
        if start == stop:
            return []
        if start != self._next_row:
            self.close()
            self._rows = self._source.rows(self._order, start)
        self._next_row = stop
        return [next(self._rows) for _ in range(start, stop)]

    def close(self) -> None:
        if self._next_row >= 0:
            self._rows.close()
