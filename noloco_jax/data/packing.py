"""Packs documents of any length into batches of equal sequences: they are concatenated, then split.

Shapes: C columns (1: token ids; 2: input ids and their labels), N tokens of a document, B sequences of T tokens.
"""

from collections import deque

import numpy as np

from noloco_jax.data.positions import DataPosition
from noloco_jax.data.source import PADDING
from noloco_jax.errors import UserError
from noloco_jax.labels import IGNORED_LABEL

# In host memory: input_ids and labels, int32 (B, T) each; with a document mask segment_ids as well, which number the
# documents of each sequence from 1. Padding is segment 0.
HostBatch = dict[str, np.ndarray]


class Packer:
    """Splits the concatenated documents t into sequences: number k has the inputs t[kT:(k+1)T].

    With one column its labels are t[kT+1:(k+1)T+1]: no token is lost between two sequences, and every label is the
    token that follows, across the borders of sequences and documents too. With two columns the second one holds the
    labels.

    With a document mask, batches say which document each token belongs to, and a document's last token has no label of
    the first column's making: nothing that it attends to tells the next document. So the flattening collator of Hugging
    Face sets the label of every first token to -100, and MaxText's Hugging Face pipeline never scores a BOS. A document
    that is cut between two sequences goes on in the second as a document of its own.

    Padding that documents bring along is never in front of a token of its sequence, so that causal attention never
    sees it: it is kept where it ends a sequence exactly, and dropped elsewhere.
    """

    def __init__(self, num_columns: int, batch_size: int, sequence_length: int, *, document_mask: bool):
        self._num_columns, self._batch_size, self._sequence_length = num_columns, batch_size, sequence_length
        self._document_mask = document_mask
        self._documents: deque[tuple[np.ndarray, int, DataPosition]] = deque()  # tokens, number packed, position before
        self._available = 0  # tokens that are not packed yet

    def add(self, document_CN: np.ndarray, position: DataPosition) -> None:
        """Appends the document that follows `position`, without its tokens that were read before."""
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
        """Whether there are tokens for a batch and one more, which is the last label or has the position after it."""
        return self._available > self._batch_size * self._sequence_length

    @property
    def position(self) -> DataPosition:
        """The position after the batches taken. The packer must hold a token."""
        _, start, position = self._documents[0]
        first, *rest = position.shards
        return position._replace(shards=(first._replace(token=start), *rest))

    def _peek(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The next tokens (C, count), and which of the documents at hand each of them belongs to (count,)."""
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

    def pop(self) -> HostBatch:
        """Takes the next batch. The packer must be `full`."""
        count = self._batch_size * self._sequence_length
        tokens_CN, documents_N = self._peek(count + 1)
        self._drop(count)
        labels_N = self._following(tokens_CN, documents_N) if self._num_columns == 1 else tokens_CN[1, :-1]
        return self._batch(tokens_CN[0, :-1], labels_N, documents_N[:-1])

    def pop_rest(self) -> HostBatch | None:
        """Takes what is left when no document follows, filled up with ignored labels; None if no label is left."""
        tokens_CN, documents_N = self._peek(self._available)
        self._drop(self._available)
        if self._num_columns == 1:
            ids_N, labels_N, documents_N = tokens_CN[0, :-1], self._following(tokens_CN, documents_N), documents_N[:-1]
        else:
            ids_N, labels_N = tokens_CN
        return self._batch(ids_N, labels_N, documents_N) if (labels_N != IGNORED_LABEL).any() else None

    def _following(self, tokens_CN: np.ndarray, documents_N: np.ndarray) -> np.ndarray:
        """The label of every token but the last: the token that follows, with a document mask that of its document."""
        if not self._document_mask:
            return tokens_CN[0, 1:]
        return np.where(documents_N[1:] == documents_N[:-1], tokens_CN[0, 1:], IGNORED_LABEL)

    def _batch(self, ids_N: np.ndarray, labels_N: np.ndarray, documents_N: np.ndarray) -> HostBatch:
        """The tokens as a batch, which padding fills up."""

        def sequences(values_N: np.ndarray, rest: int) -> np.ndarray:
            values_BT = np.full((self._batch_size, self._sequence_length), rest, np.int32)
            values_BT.flat[: len(values_N)] = values_N
            return values_BT

        ids_BT = sequences(ids_N, PADDING)
        batch = {"input_ids": np.maximum(ids_BT, 0), "labels": sequences(labels_N, IGNORED_LABEL)}
        if self._document_mask:
            documents_BT = sequences(documents_N, 0)
            batch["segment_ids"] = np.where(ids_BT == PADDING, 0, documents_BT - documents_BT[:, :1] + 1)
        return batch


def _without_padding_behind(document_CN: np.ndarray) -> np.ndarray:
    tokens = np.flatnonzero(document_CN[0] != PADDING)
    return document_CN[:, : tokens[-1] + 1] if len(tokens) else document_CN[:, :0]
