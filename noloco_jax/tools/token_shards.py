"""Shards of tokenized documents: Parquet files, written one after another, each whole or not at all.

Shapes: R rows of a file.
"""

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from noloco_jax.data.documents import Loader, ReplicaDocuments, read_documents
from noloco_jax.data.positions import DataPosition, start_position
from noloco_jax.data.source import Source

SCHEMA = pa.schema([("input_ids", pa.list_(pa.int32())), ("attention_mask", pa.list_(pa.int8()))])
_GROUP_TOKENS = 2**20  # of a row group, which a trainer reads at once
_PROGRESS = b"noloco_jax.tokenize"  # key of the metadata of a file


@dataclass(frozen=True)
class Progress:
    """Contents of the files of a split.

    Attributes:
      position: position in the source after them.
      shards, documents, tokens: numbers of files, documents that are not empty, and their tokens.
      tokens_now: tokens since the command began.
    """

    position: DataPosition
    shards: int = 0
    documents: int = 0
    tokens: int = 0
    tokens_now: int = 0

    def with_shard(self, shard: "_Shard", position: DataPosition) -> "Progress":
        return Progress(
            position,
            self.shards + 1,
            self.documents + shard.documents,
            self.tokens + shard.tokens,
            self.tokens_now + shard.tokens,
        )


def write_split(
    source: Source, loader: Loader, folder: Path, shard_tokens: int, report: Callable[[Progress], None]
) -> None:
    """Write all documents of a source in their order, after the files that are there already.

    The files are in a hidden folder, which readers leave out, until all are there.

    Args:
      source: texts, in the order of the files.
      loader: tokenizes them, under the folder's name.
      folder: the folder to be.
      shard_tokens: a file ends with the document that reaches so many tokens.
      report: receives the progress at the start, where some files are there, and after every file.
    """
    if folder.exists():
        return
    unfinished = folder.with_name(f".{folder.name}")
    unfinished.mkdir(exist_ok=True)
    progress = _found(unfinished)
    if progress.shards:
        report(progress)
    documents = ReplicaDocuments(folder.name, source, 0, 1)
    shard = None
    with closing(read_documents(documents, progress.position, loader)) as tokenized:
        for document_1N, position in tokenized:
            is_over = position.epoch > 0
            if shard is not None and (is_over or shard.tokens >= shard_tokens):
                progress = progress.with_shard(shard, position)
                shard.close(progress)
                shard = None
                report(progress)
            if is_over:
                break
            if document_1N.size:
                shard = shard or _Shard(unfinished / f"{progress.shards:05}.parquet")
                shard.add(document_1N[0])
    unfinished.rename(folder)


def _found(folder: Path) -> Progress:
    """Return the progress as the last file tells it; files are written in order."""
    files = sorted(folder.glob("*.parquet"))
    if not files:
        return Progress(start_position(0, 1))
    told = json.loads(pq.read_metadata(files[-1]).metadata[_PROGRESS])
    return Progress(DataPosition.from_json(told.pop("position")), **told)


class _Shard:
    """A file that is being written, under another name until it is whole."""

    def __init__(self, path: Path):
        self._path, self._unfinished = path, path.with_suffix(".tmp")
        self._writer = pq.ParquetWriter(self._unfinished, SCHEMA, compression="zstd")
        self._rows: list[np.ndarray] = []
        self._tokens_in_rows = self.documents = self.tokens = 0

    def add(self, ids_N: np.ndarray) -> None:
        self._rows.append(ids_N)
        self._tokens_in_rows += len(ids_N)
        self.tokens += len(ids_N)
        self.documents += 1
        if self._tokens_in_rows >= _GROUP_TOKENS:
            self._write_group()

    def close(self, progress: Progress) -> None:
        """Complete the file, which tells the progress after it."""
        self._write_group()
        told = {"position": progress.position.to_json()}
        told |= {name: getattr(progress, name) for name in ("shards", "documents", "tokens")}
        self._writer.add_key_value_metadata({_PROGRESS: json.dumps(told)})
        self._writer.close()
        self._unfinished.replace(self._path)

    def _write_group(self) -> None:
        if not self._rows:
            return
        offsets_R = np.cumsum([0, *map(len, self._rows)], dtype=np.int32)
        ids_N = np.concatenate(self._rows)
        columns = [pa.ListArray.from_arrays(offsets_R, values) for values in (ids_N, np.ones(len(ids_N), np.int8))]
        table = pa.Table.from_arrays(columns, schema=SCHEMA)
        self._writer.write_table(table, row_group_size=len(self._rows))
        self._rows, self._tokens_in_rows = [], 0
