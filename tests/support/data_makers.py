"""Small data sets for the data tests, and ways to read streams to the end of an epoch."""

import gzip
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from noloco_jax.config import DataConfig, SourceConfig
from noloco_jax.config.schema import Entries
from noloco_jax.data import HostBatch, RunData, Stream
from noloco_jax.data.documents import ReplicaDocuments, read_records
from noloco_jax.data.positions import DataPosition
from noloco_jax.data.run_data import open_source
from noloco_jax.data.source import SourceOptions

OPTIONS = SourceOptions("", "data.path", "train", True, exclude="", seed=0, shuffle_buffer=1, text_column="text")


class CountingTokenizer:
    """The text "17 3" becomes the ids 17, 18, 19: every token of a test's data set can be an id of its own."""

    name = "counting"
    fingerprint = "counting"
    vocab_size = 1_000_000
    bos_id: int | None = 900_000
    eos_id: int | None = 900_001

    def encode(self, text: str) -> np.ndarray:
        first, count = map(int, text.split() or (0, 0))
        return np.arange(first, first + count, dtype=np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return f"{ids[0]} {len(ids)}"


def documents(count: int, seed: int = 0, first: int = 0) -> list[tuple[int, int]]:
    """(first id, tokens) of documents of 1 to 12 tokens, which together hold the ids `first`, `first` + 1, ..."""
    lengths = np.random.default_rng(seed).integers(1, 13, count)
    return list(zip((first + np.cumsum(lengths) - lengths).tolist(), lengths.tolist(), strict=True))


def write_c4(folder: Path, shards: Iterable[Iterable[str]], split: str = "train") -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, texts in enumerate(shards):
        paths.append(folder / f"c4-{split}.{number:05d}-of-99999.json.gz")
        lines = [json.dumps({"text": text, "timestamp": "now", "url": "there"}) + "\n" for text in texts]
        paths[-1].write_bytes(gzip.compress("".join(lines).encode()))
    return paths


def write_json_lines(path: Path, texts: Iterable[str]) -> None:
    """A file of JSON lines, compressed as its name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(texts)).encode()
    path.write_bytes(compressed(content, path.suffix))


def compressed(content: bytes, suffix: str) -> bytes:
    """`content` as a file whose name ends with `suffix` holds it."""
    if suffix == ".zst":
        return pa.Codec("zstd").compress(content, asbytes=True)
    return gzip.compress(content) if suffix == ".gz" else content


def write_texts(folder: Path, texts: Iterable[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number:05d}.txt").write_text(text)


def write_rows(path: Path, columns: Mapping[str, Iterable[Any]], row_group_size: int = 2) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(
        {name: pa.array([list(row) for row in rows], pa.list_(pa.int32())) for name, rows in columns.items()}
    )
    pq.write_table(table, path, row_group_size=row_group_size)


def write_counting(kind: str, folder: Path, count: int, files: int = 3, first: int = 0) -> tuple[DataConfig, int]:
    """A data set of one kind in which every token is an id of its own: (its config, number of tokens to train on).

    Labels of Parquet rows are the id plus one.
    """
    spans = documents(count, first=first)
    texts = [f"{first} {length}" for first, length in spans]
    shares = [list(range(k * count // files, (k + 1) * count // files)) for k in range(files)]
    if kind == "jsonl":
        for number, (share, suffix) in enumerate(zip(shares, itertools.cycle(["", ".gz", ".zst"]))):
            write_json_lines(folder / f"part {number}.jsonl{suffix}", [texts[k] for k in share])
    elif kind == "text":
        write_texts(folder, texts)
    else:
        for number, share in enumerate(shares):
            rows = [range(spans[k][0], sum(spans[k])) for k in share]
            labels = [[token + 1 for token in row] for row in rows]
            write_rows(folder / f"{number}.parquet", {"input_ids": list(rows), "label": labels})
    validation = folder.parent / f"{folder.name}-validation"
    if kind == "text":
        write_texts(validation, ["5 5"])
    elif kind == "jsonl":
        write_json_lines(validation / "0.jsonl", ["5 5"])
    elif kind == "parquet":
        write_rows(validation / "0.parquet", {"input_ids": [[5, 6]], "label": [[6, 7]]})
    config = DataConfig(
        kind=kind,
        path=str(folder),
        validation_path=str(validation),
        add_bos=False,
        add_eos=False,
        sequence_length=3,
        batch_size=2,
        shuffle_buffer=4,
    )
    return config, sum(spans[-1]) - first


# Of a mixture: kind, documents, weight. The ids of source number k begin at `SOURCE_IDS` * k.
SOURCE_IDS = 1000
SOURCES = {
    "books": ("text", 11, 1.0),
    "code": ("parquet", 14, 1.5),
    "own": ("jsonl", 23, 2.5),
    "web": ("jsonl", 40, 5.0),
}


def write_mixture(folder: Path) -> tuple[DataConfig, dict[str, int]]:
    """A mixture of four sources in which every token is an id of its own: (its config, tokens to train on by group)."""
    counts, sources, config = {}, {}, DataConfig()
    for k, (name, (kind, number, weight)) in enumerate(SOURCES.items()):
        config, counts[f"data.mixture.{name}"] = write_counting(kind, folder / name, number, first=SOURCE_IDS * k)
        sources[name] = SourceConfig(kind, weight, config.path, config.validation_path)
    return replace(config, kind="mixture", path="", validation_path="", mixture=Entries(sources)), counts


def open_streams(config: DataConfig, num_replicas: int, tokenizer: Any = None, seed: int = 0) -> list[Stream]:
    """Open the streams of all replicas."""
    tokenizer = CountingTokenizer() if tokenizer is None else tokenizer
    streams = RunData(config, seed=seed).streams(tokenizer, {k: k for k in range(num_replicas)}, num_replicas)
    return list(streams.by_replica.values())


def train_stream(
    config: DataConfig,
    tokenizer: Any,
    *,
    replica: int,
    num_replicas: int,
    seed: int,
    vocab_size: int | None = None,
) -> Stream:
    """Open the stream of one replica."""
    data = RunData(config, seed=seed, vocab_size=vocab_size)
    return data.streams(tokenizer, {replica: replica}, num_replicas).by_replica[replica]


def validation_batches(
    config: DataConfig, tokenizer: Any, *, num_batches: int, vocab_size: int | None = None
) -> list[HostBatch]:
    return RunData(config, seed=0, vocab_size=vocab_size).validation_batches(tokenizer, num_batches)


def check_data(config: DataConfig, *, num_replicas: int = 1, vocab_size: int | None = None) -> None:
    RunData(config, seed=0, vocab_size=vocab_size).check(num_replicas)


def needs_tokenizer(config: DataConfig) -> bool:
    return RunData(config, seed=0).needs_tokenizer


def before_next_document(config: DataConfig, state: dict[str, Any], group: str = "data") -> dict[str, Any]:
    """`state` without the shards in front that hold no further document; a redistributed state may have some."""
    source = open_source(config, validation=False, seed=0, vocab_size=None)
    documents = ReplicaDocuments(group, source, state["replica"], state["num_replicas"])
    with closing(read_records(documents, DataPosition.from_json(state["positions"][group]))) as records:
        return state | {"positions": state["positions"] | {group: next(records)[1].to_json()}}


def position_of(stream: Stream) -> DataPosition:
    """The position of a stream of one source."""
    return DataPosition.from_json(stream.get_state()["positions"]["data"])


def read_through(stream: Stream, epoch: int) -> list[int]:
    """The input ids up to the end of an epoch; batches must hold one token, for the state to show the exact end."""
    ids = []
    while position_of(stream).shards[0].epoch <= epoch:
        ids.append(int(next(stream)["input_ids"][0, 0]))
    return ids
