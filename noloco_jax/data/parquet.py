"""Tokenized rows in Parquet files.

Shapes: R rows of a batch that pyarrow reads, N tokens of one row.
"""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from noloco_jax.data.order import Selection, Wanted, WindowLane, shuffled
from noloco_jax.data.packing import IGNORED
from noloco_jax.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_ROWS_AT_ONCE = 128
_BYTES_AT_ONCE = 1 << 20  # of a column; without, pyarrow holds whole row groups


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
        return pq.ParquetFile(path, pre_buffer=False, buffer_size=_BYTES_AT_ONCE)
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path} is no readable Parquet file ({reason}): fetch it again") from None


def _target_column(path: str, schema: "pa.Schema") -> str:
    """The column beside `input_ids`: `label` or `attention_mask`."""
    import pyarrow.types as types

    for name in ("label", "attention_mask"):
        if {"input_ids", name} <= set(schema.names):
            for column in ("input_ids", name):
                kind = schema.field(column).type
                listed = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
                if not (listed and (types.is_integer(kind.value_type) or types.is_boolean(kind.value_type))):
                    raise UserError(f"{path}: column {column!r} is {kind}; it must be a list of integers")
            return name
    raise UserError(
        f"{path} has the columns {', '.join(schema.names)}: expected input_ids and label (the ids that follow), "
        "or input_ids and attention_mask"
    )


@functools.cache
def _layout(path: str, modified: int, size: int) -> tuple[str, tuple[int, ...]]:
    """(column beside `input_ids`, rows of each row group); read once for all replicas of a process."""
    with _open(path) as opened:
        target = _target_column(path, opened.schema_arrow)
        return target, tuple(opened.metadata.row_group(g).num_rows for g in range(opened.num_row_groups))


