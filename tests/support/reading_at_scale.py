"""Cost of starting and resuming on many and on large files: PYTHONPATH=.:tests python -m support.reading_at_scale

Prints seconds of CPU and of wall clock: of opening a source and the streams of all replicas, and of going to the last
shuffle window of a large file from its saved position. With `--s3` large files are read as objects too.
"""

import argparse
import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from isal import igzip

from noloco_jax.config import DataConfig
from noloco_jax.data import ByteTokenizer, train_stream
from noloco_jax.data.from_config import open_source

TEXT_BYTES = 2300  # of a document, as in C4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=1024)
    parser.add_argument("--row_groups", type=int, default=98, help="of a Parquet file")
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--documents", type=int, default=354_000, help="of the large file of lines")
    parser.add_argument("--s3", action="store_true", help="read the large files from a server on loopback too")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if args.s3:
            stack.enter_context(objects_in(folder))
        for kind in ("parquet", "c4"):
            make = make_rows if kind == "parquet" else make_c4
            make(folder / kind, args.files, args.row_groups)
            config = DataConfig(kind=kind, path=str(folder / kind), sequence_length=64)
            spent, _ = measured(lambda config=config: open_source(config, ByteTokenizer(), **TRAINING))
            print(f"{kind}, {args.files} files: open_source {spent}", flush=True)
            spent, streams = measured(lambda config=config: open_streams(config, args.replicas))
            print(f"{kind}, {args.files} files: {args.replicas} streams {spent}", flush=True)
            spent, _ = measured(lambda streams=streams: [next(stream) for stream in streams])
            print(f"{kind}, {args.files} files: their first batches {spent}", flush=True)
            for stream in streams:
                stream.close()
        for name in ("jsonl", "jsonl.gz", "jsonl.zst", "parquet"):
            file = folder / "large" / f"0.{name}"
            file.parent.mkdir(exist_ok=True)
            (make_tokens if name == "parquet" else make_lines)(file, args.documents)
            size = f"{file.name}, {file.stat().st_size >> 20} MiB"
            for where, path in {"disk": str(file), "S3": f"s3://large/{file.name}" if args.s3 else ""}.items():
                if not path:
                    continue
                for what, spent in zip(("read through", "resumed at the end"), resuming(path), strict=True):
                    print(f"{size}, {where}: {what} {spent}", flush=True)
            file.unlink()


_SERVE = """
import sys, time
from pathlib import Path
from support.stores import Web
server = Web()
server.upload(Path(sys.argv[1]))
print(server.address, flush=True)
time.sleep(1e6)
"""


@contextlib.contextmanager
def objects_in(folder: Path) -> Iterator[None]:
    """Serve the folders in `folder` as buckets, in a process that shares no lock with this one.

    moto does not do here: it copies a whole object for every part that is asked for.
    """
    command = [sys.executable, "-c", _SERVE, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        os.environ |= {"AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
        try:
            yield
        finally:
            server.kill()


TRAINING: dict[str, Any] = {"validation": False, "seed": 0, "vocab_size": None}


class Spent(NamedTuple):
    """Seconds that something took."""

    cpu: float
    wall: float

    def __str__(self) -> str:
        return f"{self.cpu:.3f} s of CPU, {self.wall:.3f} s"


def measured(work: Callable[[], Any]) -> tuple[Spent, Any]:
    cpu, wall = time.process_time(), time.perf_counter()
    result = work()
    return Spent(time.process_time() - cpu, time.perf_counter() - wall), result


def open_streams(config: DataConfig, count: int) -> list[Any]:
    return [train_stream(config, ByteTokenizer(), replica=k, num_replicas=count, seed=0) for k in range(count)]


def resuming(path: str) -> tuple[Spent, Spent]:
    """(of reading all windows, of going to the last one from its position)."""
    kind = "parquet" if path.endswith(".parquet") else "jsonl"
    config = DataConfig(kind=kind, path=path, validation_path="elsewhere")
    source = open_source(config, ByteTokenizer(), **TRAINING)
    last, hint = 0, ()

    def walk() -> None:
        nonlocal last, hint
        shard = source.open_shard(0, 0, 1, ())
        while shard.get(last + config.shuffle_buffer) is not None:
            last, hint = last + config.shuffle_buffer, shard.seek_hint
        shard.close()

    through, _ = measured(walk)
    return through, measured(lambda: source.open_shard(0, 0, 1, hint).get(last))[0]


def make_rows(folder: Path, files: int, row_groups: int) -> None:
    folder.mkdir()
    rows, length = 8, 64
    tokens = np.random.default_rng(0).integers(0, 32_000, row_groups * rows * length, dtype=np.int32)
    column = pa.ListArray.from_arrays(np.arange(0, len(tokens) + 1, length).astype(np.int32), tokens)
    for number in range(files):
        table = pa.table({"input_ids": column, "labels": column})
        pq.write_table(table, folder / f"train-{number:05d}.parquet", row_group_size=rows)


def make_tokens(file: Path, documents: int) -> None:
    """Rows of 1024 tokens in groups of 1,000, as many as the lines hold in words of four bytes."""
    rows = max(documents * TEXT_BYTES // 4096, 1)
    tokens = np.random.default_rng(0).integers(0, 32_000, rows * 1024, dtype=np.int32)
    column = pa.FixedSizeListArray.from_arrays(tokens, 1024)
    pq.write_table(pa.table({"input_ids": column, "labels": column}), file, row_group_size=1000)


def make_c4(folder: Path, files: int, _: int) -> None:
    folder.mkdir()
    for split, count in {"train": files, "validation": 1}.items():
        for number in range(count):
            make_lines(folder / f"c4-{split}.{number:05d}-of-{count:05d}.json.gz", 60)


@functools.cache
def some_lines(documents: int) -> list[bytes]:
    """Documents of words, some of them frequent."""
    rng = np.random.default_rng(0)
    words = ["".join(map(chr, rng.integers(97, 123, rng.integers(2, 9)))) for _ in range(20_000)]
    block = []
    for _ in range(documents):
        chosen = (20_000 * rng.random(TEXT_BYTES // 6) ** 3).astype(int)
        block.append(json.dumps({"text": " ".join(words[k] for k in chosen)}).encode() + b"\n")
    return block


def make_lines(file: Path, documents: int) -> None:
    """A file that is compressed as its name says."""
    block = some_lines(min(documents, 3000))
    opened: Any = open
    if file.suffix == ".gz":
        opened = igzip.open
    elif file.suffix == ".zst":
        opened = lambda path, _: pa.CompressedOutputStream(str(path), "zstd")  # noqa: E731
    with opened(file, "wb") as out:
        for start in range(0, documents, len(block)):
            out.write(b"".join(block[: documents - start]))


if __name__ == "__main__":
    main()
