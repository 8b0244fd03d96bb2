"""Rows of a Parquet batch as texts, or as tokens and labels.

Shapes: R rows of a batch that pyarrow reads, N tokens of all of these rows.
"""

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from noloco_jax.data.find_files import leave_out
from noloco_jax.data.source import IGNORED_LABEL, PADDING
from noloco_jax.errors import UserError


class RowConverter(NamedTuple):
    """Converter of the batches of one file.

    Attributes:
      path: the file.
      columns: the columns of its batches, see `parquet.choose_columns`.
      is_text: whether they are one of texts.
      sequence_length: tokens of a sequence; sequences of padding alone are left out at the end of a row.
      vocab_size: the model's; None leaves the ids unchecked.
    """

    path: str
    columns: tuple[str, ...]
    is_text: bool
    sequence_length: int
    vocab_size: int | None

    @property
    def _labelled_by(self) -> str:
        """The column that labels are made from; without one, as with a mask of ones."""
        return self.columns[1] if len(self.columns) > 1 else "attention_mask"

    @property
    def empty_row(self) -> Any:
        """A row without a token."""
        return "" if self.is_text else np.zeros((2, 0), np.int32)

    def rows(self, batch: pa.RecordBatch, first_row: int) -> list[Any]:
        """The text of each row, or its input ids and labels, padding behind its tokens: int32 (2, n).

        Args:
          batch: the columns.
          first_row: number of the batch's first row in the file.

        Rows with nulls, or with columns of different lengths, are empty. Raises `UserError` for tokens and labels that
        cannot be trained on.
        """
        bad = self._bad_rows(batch)
        if not bad:
            return self._good_rows(batch)
        for row, reason in sorted(bad.items()):
            leave_out(f"{self.path}, row {first_row + row} (counted from 0): {reason}")
        kept = np.delete(np.arange(batch.num_rows), list(bad))
        good = iter(self._good_rows(batch.take(kept)))  # type: ignore[arg-type]  # numpy's do too
        return [self.empty_row if row in bad else next(good) for row in range(batch.num_rows)]

    def _good_rows(self, batch: pa.RecordBatch) -> list[Any]:
        return _texts(batch.column(0)) if self.is_text else self._token_rows(batch)

    def _bad_rows(self, batch: pa.RecordBatch) -> dict[int, str]:
        """Return the number, in the batch, of each row that cannot be read -> the reason."""
        bad: dict[int, str] = {}
        for name in self.columns:
            column = batch.column(name)
            if column.null_count:
                bad |= dict.fromkeys(np.flatnonzero(np.asarray(column.is_null())).tolist(), f"{name} is null")
            if not self.is_text and column.flatten().null_count:
                holes_N = np.flatnonzero(np.asarray(column.flatten().is_null()))
                rows = np.searchsorted(np.cumsum(_lengths(column)), holes_N, side="right")
                bad |= dict.fromkeys(rows.tolist(), f"{name} holds a null")
        for name in () if self.is_text else self.columns[1:]:
            unequal_R = _lengths(batch.column(name)) != _lengths(batch.column("input_ids"))
            bad = dict.fromkeys(np.flatnonzero(unequal_R).tolist(), f"{name} is not as long as input_ids") | bad
        return bad

    def _token_rows(self, batch: pa.RecordBatch) -> list[np.ndarray]:
        lengths_R = _lengths(batch.column("input_ids"))
        ends_R = np.cumsum(lengths_R)
        starts_R = ends_R - lengths_R
        values = {name: self._integers(batch, name) for name in self.columns}
        ids_N, mask_N = values["input_ids"], values.get("attention_mask")
        followed_N = np.ones(len(ids_N), bool)  # the next token is in the same row
        followed_N[ends_R[lengths_R > 0] - 1] = False
        labels_N = self._labels(ids_N, values.get(self._labelled_by), followed_N)
        if mask_N is not None:
            # A label that is stored is its token's own, the others are the next token's.
            labelled_N = mask_N if self._labelled_by == "label" else mask_N & np.roll(mask_N, -1)
            labels_N = np.where(labelled_N != 0, labels_N, IGNORED_LABEL)
        self._check_ids(ids_N, labels_N)
        rows_2N = np.stack([ids_N, labels_N])
        if mask_N is not None:
            rows_2N = _with_padding_behind(rows_2N, mask_N == 0, lengths_R)
        kept_R = lengths_R
        if self._labelled_by == "attention_mask":
            kept_R = self._lengths_in_use(rows_2N[0] != PADDING, starts_R, lengths_R)
        elif self._labelled_by == "labels":
            kept_R = self._lengths_in_use(rows_2N[1] != IGNORED_LABEL, starts_R, lengths_R)
        return [rows_2N[:, start : start + kept] for start, kept in zip(starts_R, kept_R, strict=True)]

    def _integers(self, batch: pa.RecordBatch, name: str) -> np.ndarray:
        """Return a column's values of all rows, int32 (N,); a mask becomes 0 and 1."""
        values = batch.column(name).flatten()
        if name == "attention_mask":
            return (values.to_numpy(zero_copy_only=False) != 0).astype(np.int32)
        try:
            return values.cast(pa.int32()).to_numpy(zero_copy_only=False)
        except pa.ArrowInvalid as error:
            raise UserError(f"{self.path}: {name} holds what is no token id ({error}): write the row again") from None

    def _labels(self, ids_N: np.ndarray, stored_N: np.ndarray | None, followed_N: np.ndarray) -> np.ndarray:
        """The label of each token: the token that follows it in its row, or `IGNORED_LABEL`."""
        next_ids_N = np.roll(ids_N, -1)  # the last one is no row's
        if stored_N is None or self._labelled_by == "attention_mask":
            return np.where(followed_N, next_ids_N, IGNORED_LABEL)
        # A row's last token has no next id to compare its label with.
        scored_N = (stored_N != IGNORED_LABEL) & followed_N
        are_next, are_own = ((stored_N == ids)[scored_N].all() for ids in (next_ids_N, ids_N))
        if self._labelled_by == "label":
            if are_own and not are_next:
                raise UserError(
                    f"{self.path}: label equals input_ids, and must hold the ids that follow: name the column labels"
                )
            return stored_N
        if are_next and not are_own:
            raise UserError(
                f"{self.path}: labels holds the ids that follow, and must equal input_ids: name the column label"
            )
        return np.where(followed_N, np.roll(stored_N, -1), IGNORED_LABEL)

    def _lengths_in_use(self, used_N: np.ndarray, starts_R: np.ndarray, lengths_R: np.ndarray) -> np.ndarray:
        """Length of each row up to the end of the sequence that holds its last used token."""
        last_N = np.where(used_N, np.arange(1, len(used_N) + 1), 0)
        used_R = np.zeros_like(lengths_R)
        some_R = lengths_R > 0
        used_R[some_R] = np.maximum.reduceat(last_N, starts_R[some_R]) if some_R.any() else 0
        used_R = np.maximum(0, used_R - starts_R)
        return np.minimum(lengths_R, -(-used_R // self.sequence_length) * self.sequence_length)

    def _check_ids(self, ids_N: np.ndarray, labels_N: np.ndarray) -> None:
        if not len(ids_N):
            return
        smallest, largest = int(ids_N.min()), int(max(ids_N.max(), labels_N.max()))
        if smallest < 0:
            raise UserError(f"{self.path}: input_ids holds {smallest}; token ids are not negative")
        negative = labels_N[(labels_N < 0) & (labels_N != IGNORED_LABEL)]
        if len(negative):
            raise UserError(
                f"{self.path}: {self._labelled_by} holds {int(negative[0])}, which is neither a token id nor "
                f"{IGNORED_LABEL}, the label that is out of the loss: write {IGNORED_LABEL} where nothing is to be "
                "predicted"
            )
        if self.vocab_size is not None and largest >= self.vocab_size:
            raise UserError(
                f"{self.path} holds token id {largest}, but model.vocab_size={self.vocab_size}: "
                f"set model.vocab_size to at least {largest + 1}"
            )


def _with_padding_behind(rows_2N: np.ndarray, padding_N: np.ndarray, lengths_R: np.ndarray) -> np.ndarray:
    """The rows with their padding, as `PADDING`, behind their tokens: a token behind it would attend to it."""
    if not padding_N.any():
        return rows_2N
    row_N = np.repeat(np.arange(len(lengths_R)), lengths_R)
    rows_2N = np.stack([np.where(padding_N, PADDING, rows_2N[0]), rows_2N[1]])
    return rows_2N[:, np.lexsort((padding_N, row_N))]


def _texts(column: Any) -> list[str]:
    """Return the text of each row; bytes that are not UTF-8 become U+FFFD, as in text files."""
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if not is_binary(column.type):
        try:
            return column.to_pylist()
        except UnicodeDecodeError:
            column = column.cast("large_binary")
    return [content.decode("utf-8", "replace") for content in column.to_pylist()]


def is_binary(column_type: pa.DataType) -> bool:
    """Return True for strings of bytes, which writers that do not mark text as such leave."""
    return types.is_binary(column_type) or types.is_large_binary(column_type) or types.is_binary_view(column_type)


def _lengths(column: Any) -> np.ndarray:
    """Length of each row of a list column, 0 of a null: int64 (R,)."""
    lengths = pc.call_function("list_value_length", [column])
    return lengths.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
