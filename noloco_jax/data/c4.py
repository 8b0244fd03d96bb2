"""C4 in its public form: shards of gzipped JSON lines, streamed."""

import gzip
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from noloco_jax.data.order import Encode, Wanted, WindowLane, shuffled
from noloco_jax.errors import UserError


def find_shards(path: str, field: str, split: str) -> list[str]:
    """The sorted shards `c4-{split}.*.json.gz` of a folder."""
    folder, pattern = Path(path).expanduser(), f"c4-{split}.*.json.gz"
    if not folder.is_dir():
        raise UserError(f"{field}={path!r}: there is no such folder; give the one that holds {pattern}")
    shards = sorted(str(shard) for shard in folder.glob(pattern))
    if not shards:
        raise UserError(f"{field}={path!r} holds no file {pattern}")
    return shards


class Shards:
    """The lines of some shards one after another; a place is (shard, line in it, document number)."""

    def __init__(self, shards: Sequence[str], shard: int, line: int, number: int):
        self._shards, self.place = shards, (shard, line, number)
        self._opened: gzip.GzipFile | None = None

    def next(self) -> tuple[str, int, bytes] | None:
        """(file, line number from 1, line) of the next document; None behind the last shard."""
        while True:
            shard, line, number = self.place
            if shard == len(self._shards):
                return None
            path = self._shards[shard]
            try:
                if self._opened is None:
                    self._opened = gzip.GzipFile(path, "rb")
                    for _ in range(line):
                        self._opened.readline()
                content = self._opened.readline()
            except (EOFError, OSError, zlib.error) as error:
                raise UserError(
                    f"{path} cannot be read behind line {line} ({error}): it is truncated or damaged; fetch it again"
                ) from None
            if not content:
                self.close()
                self.place = (shard + 1, 0, number)
            elif content.isspace():
                self.place = (shard, line + 1, number)
            else:
                self.place = (shard, line + 1, number + 1)
                return path, line + 1, content

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None


def parse(document: tuple[str, int, bytes]) -> str:
    path, line, content = document
    try:
        text = json.loads(content)["text"]
    except (ValueError, KeyError, TypeError):
        text = None
    if not isinstance(text, str):
        raise UserError(f'{path}, line {line} is not a JSON object with a string "text": fetch the file again')
    return text


class C4Source:
    """Lane i of N reads the shards i, i + N, ... of the sorted list; with fewer shards than lanes, document i of all
    shards goes to lane i % N.

    Shuffled: a lane's shards anew in every epoch, and its documents within windows of `shuffle_buffer`;
    `shuffle_buffer` 1 keeps the files' order.
    """

    columns = 1
    chunk = 32

    def __init__(self, wanted: Wanted, encode: Encode):
        self._wanted, self._encode = wanted, encode
        self._shards = find_shards(wanted.path, wanted.field, wanted.split)
        self.summary: dict[str, int | str] = {
            "kind": "c4",
            "files": len(self._shards),
            "bytes": sum(Path(shard).stat().st_size for shard in self._shards),
        }

    def check_replicas(self, num_replicas: int) -> None:
        """Also reads a first document, so that a folder of something else is found at once."""
        lines = Shards(self._shards, 0, 0, 0)
        try:
            first = lines.next()
            if first is not None:
                parse(first)
            wanted = num_replicas if len(self._shards) < num_replicas else 1
            while lines.place[2] < wanted:
                if lines.next() is None:
                    raise UserError(
                        f"num_replicas={num_replicas}, but {self._wanted.name} holds {lines.place[2]} "
                        "documents: use fewer replicas or more shards"
                    )
        finally:
            lines.close()

    def lane(self, epoch: int, lane: int, lanes: int, anchor: tuple[int, ...]) -> "C4Lane":
        by_shard = len(self._shards) >= lanes
        shards = self._shards[lane::lanes] if by_shard else self._shards
        seed, size = self._wanted.seed, self._wanted.shuffle_buffer
        if size > 1:
            key = (epoch, lane, lanes) if by_shard else (epoch,)  # who deals documents must read in one order
            shards = [shards[k] for k in shuffled(len(shards), seed, *key)]
        return C4Lane(
            shards,
            own=(0, 1) if by_shard else (lane, lanes),
            size=size,
            key=(seed, epoch, lane, lanes),
            anchor=anchor,
        )

    def load(self, documents: Sequence[tuple[str, int, bytes]]) -> list[np.ndarray]:
        return self._encode([parse(document) for document in documents])


class C4Lane(WindowLane):
    """The documents with number % own[1] == own[0] of some shards. Anchors are (window, shard, line, number)."""

    def __init__(
        self, shards: Sequence[str], own: tuple[int, int], size: int, key: tuple[int, ...], anchor: tuple[int, ...]
    ):
        super().__init__(size, key)
        self._shards, self._own = shards, own
        self._next_window, *place = anchor or (0, 0, 0, 0)
        self._lines = Shards(shards, *place)
        self._anchor: tuple[int, ...] = ()

    @property
    def anchor(self) -> tuple[int, ...]:
        return self._anchor

    def read_window(self, window: int) -> list[Any]:
        if window < self._next_window:
            self._lines.close()
            self._next_window, self._lines = 0, Shards(self._shards, 0, 0, 0)
        documents: list[Any] = []
        while self._next_window <= window:
            self._anchor = (self._next_window, *self._lines.place)
            documents = []
            while len(documents) < self._size:
                mine = self._lines.place[2] % self._own[1] == self._own[0]
                document = self._lines.next()
                if document is None:
                    break
                if mine:
                    documents.append(document)
            self._next_window += 1
        return documents

    def close(self) -> None:
        self._lines.close()
