"""Packs documents of any length into batches of equal sequences: they are concatenated, then split.

Shapes: C columns (1: token ids; 2: input ids and their labels), N tokens of a document, B sequences of T tokens.
"""

from collections import deque

import numpy as np

from noloco_jax.data.positions import DataPosition
from noloco_jax.errors import UserError
from noloco_jax.labels import IGNORED_LABEL

HostBatch = dict[str, np.ndarray]  # input_ids and labels, int32 (B, T) each, in host memory


class Packer:
    """Splits the concatenated documents t into sequences: number k has the inputs t[kT:(k+1)T].

    With one column its labels are t[kT+1:(k+1)T+1]: no token is lost between two sequences, and every label is the
    token that follows, across the borders of sequences and documents too. With two columns the second one holds the
    labels.
    """

    def __init__(self, num_columns: int, batch_size: int, sequence_length: int):
        self._num_columns, self._batch_size, self._sequence_length = num_columns, batch_size, sequence_length
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

    def _peek(self, count: int) -> np.ndarray:
        tokens_CN = np.empty((self._num_columns, count), np.int32)
        filled = 0
        for document_CN, start, _ in self._documents:
            piece_CN = document_CN[:, start : start + count - filled]
            tokens_CN[:, filled : filled + piece_CN.shape[1]] = piece_CN
            filled += piece_CN.shape[1]
            if filled == count:
                break
        return tokens_CN

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
        tokens_CN = self._peek(count + 1)
        self._drop(count)
        labels_N = tokens_CN[0, 1:] if self._num_columns == 1 else tokens_CN[1, :-1]
        shape = (self._batch_size, self._sequence_length)
        return {"input_ids": tokens_CN[0, :-1].reshape(shape), "labels": labels_N.reshape(shape)}

    def pop_rest(self) -> HostBatch | None:
        """Takes what is left when no document follows, filled up with ignored labels; None if no label is left."""
        tokens_CN = self._peek(self._available)
        inputs_N, labels_N = (tokens_CN[0, :-1], tokens_CN[0, 1:]) if self._num_columns == 1 else tokens_CN
        self._drop(self._available)
        if not (labels_N != IGNORED_LABEL).any():
            return None
        input_ids = np.zeros((self._batch_size, self._sequence_length), np.int32)
        labels = np.full_like(input_ids, IGNORED_LABEL)
        input_ids.flat[: len(inputs_N)] = inputs_N
        labels.flat[: len(labels_N)] = labels_N
        return {"input_ids": input_ids, "labels": labels}
