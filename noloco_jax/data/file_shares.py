"""Equal shares of an epoch's files, for documents that are found only by reading a file from its beginning."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

_SLIVER = 50  # an estimated file is not shared for less than this fraction of a share: it would be read twice


class FileLength(NamedTuple):
    """Length of a file: its documents and their bytes, both counted, or estimated from the file's beginning."""

    documents: int
    bytes: int
    is_counted: bool


class FilePart(NamedTuple):
    """A part of a file's documents: document k, counted from 0, belongs to it if its turn is in `start` to `stop` - 1.

    Attributes:
      file: number of the file.
      start, stop: turns, of 0 to `turns` - 1.
      turns: number of turns; document k has turn k * `step` modulo `turns`.
      step: coprime to `turns`, so that `turns` consecutive documents have all turns.
      ends: whether there is no document of the part from document number `stop` on.
    """

    file: int
    start: int
    stop: int
    turns: int
    step: int = 1
    ends: bool = False

    def holds(self, document: int) -> bool:
        return self.start <= document * self.step % self.turns < self.stop


def divide_files(lengths: Sequence[FileLength], order: Sequence[int], num_shards: int) -> list[list[FilePart]]:
    """Divide the files in an order into shards, each of which reads its parts in this order.

    File k goes to shard k modulo `num_shards`, as far as that makes shards of equal bytes: training takes tokens from
    all shards at one pace. The files in this order are cut into shards at `num_shards` - 1 places. One that is cut is
    read by both sides, the first only up to the cut if documents were counted. Of estimated files the sides take
    documents in turns instead, so that each gets its share whatever the true number. Every shard has a document where
    the files hold enough: if one is longer than a share, numbers of documents are made equal in place of bytes.

    Args:
      lengths: of every file.
      order: of the files.
      num_shards: at least 1.

    Returns:
      Each shard's parts. Every document is in one of them.
    """
    rank = {file: place for place, file in enumerate(order)}
    dealt = [file for first in range(num_shards) for file in order[first::num_shards]]
    by_bytes = _cut_files(lengths, [lengths[file].bytes for file in dealt], dealt, num_shards)
    shards = (
        by_bytes if all(by_bytes) else _cut_files(lengths, [lengths[f].documents for f in dealt], dealt, num_shards)
    )
    return [sorted(parts, key=lambda part: rank[part.file]) for parts in shards]


def _cut_files(
    lengths: Sequence[FileLength], weights: Sequence[int], files: Sequence[int], num_shards: int
) -> list[list[FilePart]]:
    """Cut a sequence of files into shards of equal weight."""
    total = sum(weights)  # `num_shards` times a share; the weights are counted as many times, so that all is whole
    stops = [num_shards * stop for stop in itertools.accumulate(weights)]
    shards: list[list[FilePart]] = [[] for _ in range(num_shards)]
    for file, start, stop in zip(files, [0, *stops], stops, strict=False):
        documents = lengths[file].documents
        if not documents:
            continue
        first, last = start // total, -(-stop // total)  # shards that the file overlaps
        borders = [min(max(cut * total, start), stop) for cut in range(first, last + 1)]
        if not lengths[file].is_counted:
            borders = [_without_sliver(border, start, stop, total) for border in borders]
        turns = [(2 * documents * (border - start) + stop - start) // (2 * (stop - start)) for border in borders]
        ends = lengths[file].is_counted
        step = 1 if ends else _spread_step(documents)
        for shard, (begin, end) in enumerate(itertools.pairwise(turns), start=first):
            if begin < end:
                shards[shard].append(FilePart(file, begin, end, documents, step, ends))
    return shards


def _without_sliver(border: int, start: int, stop: int, share: int) -> int:
    """Return a border within a file, or the file's own nearest border if that is closer than a sliver."""
    nearest = start if border - start < stop - border else stop
    return nearest if abs(border - nearest) * _SLIVER < share else border


def _spread_step(turns: int) -> int:
    """Return a step coprime to `turns` that spreads consecutive documents: about `turns` over the golden ratio."""
    step = max(1, round(turns * 0.6180339887498949))
    while math.gcd(step, turns) != 1:
        step += 1
    return step