class ParquetSource:
    """Every row is a document of tokens and the labels beside them, whatever its length.

    A row of `sequence_length` tokens is a sequence; a longer one is split, shorter ones are packed one after another,
    as all documents are. With the columns `input_ids` and `label` the labels are the stored ones. With `input_ids` and
    `attention_mask` the label is the next token of the row, where both are attended to; padding and the last token of
    a row are out of the loss, and sequences of padding alone at a row's end are left out.

    Lane i of N is the i-th N-th of the rows, in the epoch's order of *units*: consecutive row groups of together at
    least `shuffle_buffer` rows (a single one where it is larger), shuffled anew in every epoch, never a unit at once in
    memory. Rows are shuffled within windows of `shuffle_buffer`; 1 keeps the files' order.
    """

    columns = 2
    chunk = 16

    def __init__(self, wanted: Wanted, sequence_length: int, vocab_size: int | None):
        self._wanted, self._sequence_length, self._vocab_size = wanted, sequence_length, vocab_size
        self._files = find_parquet_files(wanted.path, wanted.field)
        self._targets, units, rows = [], [], 0
        for number, file in enumerate(self._files):
            stat = Path(file).stat()
            target, groups = _layout(file, stat.st_mtime_ns, stat.st_size)
            self._targets.append(target)
            begin, held = 0, 0
            for g, size in enumerate(groups):
                held += size
                if held >= wanted.shuffle_buffer or g == len(groups) - 1:
                    units.append((number, begin, g + 1, rows, held))
                    begin, rows, held = g + 1, rows + held, 0
        if rows < (1 if wanted.split == "all" else 2):
            raise UserError(
                f"{wanted.name} holds {rows} rows: give data.validation_path or more rows"
                if rows
                else f"{wanted.name} holds Parquet files without a row"
            )
        self._selection = Selection(rows, wanted.split)
        self._units = np.array(units)  # file, first row group, behind the last, first row, rows
        first, count = self._units[:, 3], self._units[:, 4]
        self._selected = self._selection.before(first + count) - self._selection.before(first)
        self._total = int(self._selected.sum())
        self.summary: dict[str, int | str] = {
            "kind": "parquet",
            "files": len(self._files),
            "rows": rows,
            "documents": self._total,
        }

    def check_replicas(self, num_replicas: int) -> None:
        """Also reads a first row, so that ids outside the model's vocabulary may be found at once."""
        if self._total < num_replicas:
            raise UserError(
                f"num_replicas={num_replicas}, but {self._wanted.name} holds {self._total} training rows: "
                "use fewer replicas or more rows"
            )
        next(self.rows(np.arange(len(self._units)), 0))

    def lane(self, epoch: int, lane: int, lanes: int, anchor: tuple[int, ...]) -> "ParquetLane":
        count, seed, size = len(self._units), self._wanted.seed, self._wanted.shuffle_buffer
        order = shuffled(count, seed, epoch) if size > 1 else np.arange(count)
        begin, end = lane * self._total // lanes, (lane + 1) * self._total // lanes
        return ParquetLane(self, order, begin, end, size, (seed, epoch, lane, lanes))

    def load(self, documents: Sequence[np.ndarray]) -> list[np.ndarray]:
        return list(documents)

    def rows(self, order: np.ndarray, start: int) -> Iterator[np.ndarray]:
        """The split's rows, int32 (2, N) each, of the units in `order`, from number `start` on."""
        behind = np.cumsum(self._selected[order])
        at = int(np.searchsorted(behind, start, side="right"))
        skip = start - int(behind[at] - self._selected[order[at]])
        for unit in order[at:]:
            yield from self._unit_rows(unit, skip)
            skip = 0

    def _unit_rows(self, unit: int, skip: int) -> Iterator[np.ndarray]:
        """The split's rows of a unit from number `skip` on, a few at a time."""
        import pyarrow as pa

        file, begin, end, row, _ = self._units[unit].tolist()
        path, target = self._files[file], self._targets[file]
        before = self._selection.before
        with _open(path) as opened:
            while skip:  # row groups that hold none of the rows wanted are not read
                size = opened.metadata.row_group(begin).num_rows
                inside = before(row + size) - before(row)
                if inside > skip:
                    break
                begin, row, skip = begin + 1, row + size, skip - inside
            batches = opened.iter_batches(
                _ROWS_AT_ONCE, row_groups=range(begin, end), columns=["input_ids", target], use_threads=False
            )
            while True:
                try:
                    batch = next(batches, None)
                except (pa.ArrowException, OSError) as error:
                    reason = " ".join(str(error).split())
                    raise UserError(f"{path} is damaged behind row group {begin} ({reason}): fetch it again") from None
                if batch is None:
                    return
                mask = self._selection.mask(row, row + batch.num_rows)
                row += batch.num_rows
                rows = self._split(path, target, batch)
                for k in np.flatnonzero(mask).tolist():
                    if skip:
                        skip -= 1
                    else:
                        yield rows[k]

    def _split(self, path: str, target: str, batch: "pa.RecordBatch") -> list[np.ndarray]:
        ids_N, lengths_R = _flat(batch.column("input_ids"))
        other_N, other_lengths_R = _flat(batch.column(target))
        if not np.array_equal(lengths_R, other_lengths_R):
            k = int(np.flatnonzero(lengths_R != other_lengths_R)[0])
            raise UserError(
                f"{path}: a row has {lengths_R[k]} input_ids and {other_lengths_R[k]} values in {target}: "
                "write the file again with as many of one as of the other"
            )
        ends_R = np.cumsum(lengths_R)
        starts_R = ends_R - lengths_R
        keep_R = lengths_R
        if target == "label":
            labels_N = other_N
        else:
            real_N = other_N != 0
            labels_N = np.full_like(ids_N, IGNORED)
            scored_N = real_N[:-1] & real_N[1:]
            scored_N[ends_R[(ends_R > 0) & (ends_R < len(ids_N))] - 1] = False  # what follows is another row
            labels_N[:-1][scored_N] = ids_N[1:][scored_N]
            keep_R = self._without_padding(real_N, starts_R, lengths_R)
        self._check_ids(path, ids_N, labels_N)
        rows_2N = np.stack([ids_N, labels_N])
        return [rows_2N[:, start : start + keep] for start, keep in zip(starts_R, keep_R, strict=True)]

    def _without_padding(self, real_N: np.ndarray, starts_R: np.ndarray, lengths_R: np.ndarray) -> np.ndarray:
        """Lengths of the rows up to the end of the sequence that holds their last real token."""
        last_N = np.where(real_N, np.arange(1, len(real_N) + 1), 0)
        used_R = np.zeros_like(lengths_R)
        some_R = lengths_R > 0
        used_R[some_R] = np.maximum.reduceat(last_N, starts_R[some_R]) if some_R.any() else 0
        used_R = np.maximum(0, used_R - starts_R)
        return np.minimum(lengths_R, -(-used_R // self._sequence_length) * self._sequence_length)

    def _check_ids(self, path: str, ids_N: np.ndarray, labels_N: np.ndarray) -> None:
        if not len(ids_N):
            return
        smallest, largest = int(ids_N.min()), int(max(ids_N.max(), labels_N.max()))
        if smallest < 0:
            raise UserError(f"{path}: input_ids holds {smallest}; token ids are not negative")
        negative = labels_N[(labels_N < 0) & (labels_N != IGNORED)]
        if len(negative):
            raise UserError(
                f"{path}: label holds {int(negative[0])}, which is neither a token id nor {IGNORED}, the label that is "
                f"out of the loss: write {IGNORED} where nothing is to be predicted"
            )
        if self._vocab_size is not None and largest >= self._vocab_size:
            raise UserError(
                f"{path} holds token id {largest}, but model.vocab_size={self._vocab_size}: "
                f"set model.vocab_size to at least {largest + 1}"
            )


def _flat(column: Any) -> tuple[np.ndarray, np.ndarray]:
    """(values of all rows as int32, length of each row) of a list column; a missing list is an empty one."""
    import pyarrow.compute as pc

    values = column.flatten().to_numpy(zero_copy_only=False).astype(np.int32, copy=False)
    lengths = pc.call_function("list_value_length", [column]).fill_null(0)
    return values, lengths.to_numpy(zero_copy_only=False).astype(np.int64)


class ParquetLane(WindowLane):
    """Rows `begin` to `end` of a source's rows in an order of units."""

    anchor: tuple[int, ...] = ()

    def __init__(self, source: ParquetSource, order: np.ndarray, begin: int, end: int, size: int, key: tuple[int, ...]):
        super().__init__(size, key)
        self._source, self._order, self._begin, self._end = source, order, begin, end
        self._rows: Iterator[np.ndarray] = iter(())
        self._row = -1  # which one comes next

    def read_window(self, window: int) -> list[np.ndarray]:
        start = min(self._begin + window * self._size, self._end)
        stop = min(start + self._size, self._end)
        if start == stop:
            return []
        if start != self._row:
            self.close()
            self._rows = self._source.rows(self._order, start)
        self._row = stop
        return [next(self._rows) for _ in range(start, stop)]

    def close(self) -> None:
        close = getattr(self._rows, "close", None)
        if close is not None:
            close()
