"""Tokenized rows in Parquet files."""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from noloco_jax.data.parquet_rows import RowConverter, label_column
from noloco_jax.data.shuffle import WindowShuffledShard, seeded_permutation
from noloco_jax.data.source import SourceOptions
from noloco_jax.data.splits import HoldOut
from noloco_jax.errors import UserError

if TYPE_CHECKING:
    import pyarrow.parquet as pq

_ROWS_PER_BATCH = 128
_COLUMN_BUFFER_BYTES = 1 << 20  # without it pyarrow holds whole row groups in memory


def find_parquet_files(path: str, field: str) -> list[str]:
    """The sorted *.parquet files of a folder, or the one file that `path` is."""
    root = Path(path).expanduser()
    if root.is_file():
        return [str(root)]
    if not root.is_dir():
        raise UserError(f"{field}={path!r}: there is no such file or folder")
    files = sorted(str(file) for file in root.glob("*.parquet"))
    if not files:
        raise UserError(f"{field}={path!r} holds no file *.parquet")
    return files


def _open(path: str) -> "pq.ParquetFile":
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path, pre_buffer=False, buffer_size=_COLUMN_BUFFER_BYTES)
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path} is no readable Parquet file ({reason}): fetch it again") from None


class FileFooter(NamedTuple):
    """What a file's footer says: its label column, and the number of rows of each row group."""

    label_column: str
    group_rows: tuple[int, ...]


@functools.cache
def _read_footer(path: str, modified: int, size: int) -> FileFooter:
    """The footer of a file, read once for all replicas of a process."""
    with _open(path) as opened:
        groups = range(opened.num_row_groups)
        return FileFooter(
            label_column(path, opened.schema_arrow), tuple(opened.metadata.row_group(g).num_rows for g in groups)
        )


class RowBlock(NamedTuple):
    """Consecutive row groups of a file, from `first_group` to before `end_group`."""

    file: int
    first_group: int
    end_group: int
    first_row: int  # counted over all files
    num_rows: int


def _blocks(footers: Sequence[FileFooter], min_rows: int) -> list[RowBlock]:
    """Divides the files into blocks of at least `min_rows` rows, fewer at a file's end."""
    blocks = []
    first_row = 0
    for file, footer in enumerate(footers):
        first_group, num_rows = 0, 0
        for group, size in enumerate(footer.group_rows):
            num_rows += size
            if num_rows >= min_rows or group == len(footer.group_rows) - 1:
                blocks.append(RowBlock(file, first_group, group + 1, first_row, num_rows))
                first_group, first_row, num_rows = group + 1, first_row + num_rows, 0
    return blocks


