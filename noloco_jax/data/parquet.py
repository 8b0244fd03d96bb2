"""Rows of Parquet files as documents: tokens, or text to be tokenized."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from noloco_jax.data.find_files import HoldOut
from noloco_jax.data.parquet_file import FileFooter, read_batches, read_footers
from noloco_jax.data.parquet_rows import RowConverter
from noloco_jax.data.reading import DamagedFileError, tell_once, versions_fact
from noloco_jax.data.source import Source, SourceOptions, WindowShuffledShard, seeded_permutation
from noloco_jax.errors import UserError


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
            tell_once(f"warning: {error}; the rest of these rows is left out")
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
