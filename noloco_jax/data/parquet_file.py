"""One Parquet file: its footer, and batches of its rows."""

import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from noloco_jax.data.reading import READ_AT_ONCE, DamagedFileError
from noloco_jax.errors import UserError
from noloco_jax.storage.addresses import is_remote, path_or_file, remote_facts
from noloco_jax.storage.retries import with_retries

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

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
def _decoded_footer(path: str, version: int | str) -> "pq.FileMetaData":
    import pyarrow.parquet as pq

    return _decoding(path, lambda: pq.read_metadata(path_or_file(path, read_ahead=False)))


def _open(path: str) -> "pq.ParquetFile":
    import pyarrow.parquet as pq

    version = remote_facts(path).version if is_remote(path) else with_retries(lambda: os.stat(path).st_mtime_ns, path)
    footer = _decoded_footer(path, version)
    buffer_bytes = _REMOTE_BUFFER_BYTES if is_remote(path) else _COLUMN_BUFFER_BYTES

    def read() -> "pq.ParquetFile":
        file = path_or_file(path, read_ahead=False)
        return pq.ParquetFile(
            file, metadata=footer, pre_buffer=False, buffer_size=buffer_bytes, page_checksum_verification=True
        )

    return _decoding(path, read)


def _decoding(path: str, read: Callable[[], T]) -> T:
    """Call `read` with retries and return its result; `DamagedFileError` for bytes that cannot be decoded."""
    import pyarrow as pa

    try:
        return with_retries(read, path)
    except (pa.ArrowException, OSError) as error:
        raise DamagedFileError(f"{path} is no readable Parquet file ({_one_line(error)}): fetch it again") from None


def choose_columns(path: str, schema: "pa.Schema", text_column: str) -> tuple[str, ...]:
    """Choose the columns of a file to read: `input_ids` and what its labels are made from, or the one of text.

    Tokens with labels or a mask come before a column `text` beside them, those alone after it. A text column of another
    name is read whatever there is.

    Raises `UserError` if there are none of these types.
    """
    kinds = dict(zip(schema.names, schema.types, strict=True))
    has_text = text_column in kinds and _is_text(kinds[text_column])
    if text_column == _USUAL_TEXT_COLUMN:
        names = ("input_ids", "labels", "label", "attention_mask")
        lists = [name for name in names if name in kinds and _lists_integers(kinds[name])]
        if lists[:1] == ["input_ids"] and (len(lists) > 1 or not has_text):
            return *lists[:2], *(name for name in lists[2:] if name == "attention_mask")
    if has_text:
        return (text_column,)
    raise UserError(
        f"{path} has the columns {', '.join(f'{name} ({kind})' for name, kind in kinds.items())}: expected strings in "
        f"{text_column!r} (data.text_column names another), or lists of integers in input_ids, and perhaps in labels "
        "(equal to them, as Hugging Face has it), label (the ids that follow) or attention_mask"
    )


def _lists_integers(kind: "pa.DataType") -> bool:
    import pyarrow.types as types

    listed = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return listed and (types.is_integer(kind.value_type) or types.is_boolean(kind.value_type))


def _is_text(kind: "pa.DataType") -> bool:
    import pyarrow.types as types

    if types.is_dictionary(kind):
        kind = kind.value_type
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind) or is_binary(kind)


def is_binary(kind: "pa.DataType") -> bool:
    """Return True for strings of bytes, which writers that do not mark text as such leave."""
    import pyarrow.types as types

    return types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)


def read_batches(path: str, groups: range, columns: Sequence[str]) -> Iterator["pa.RecordBatch"]:
    """Yield some row groups of a file, a few rows at a time.

    Transient errors are retried. Raises `DamagedFileError` where the file cannot be decoded.
    """
    import pyarrow as pa

    def from_start() -> "Iterator[pa.RecordBatch]":
        with _open(path) as opened:
            yield from opened.iter_batches(_ROWS_PER_BATCH, row_groups=groups, columns=columns, use_threads=False)

    batches, num_read = from_start(), 0

    def read() -> "pa.RecordBatch | None":
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
