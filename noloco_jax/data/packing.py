"""Pack documents of any length into sequences of one length: they are concatenated, then split.

Shapes: C columns (1: token ids; 2: input ids and their labels), N tokens of a document, B sequences of T tokens.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np

from noloco_jax.data.positions import DataPosition
from noloco_jax.data.source import IGNORED_LABEL, PADDING
from noloco_jax.errors import UserError

# In host memory: input_ids and labels, int32 (T,) each; with a document mask segment_ids as well, which number the
# documents of each sequence from 1. Padding is segment 0. A batch has the sequences below each other: (B, T).
HostSequence = dict[str, np.ndarray]
HostBatch = dict[str, np.ndarray]


class Packer:
    """Packer of documents, which splits their concatenation t into sequences: number k has the inputs t[kT:(k+1)T].

    With one column its labels are t[kT+1:(k+1)T+1]: no token is lost between two sequences, and every label is the
    token that follows, across the borders of sequences and documents too. With two columns the second one holds the
    labels.

    With a document mask, `segment_ids` number the documents, and a document's last token has no label of
    the first column's making: nothing that it attends to tells the next document. So the flattening collator of Hugging
    Face sets the label of every first token to -100, and MaxText's Hugging Face pipeline never scores a BOS. A document
    that is cut between two sequences continues in the second as a document of its own.

    Padding that documents bring along is never in front of a token of its sequence, so that causal attention never
    sees it: it is kept where it ends a sequence exactly, and dropped elsewhere.
    """

    def __init__(self, num_columns: int, sequence_length: int, *, document_mask: bool):
        self._num_columns, self._sequence_length, self._document_mask = num_columns, sequence_length, document_mask
        self._documents: deque[tuple[np.ndarray, int, DataPosition]] = deque()  # tokens, number packed, position before
        self._available = 0  # tokens that are not packed yet

    def add(self, document_CN: np.ndarray, position: DataPosition) -> None:
        """Append the document that follows `position`, without its tokens that were read before.

        Raises:
          UserError: for a position beyond the document's end.
        """
        length, start = document_CN.shape[1], position.shards[0].token
        if start > length:
            raise UserError(
                f"a saved data position is at token {start} of a document of {length}: data or tokenizer changed "
                "since; restore them, or start afresh"
            )
        if (self._available + length - start) % self._sequence_length:
            document_CN = _without_padding_behind(document_CN)
            length = document_CN.shape[1]
        if start < length:
            self._documents.append((document_CN, start, position))
            self._available += length - start

    @property
    def full(self) -> bool:
        """True with tokens for a sequence and one more, which is the last label or has the position after it."""
        return self._available > self._sequence_length

    @property
    def position(self) -> DataPosition:
        """The position after the sequences taken. The packer must hold a token."""
        _, start, position = self._documents[0]
        first, *rest = position.shards
        return position._replace(shards=(first._replace(token=start), *rest))

    def _peek(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the next tokens (C, count) and the number, among the documents at hand, of each one's (count,)."""
        tokens_CN, documents_N = np.empty((self._num_columns, count), np.int32), np.empty(count, np.int32)
        filled = 0
        for number, (document_CN, start, _) in enumerate(self._documents):
            piece_CN = document_CN[:, start : start + count - filled]
            stop = filled + piece_CN.shape[1]
            tokens_CN[:, filled:stop], documents_N[filled:stop] = piece_CN, number
            filled = stop
            if filled == count:
                break
        return tokens_CN, documents_N

    def _drop(self, count: int) -> None:
        self._available -= count
        while count:
            document_CN, start, position = self._documents.popleft()
            rest = document_CN.shape[1] - start - count
            if rest > 0:
                self._documents.appendleft((document_CN, start + count, position))
            count = max(0, -rest)

    def pop(self) -> HostSequence:
        """Take the next sequence. The packer must be `full`."""
        tokens_CN, documents_N = self._peek(self._sequence_length + 1)
        self._drop(self._sequence_length)
        labels_N = self._following(tokens_CN, documents_N) if self._num_columns == 1 else tokens_CN[1, :-1]
        return self._sequence(tokens_CN[0, :-1], labels_N, documents_N[:-1])

    def pop_rest(self) -> HostSequence | None:
        """Take the last tokens, at most a sequence, filled up with ignored labels; None if no label is left."""
        tokens_CN, documents_N = self._peek(self._available)
        self._drop(self._available)
        if self._num_columns == 1:
            ids_N, labels_N, documents_N = tokens_CN[0, :-1], self._following(tokens_CN, documents_N), documents_N[:-1]
        else:
            ids_N, labels_N = tokens_CN
        return self._sequence(ids_N, labels_N, documents_N) if (labels_N != IGNORED_LABEL).any() else None

    def _following(self, tokens_CN: np.ndarray, documents_N: np.ndarray) -> np.ndarray:
        """Return the label of every token but the last: the next token, with a document mask only of its document."""
        if not self._document_mask:
            return tokens_CN[0, 1:]
        return np.where(documents_N[1:] == documents_N[:-1], tokens_CN[0, 1:], IGNORED_LABEL)

    def _sequence(self, ids_N: np.ndarray, labels_N: np.ndarray, documents_N: np.ndarray) -> HostSequence:
        """Return the tokens as a sequence that padding fills up."""

        def filled(values_N: np.ndarray, rest: int) -> np.ndarray:
            if len(values_N) == self._sequence_length:
                return values_N
            values_T = np.full(self._sequence_length, rest, np.int32)
            values_T[: len(values_N)] = values_N
            return values_T

        ids_T = filled(ids_N, PADDING)
        sequence = {"input_ids": np.maximum(ids_T, 0), "labels": filled(labels_N, IGNORED_LABEL)}
        if self._document_mask:
            documents_T = filled(documents_N, 0)
            sequence["segment_ids"] = np.where(ids_T == PADDING, 0, documents_T - documents_T[0] + 1)
        return sequence


def _without_padding_behind(document_CN: np.ndarray) -> np.ndarray:
    tokens = np.flatnonzero(document_CN[0] != PADDING)
    return document_CN[:, : tokens[-1] + 1] if len(tokens) else document_CN[:, :0]


def as_batch(rows: Sequence[HostSequence]) -> HostBatch:
    """Return sequences as a batch, one below the other: (B, T)."""
    return {key: np.stack([row[key] for row in rows]) for key in rows[0]}
