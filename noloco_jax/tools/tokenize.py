"""Tokenize texts once, to Parquet files, for large data and for runs that read them many times.

    python -m noloco_jax.tokenize --config=configs/c4_125m.py --config.data.path=c4/en --out=tokens --workers=8
    python -m noloco_jax.train --config=configs/c4_125m.py --config.data.kind=parquet --config.data.path=tokens \\
        --workdir=DIR

The texts are those of `data.path` and `data.validation_path`, of any `data.kind`; they go to DIR/train and
DIR/validation. A row is a document in the order of the files: `input_ids` (int32), with BOS and EOS where
`data.add_bos` and `data.add_eos` ask for them, and `attention_mask` (int8), which is 1. Training on them differs from
training on the texts in one thing: a document's last token has no label.

Stopped or killed at any moment, the same command continues after the last whole shard, to the same files. A folder
appears under its name when all its shards are written.
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from noloco_jax.config import TrainConfig, parse_args
from noloco_jax.cores import usable_cores
from noloco_jax.data import check_vocabulary, load_tokenizer
from noloco_jax.data.documents import Loader, ReplicaDocuments, read_documents
from noloco_jax.data.positions import DataPosition, start_position
from noloco_jax.data.run_data import encoder_of, open_source
from noloco_jax.data.source import Source
from noloco_jax.errors import UserError
from noloco_jax.files import check_writable, folder_of_flag, full_disk_reported, one_command_in, write_whole
from noloco_jax.formatting import format_clock, format_count, format_tokens_per_second

SCHEMA = pa.schema([("input_ids", pa.list_(pa.int32())), ("attention_mask", pa.list_(pa.int8()))])
_GROUP_TOKENS = 2**20  # of a row group, which a trainer reads at once
_PROGRESS = b"noloco_jax.tokenize"  # key of the metadata of a file
SETTINGS_FILE = "tokenize.json"
_LOCK_FILE = ".lock"
_INTERRUPTED = 130


@dataclass(frozen=True)
class SplitProgress:
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

    def with_shard(self, shard: "_Shard", position: DataPosition) -> "SplitProgress":
        return SplitProgress(
            position,
            self.shards + 1,
            self.documents + shard.documents,
            self.tokens + shard.tokens,
            self.tokens_now + shard.tokens,
        )


def write_split(
    source: Source, loader: Loader, folder: Path, shard_tokens: int, report: Callable[[SplitProgress], None]
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


def _found(folder: Path) -> SplitProgress:
    """Return the progress that the last file's metadata hold; files are written in order."""
    files = sorted(folder.glob("*.parquet"))
    if not files:
        return SplitProgress(start_position(0, 1))
    told = json.loads(pq.read_metadata(files[-1]).metadata[_PROGRESS])
    return SplitProgress(DataPosition.from_json(told.pop("position")), **told)


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

    def close(self, progress: SplitProgress) -> None:
        """Complete the file, with the progress after it in its metadata."""
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


def main(argv: Sequence[str] | None = None) -> int:
    """Tokenize the training and the validation documents; return the exit status."""
    config, flags = parse_args(argv, __doc__ or "", _define_flags, prog="python -m noloco_jax.tokenize")
    if flags.workers < 0:
        raise UserError(f"--workers={flags.workers} is below 0: it is how many processes tokenize")
    if flags.shard_tokens < 1:
        raise UserError(f"--shard_tokens={flags.shard_tokens} is below 1: it is how many tokens a file holds")
    check_writable(flags.out)
    try:
        with full_disk_reported(flags.out, "the same command continues after the last shard"):
            _tokenize(config, flags.out, flags.workers, flags.shard_tokens)
    except KeyboardInterrupt:
        print("stopped: the same command continues after the last shard", file=sys.stderr)
        return _INTERRUPTED
    return 0


def _define_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", required=True, type=folder_of_flag, metavar="DIR", help="where the files go")
    parser.add_argument(
        "--workers",
        type=int,
        default=len(usable_cores()),
        metavar="N",
        help="processes that tokenize (default: the cores; 0: this one)",
    )
    parser.add_argument(
        "--shard_tokens", type=int, default=2**26, metavar="N", help="tokens of a file (default %(default)s)"
    )


def _tokenize(config: TrainConfig, out: Path, workers: int, shard_tokens: int) -> None:
    data, vocab_size = replace(config.data, shuffle_buffer=1), config.model.vocab_size
    if data.kind == "mixture":
        raise UserError("data.kind='mixture': tokenize each source by itself, and mix the folders of tokens")
    splits = {
        name: open_source(data, validation=name == "validation", seed=0, vocab_size=vocab_size)
        for name in ("train", "validation")
    }
    for source in splits.values():
        if source.num_columns > 1:
            raise UserError(f"{source.name} holds tokens already: train on them as they are")
        source.check_replicas(1)
    tokenizer = load_tokenizer(data.tokenizer)
    check_vocabulary(tokenizer, vocab_size)
    encode = encoder_of(data, tokenizer, vocab_size)
    settings = {
        "data.tokenizer": f"{tokenizer.name} ({tokenizer.fingerprint})",
        "data.add_bos": data.add_bos,
        "data.add_eos": data.add_eos,
        "--shard_tokens": shard_tokens,
        **{f"{split} documents": dict(source.fingerprint) for split, source in splits.items()},
    }
    loader = Loader(splits, encode, workers)
    in_use = f"--out={out} is in use by another tokenize"
    with one_command_in(out, _LOCK_FILE, in_use), contextlib.closing(loader):
        _check_settings(out, settings)
        for split, source in splits.items():
            started = time.monotonic()

            def report(progress: SplitProgress, split: str = split, started: float = started) -> None:
                seconds = time.monotonic() - started
                speed = format_tokens_per_second(progress.tokens_now / seconds)
                print(
                    f"{split}: {progress.shards} files, {format_count(progress.tokens)} tokens of "
                    f"{format_count(progress.documents)} documents, {speed}, {format_clock(seconds)}",
                    flush=True,
                )

            write_split(source, loader, out / split, shard_tokens, report)
    print(f"train with --config.data.kind=parquet --config.data.path={out}")


def _check_settings(out: Path, settings: Mapping[str, Any]) -> None:
    """Raise `UserError` where the folder holds something else; write the settings into a new one."""
    path = out / SETTINGS_FILE
    if not path.exists():
        if any(file.name != _LOCK_FILE for file in out.iterdir()):
            raise UserError(f"--out={out} holds other files: give another folder, or an empty one")
        write_whole(path, json.dumps(settings, indent=1) + "\n")
        return
    there = json.loads(path.read_text(encoding="utf-8"))
    for name in settings | there:
        if settings.get(name) != there.get(name):
            raise UserError(
                f"--out={out} was begun with {name} {there.get(name)!r}, and now it is {settings.get(name)!r}: "
                "give what it was begun with, or another --out"
            )
