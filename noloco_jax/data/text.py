"""Text files as documents: whole ones, and pieces of long ones."""

import functools
from collections.abc import Sequence
from typing import BinaryIO

import numpy as np

from noloco_jax.data.find_files import (
    HELD_OUT_EVERY,
    SUFFIXES,
    HoldOut,
    compression_of,
    file_sizes,
    find_files,
    versions_fact,
    without_repeats,
)
from noloco_jax.data.source import EpochShard, Source, SourceOptions, seeded_permutation
from noloco_jax.errors import UserError
from noloco_jax.storage import open_file, with_retries

_MIN_PIECE_BYTES = 256
_MAX_LINE_BYTES = 4096  # a piece ends within a longer line


def find_text_files(options: SourceOptions) -> list[tuple[str, int]]:
    """Return (path, bytes) of every text file that is not empty, see `find_files`."""
    files = without_repeats(find_files(options, SUFFIXES["text"]))
    if len(files) == 1 and not files[0].lower().endswith(SUFFIXES["text"]):
        _check_is_text(options, files[0])
    sized = [(path, size) for path, size in zip(files, file_sizes(files), strict=True) if size]
    if not sized:
        raise UserError(f"{options.name} holds no text: its files are empty")
    return sized


def _check_is_text(options: SourceOptions, path: str) -> None:
    """Raise `UserError` for a file that was named and is no text, by its name or by a zero byte at its beginning."""
    kind_field = options.beside("kind")
    for kind, suffixes in SUFFIXES.items():
        if path.lower().endswith(suffixes):
            raise UserError(f"{options.name} is read as plain text, its name says {kind}: give {kind_field}={kind}")
    with open_file(path) as file:
        start = file.read(1024)
    if b"\0" in start or compression_of(start):
        raise UserError(f"{options.name} is no plain text: decompress it, or give the {kind_field} that it is of")


def piece_bytes(sequence_length: int, token_bytes: int) -> int:
    """The length of a piece: two sequences, of tokens of about `token_bytes` bytes each."""
    return max(_MIN_PIECE_BYTES, 2 * token_bytes * sequence_length)


class TextSource(Source):
    """Source of text files: a document is a file, or a piece of a longer file that ends at the end of a line.

    Batches are consecutive tokens, so pieces are short (`piece_bytes`): shuffled, they make batches of many files.
    Files are read as UTF-8; bytes that are not UTF-8 become U+FFFD. The documents are shuffled globally, anew in every
    epoch; `shuffle_buffer` 1 keeps the sorted order. Held out for validation are whole files where there are fifty or
    more of them, else pieces: a fiftieth of the text either way.
    """

    def __init__(self, options: SourceOptions, piece: int):
        self._piece, self._files = piece, find_text_files(options)
        super().__init__(options, [path for path, _ in self._files], options.part)
        pieces = np.array([-(-size // self._piece) for _, size in self._files])
        if options.part != "all" and pieces.sum() < 2:
            raise UserError(
                f"{options.name} is one short file: give {options.beside('validation_path')}, or at least two files, "
                "for one to be held out for validation"
            )
        files = np.repeat(np.arange(len(pieces)), pieces)
        numbers = np.arange(len(files)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        if len(pieces) >= HELD_OUT_EVERY:
            chosen = HoldOut(len(pieces), options.part).mask(0, len(pieces))[files]
        else:
            chosen = HoldOut(len(numbers), options.part).mask(0, len(numbers))
        self._documents = np.stack([files, numbers], axis=1)[chosen]

    @functools.cached_property
    def fingerprint(self) -> dict[str, int | str]:
        return {
            "kind": "text",
            "piece_bytes (by data.sequence_length)": self._piece,
            "files": len(self._files),
            "bytes": sum(size for _, size in self._files),
            "names and sizes": self.options.digest(self._files),
            **versions_fact(self.files),
            "documents": len(self._documents),
        }

    def count_documents(self, limit: int) -> int:
        return min(limit, len(self._documents))

    def open_shard(self, epoch: int, shard: int, num_shards: int, seek_hint: tuple[int, ...]) -> "TextEpochShard":
        order = np.arange(len(self._documents))
        if self.options.shuffle_buffer > 1:
            order = seeded_permutation(len(self._documents), self.options.seed, epoch)
        return TextEpochShard(order[shard::num_shards])

    def load(self, records: Sequence[int]) -> list[str]:
        return [self._read(document) for document in records]

    def _read(self, document: int) -> str:
        file, number = self._documents[document].tolist()
        path, size = self._files[file]

        def read() -> bytes:
            with open_file(path) as opened:
                start, stop = (_piece_border(opened, (number + k) * self._piece, size) for k in (0, 1))
                opened.seek(start)
                return opened.read(stop - start)

        text = with_retries(read, path).decode("utf-8", "replace")
        return text if number else text.removeprefix("\ufeff")  # a byte order mark is no text


def _piece_border(opened: BinaryIO, offset: int, size: int) -> int:
    """The first end of a line at or after `offset`, or of a character where the line is very long."""
    if offset <= 0 or offset >= size:
        return max(0, min(offset, size))
    opened.seek(offset - 1)
    following = opened.read(_MAX_LINE_BYTES)
    line_end = following.find(b"\n")
    if line_end >= 0:
        return min(size, offset + line_end)
    end = 1
    while end < min(4, len(following)) and following[end] & 0xC0 == 0x80:  # inside a character
        end += 1
    return min(size, offset + end - 1)


class TextEpochShard(EpochShard):
    """Documents in the order given."""

    def __init__(self, documents: np.ndarray):
        self._documents = documents

    def get(self, document: int) -> int | None:
        return int(self._documents[document]) if document < len(self._documents) else None
