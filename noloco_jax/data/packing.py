"""Concatenate and split: documents of any length to batches of equal sequences.

Shapes: C columns (1: token ids; 2: input ids and their labels), N tokens of a document, B sequences, T tokens of each.
"""

from collections import deque

import numpy as np

from noloco_jax.data.lanes import Cursor
from noloco_jax.errors import UserError

IGNORED = -100  # a label that is out of the loss

Batch = dict[str, np.ndarray]


class Packer:
    """Cuts the concatenated documents t into sequences: number k has the inputs t[kT:(k+1)T].

    Of one column the labels are t[kT+1:(k+1)T+1]: no token is lost between two sequences and every label is the token
    that follows, across the borders of sequences and documents too. Of two columns the second one holds the labels.
    """

    def __init__(self, columns: int, batch_size: int, sequence_length: int):
        self._columns, self._batch_size, self._sequence_length = columns, batch_size, sequence_length
        self._documents: deque[tuple[np.ndarray, int, Cursor]] = deque()  # array, where its rest begins, cursor
        self._available = 0  # tokens in these rests

    def add(self, document_CN: np.ndarray, cursor: Cursor) -> None:
        """Appends the document that `cursor` stands before, from the cursor's offset on."""
        length, offset = document_CN.shape[1], cursor.parts[0].offset
        if offset > length:
            raise UserError(
                f"a saved data position is at token {offset} of a document of {length}: data or tokenizer changed "
                "since; restore them, or start afresh"
            )
        if offset < length:
            self._documents.append((document_CN, offset, cursor))
            self._available += length - offset

    @property
    def full(self) -> bool:
        """Whether a batch is there: its tokens and one more, which is the last label or tells the next position."""
        return self._available > self._batch_size * self._sequence_length

    @property
    def cursor(self) -> Cursor:
        """Where a stream goes on after the batches taken; not for a packer that holds nothing."""
        _, start, cursor = self._documents[0]
        first, *rest = cursor.parts
        return cursor._replace(parts=(first._replace(offset=start), *rest))

    def _peek(self, count: int) -> np.ndarray:
        tokens_CN = np.empty((self._columns, count), np.int32)
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
            document_CN, start, cursor = self._documents.popleft()
            rest = document_CN.shape[1] - start - count
            if rest > 0:
                self._documents.appendleft((document_CN, start + count, cursor))
            count = max(0, -rest)

    def pop(self) -> Batch:
        """The next batch, int32 (B, T) each; there must be a `full` one."""
        count = self._batch_size * self._sequence_length
        tokens_CN = self._peek(count + 1)
        self._drop(count)
        labels_N = tokens_CN[0, 1:] if self._columns == 1 else tokens_CN[1, :-1]
        shape = (self._batch_size, self._sequence_length)
        return {"input_ids": tokens_CN[0, :-1].reshape(shape), "labels": labels_N.reshape(shape)}

    def pop_rest(self) -> Batch | None:
        """What is left when no document follows, filled up with ignored labels; None where it has no label."""
        tokens_CN = self._peek(self._available)
        inputs_N, labels_N = (tokens_CN[0, :-1], tokens_CN[0, 1:]) if self._columns == 1 else tokens_CN
        self._drop(self._available)
        if not (labels_N != IGNORED).any():
            return None
        input_ids = np.zeros((self._batch_size, self._sequence_length), np.int32)
        labels = np.full_like(input_ids, IGNORED)
        input_ids.flat[: len(inputs_N)] = inputs_N
        labels.flat[: len(labels_N)] = labels_N
        return {"input_ids": input_ids, "labels": labels}
