"""One Parquet file: its footer, and batches of its rows."""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from noloco_jax.data.read_errors import DamagedFileError, read_with_retries
from noloco_jax.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_ROWS_PER_BATCH = 128
_COLUMN_BUFFER_BYTES = 1 << 20  # without it pyarrow holds whole row groups in memory


class FileFooter(NamedTuple):
    """What a file's footer says: the columns to read, the rows and bytes of each row group; and the file's bytes."""

    columns: tuple[str, ...]
    group_rows: tuple[int, ...]
    group_bytes: tuple[int, ...]  # of the values before they were compressed: others have others, as a rule
    file_bytes: int


def read_footer(path: str) -> FileFooter:
    """The footer of a file. Raises `DamagedFileError` if it is no Parquet file, `UserError` for unknown columns."""
    stat = read_with_retries(Path(path).stat, path)
    return _read_footer(path, stat.st_mtime_ns, stat.st_size)


@functools.cache  # for all replicas of a process
def _read_footer(path: str, modified: int, size: int) -> FileFooter:
    with _open(path) as opened:
        groups = [opened.metadata.row_group(group) for group in range(opened.num_row_groups)]
        rows, group_bytes = tuple(g.num_rows for g in groups), tuple(g.total_byte_size for g in groups)
        return FileFooter(choose_columns(path, opened.schema_arrow), rows, group_bytes, size)


def _open(path: str) -> "pq.ParquetFile":
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return read_with_retries(lambda: pq.ParquetFile(path, pre_buffer=False, buffer_size=_COLUMN_BUFFER_BYTES), path)
    except (pa.ArrowException, OSError) as error:
        raise DamagedFileError(f"{path} is no readable Parquet file ({_one_line(error)}): fetch it again") from None


def choose_columns(path: str, schema: "pa.Schema") -> tuple[str, ...]:
    """The columns of a file to read: `input_ids` and what its labels are made from, or `text`.

    Raises `UserError` if there are none, or if they hold something else.
    """
    kinds = {name: schema.field(name).type for name in schema.names}
    beside = [name for name in ("labels", "label", "attention_mask") if name in kinds and "input_ids" in kinds]
    fitting = [name for name in beside if _lists_integers(kinds[name])]
    if fitting and _lists_integers(kinds["input_ids"]):
        return "input_ids", fitting[0]
    if "text" in kinds and _is_text(kinds["text"]):
        return ("text",)
    for column in ("input_ids", *beside) if beside else ():
        if not _lists_integers(kinds[column]):
            raise UserError(f"{path}: column {column!r} is {kinds[column]}; it must be a list of integers")
    raise UserError(
        f"{path} has the columns {', '.join(schema.names)}: expected input_ids and labels (equal to them, as Hugging "
        "Face has it), input_ids and label (the ids that follow), input_ids and attention_mask, or text"
    )


def _lists_integers(kind: "pa.DataType") -> bool:
    import pyarrow.types as types

    listed = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return listed and (types.is_integer(kind.value_type) or types.is_boolean(kind.value_type))


def _is_text(kind: "pa.DataType") -> bool:
    import pyarrow.types as types

    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def read_batches(path: str, groups: range, columns: Sequence[str]) -> Iterator["pa.RecordBatch"]:
    """Some row groups of a file, a few rows at a time.

    Transient errors are retried. Raises `DamagedFileError` where the file cannot be decoded.
    """
    import pyarrow as pa

    opened: pq.ParquetFile | None = None
    batches: Iterator[pa.RecordBatch] = iter(())
    num_read = 0

    def read() -> "pa.RecordBatch | None":
        nonlocal opened, batches
        try:
            if opened is None:
                opened = _open(path)
                batches = opened.iter_batches(_ROWS_PER_BATCH, row_groups=groups, columns=columns, use_threads=False)
                for _ in range(num_read):  # of an earlier attempt
                    next(batches)
            return next(batches, None)
        except Exception:
            close()
            raise

    def close() -> None:
        nonlocal opened
        if opened is not None:
            opened.close()
            opened = None

    try:
        while True:
            try:
                batch = read_with_retries(read, path)
            except (pa.ArrowException, OSError) as error:
                raise DamagedFileError(
                    f"{path} is damaged after row group {groups.start} ({_one_line(error)}): fetch it again"
                ) from None
            if batch is None:
                return
            num_read += 1
            yield batch
    finally:
        close()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