class ParquetSource:
    """Every row is a document of tokens and the labels beside them, whatever its length.

    A row of `sequence_length` tokens is a sequence; a longer one is split, shorter ones are packed one after another,
    as all documents are. With the columns `input_ids` and `label` the labels are the stored ones. With `input_ids` and
    `attention_mask` the label is the next token of the row, where both are attended to; padding and the last token of
    a row are out of the loss, and sequences of padding alone at a row's end are left out.

    Shard i of N is the i-th N-th of the rows in the epoch's order of blocks: consecutive row groups of together at
    least `shuffle_buffer` rows (a single group where it is larger), which are shuffled anew in every epoch. A block is
    never as a whole in memory. Rows are shuffled within windows of `shuffle_buffer`; 1 keeps the order of the files.
    """

    num_columns = 2
    chunk_size = 16

    def __init__(self, options: SourceOptions, sequence_length: int, vocab_size: int | None):
        self._options = options
        files = find_parquet_files(options.path, options.field)
        footers = []
        for file in files:
            stat = Path(file).stat()
            footers.append(_read_footer(file, stat.st_mtime_ns, stat.st_size))
        self._converters = [
            RowConverter(file, footer.label_column, sequence_length, vocab_size)
            for file, footer in zip(files, footers, strict=True)
        ]
        self._blocks = _blocks(footers, options.shuffle_buffer)
        rows = sum(block.num_rows for block in self._blocks)
        if rows < (1 if options.split == "all" else 2):
            raise UserError(
                f"{options.name} holds {rows} rows: give data.validation_path or more rows"
                if rows
                else f"{options.name} holds Parquet files without a row"
            )
        self._hold_out = HoldOut(rows, options.split)
        # Rows of each block that belong to the split.
        self._split_rows = np.array([self._count_split(block.first_row, block.num_rows) for block in self._blocks])
        self._total = int(self._split_rows.sum())
        self.fingerprint: dict[str, int | str] = {
            "kind": "parquet",
            "files": len(files),
            "rows": rows,
            "documents": self._total,
        }

    def _count_split(self, first_row: int, num_rows: int) -> int:
        return self._hold_out.count_before(first_row + num_rows) - self._hold_out.count_before(first_row)

    def check_replicas(self, num_replicas: int) -> None:
        """Also reads a first row, so that ids outside the model's vocabulary may be found at once."""
        if self._total < num_replicas:
            raise UserError(
                f"num_replicas={num_replicas}, but {self._options.name} holds {self._total} training rows: "
                "use fewer replicas or more rows"
            )
        next(self.rows(np.arange(len(self._blocks)), 0))

    def open_shard(self, epoch: int, shard: int, num_shards: int, seek_hint: tuple[int, ...]) -> "ParquetEpochShard":
        count, seed, window_size = len(self._blocks), self._options.seed, self._options.shuffle_buffer
        order = seeded_permutation(count, seed, epoch) if window_size > 1 else np.arange(count)
        start, stop = (k * self._total // num_shards for k in (shard, shard + 1))
        return ParquetEpochShard(self, order, start, stop, window_size, (seed, epoch, shard, num_shards))

    def load(self, records: Sequence[np.ndarray]) -> list[np.ndarray]:
        return list(records)

    def rows(self, order: np.ndarray, start: int) -> Iterator[np.ndarray]:
        """The split's rows of the blocks in `order`, from row number `start` of these on: int32 (2, n) each."""
        ends = np.cumsum(self._split_rows[order])
        first = int(np.searchsorted(ends, start, side="right"))
        skip = start - int(ends[first] - self._split_rows[order[first]])
        for block in order[first:]:
            yield from self._block_rows(self._blocks[block], skip)
            skip = 0

    def _block_rows(self, block: RowBlock, skip: int) -> Iterator[np.ndarray]:
        """The split's rows of a block from number `skip` on; a few at a time are in memory."""
        import pyarrow as pa

        converter, group, row = self._converters[block.file], block.first_group, block.first_row
        path = converter.path
        with _open(path) as opened:
            while skip:  # row groups before the first row wanted are not read
                size = opened.metadata.row_group(group).num_rows
                inside = self._count_split(row, size)
                if inside > skip:
                    break
                group, row, skip = group + 1, row + size, skip - inside
            batches = opened.iter_batches(
                _ROWS_PER_BATCH,
                row_groups=range(group, block.end_group),
                columns=["input_ids", converter.column],
                use_threads=False,
            )
            while True:
                try:
                    batch = next(batches, None)
                except (pa.ArrowException, OSError) as error:
                    reason = " ".join(str(error).split())
                    raise UserError(f"{path} is damaged after row group {group} ({reason}): fetch it again") from None
                if batch is None:
                    return
                mask = self._hold_out.mask(row, row + batch.num_rows)
                row += batch.num_rows
                rows = converter.rows(batch)
                for k in np.flatnonzero(mask).tolist():
                    if skip:
                        skip -= 1
                    else:
                        yield rows[k]


class ParquetEpochShard(WindowShuffledShard):
    """Rows `start` to `stop` - 1 of a source's rows in an order of blocks."""

    seek_hint: tuple[int, ...] = ()

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
        self._rows: Iterator[np.ndarray] = iter(())
        self._next_row = -1  # number of the row that `_rows` yields next

    def read_window(self, window: int) -> list[np.ndarray]:
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
        close = getattr(self._rows, "close", None)
        if close is not None:
            close()
