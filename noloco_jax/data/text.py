"""Text files as documents."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from noloco_jax.data.order import Encode, Selection, Wanted, shuffled
from noloco_jax.errors import UserError

SUFFIXES = (".md", ".py", ".rst", ".txt")
SKIPPED_FOLDERS = ("site-packages", "dist-packages", "__pycache__")
_LEAST_PIECE = 256
_LINE_BYTES = 4096  # how far to look for a line's end to cut at


def find_text_files(path: str, field: str) -> list[tuple[str, int]]:
    """(path, bytes) of every text file below a folder in sorted order, or of the one file that `path` is.

    Folders of installed packages, caches and hidden ones are left out, and so are empty files.
    """
    root = Path(path).expanduser()
    if root.is_file():
        found = [root]
    elif root.is_dir():
        found = []
        for folder, folders, files in os.walk(root):
            folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith(".")]
            found += [Path(folder, name) for name in files if name.endswith(SUFFIXES) and not name.startswith(".")]
        found.sort(key=lambda file: file.relative_to(root).as_posix())
    else:
        raise UserError(f"{field}={path!r}: there is no such file or folder")
    sized = [(str(file), file.stat().st_size) for file in found if file.is_file()]
    sized = [(file, size) for file, size in sized if size]
    if not sized:
        patterns = ", ".join(f"*{suffix}" for suffix in SUFFIXES)
        raise UserError(f"{field}={path!r} holds no text: looked for files {patterns} that are not empty")
    return sized


def piece_bytes(sequence_length: int, token_bytes: int) -> int:
    """The length of a document, about: two sequences of tokens of so many bytes."""
    return max(_LEAST_PIECE, 2 * token_bytes * sequence_length)


class TextSource:
    """A document is a file, or a piece of a longer one, cut at a line's end.

    Batches are consecutive tokens, so pieces are short (`piece_bytes`): shuffled, they make batches of many files.
    Read as UTF-8, what is not replaced by U+FFFD. Shuffled globally, anew in every epoch; `shuffle_buffer` 1 keeps the
    sorted order. `split` "rest" or "held_out" divides the documents by `Selection`: whole files where there are
    several, else the pieces.
    """

    columns = 1
    chunk = 32

    def __init__(self, wanted: Wanted, piece: int, encode: Encode):
        self._wanted, self._piece, self._encode = wanted, piece, encode
        self._files = find_text_files(wanted.path, wanted.field)
        pieces = np.array([-(-size // self._piece) for _, size in self._files])
        if wanted.split != "all" and pieces.sum() < 2:
            raise UserError(
                f"{wanted.name} is one short file: give data.validation_path, or at least two files, "
                "for one to be held out for validation"
            )
        files = np.repeat(np.arange(len(pieces)), pieces)
        numbers = np.arange(len(files)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        if len(pieces) > 1:
            chosen = Selection(len(pieces), wanted.split).mask(0, len(pieces))[files]
        else:
            chosen = Selection(len(numbers), wanted.split).mask(0, len(numbers))
        self._documents = np.stack([files, numbers], axis=1)[chosen]
        self.summary: dict[str, int | str] = {
            "kind": "text",
            "files": len(self._files),
            "bytes": sum(size for _, size in self._files),
            "documents": len(self._documents),
            "piece_bytes": self._piece,
        }

    def check_replicas(self, num_replicas: int) -> None:
        if len(self._documents) < num_replicas:
            raise UserError(
                f"num_replicas={num_replicas}, but {self._wanted.name} holds {len(self._documents)} training "
                "documents: use fewer replicas or more text"
            )

    def lane(self, epoch: int, lane: int, lanes: int, anchor: tuple[int, ...]) -> "TextLane":
        count = len(self._documents)
        order = shuffled(count, self._wanted.seed, epoch) if self._wanted.shuffle_buffer > 1 else np.arange(count)
        return TextLane(order[lane::lanes])

    def load(self, documents: Sequence[int]) -> list[np.ndarray]:
        return self._encode([self._read(document) for document in documents])

    def _read(self, document: int) -> str:
        file, number = self._documents[document].tolist()
        path, size = self._files[file]
        try:
            with open(path, "rb") as opened:
                start, stop = (_cut(opened, (number + k) * self._piece, size) for k in (0, 1))
                opened.seek(start)
                return opened.read(stop - start).decode("utf-8", "replace")
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}): restore it, or start afresh") from None


def _cut(opened, offset: int, size: int) -> int:
    """Where to cut near `offset`: behind the next end of a line, or of a character where a line is very long."""
    if offset <= 0 or offset >= size:
        return max(0, min(offset, size))
    opened.seek(offset - 1)
    ahead = opened.read(_LINE_BYTES)
    line_end = ahead.find(b"\n")
    if line_end >= 0:
        return min(size, offset + line_end)
    inside = 1
    while inside < min(4, len(ahead)) and ahead[inside] & 0xC0 == 0x80:
        inside += 1
    return min(size, offset + inside - 1)


class TextLane:
    """Documents in the order given; any of them can be had at once."""

    anchor: tuple[int, ...] = ()

    def __init__(self, documents: np.ndarray):
        self._documents = documents

    def get(self, position: int) -> int | None:
        return int(self._documents[position]) if position < len(self._documents) else None

    def close(self) -> None:
        pass
