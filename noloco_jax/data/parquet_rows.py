"""Rows of a Parquet batch as tokens and labels.

Shapes: R rows of a batch that pyarrow reads, N tokens of all of these rows.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from noloco_jax.errors import UserError
from noloco_jax.labels import IGNORED_LABEL

if TYPE_CHECKING:
    import pyarrow as pa


def label_column(path: str, schema: "pa.Schema") -> str:
    """The column from which the labels of `input_ids` are made: `label` or `attention_mask`."""
    import pyarrow.types as types

    for name in ("label", "attention_mask"):
        if {"input_ids", name} <= set(schema.names):
            for column in ("input_ids", name):
                kind = schema.field(column).type
                listed = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
                if not (listed and (types.is_integer(kind.value_type) or types.is_boolean(kind.value_type))):
                    raise UserError(f"{path}: column {column!r} is {kind}; it must be a list of integers")
            return name
    raise UserError(
        f"{path} has the columns {', '.join(schema.names)}: expected input_ids and label (the ids that follow), "
        "or input_ids and attention_mask"
    )


class RowConverter(NamedTuple):
    """Converts the batches of one file.

    Attributes:
      path: the file.
      column: its `label_column`.
      sequence_length: sequences of padding alone, of this many tokens, are left out at the end of a row.
      vocab_size: the model's; None leaves the ids unchecked.
    """

    path: str
    column: str
    sequence_length: int
    vocab_size: int | None

    def rows(self, batch: "pa.RecordBatch") -> list[np.ndarray]:
        """Input ids and labels of each row: int32 (2, n)."""
        ids_N, lengths_R = _flatten(batch.column("input_ids"))
        other_N, other_lengths_R = _flatten(batch.column(self.column))
        if not np.array_equal(lengths_R, other_lengths_R):
            k = int(np.flatnonzero(lengths_R != other_lengths_R)[0])
            raise UserError(
                f"{self.path}: a row has {lengths_R[k]} input_ids and {other_lengths_R[k]} values in {self.column}: "
                "write the file again with as many of one as of the other"
            )
        ends_R = np.cumsum(lengths_R)
        starts_R = ends_R - lengths_R
        kept_R = lengths_R
        if self.column == "label":
            labels_N = other_N
        else:
            attended_N = other_N != 0
            labels_N = np.full_like(ids_N, IGNORED_LABEL)
            scored_N = attended_N[:-1] & attended_N[1:]
            scored_N[ends_R[(ends_R > 0) & (ends_R < len(ids_N))] - 1] = False  # the next token is another row's
            labels_N[:-1][scored_N] = ids_N[1:][scored_N]
            kept_R = self._lengths_without_padding(attended_N, starts_R, lengths_R)
        self._check_ids(ids_N, labels_N)
        rows_2N = np.stack([ids_N, labels_N])
        return [rows_2N[:, start : start + kept] for start, kept in zip(starts_R, kept_R, strict=True)]

    def _lengths_without_padding(
        self, attended_N: np.ndarray, starts_R: np.ndarray, lengths_R: np.ndarray
    ) -> np.ndarray:
        """Length of each row up to the end of the sequence that holds its last token attended to."""
        last_N = np.where(attended_N, np.arange(1, len(attended_N) + 1), 0)
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
                f"{self.path}: label holds {int(negative[0])}, which is neither a token id nor {IGNORED_LABEL}, the "
                f"label that is out of the loss: write {IGNORED_LABEL} where nothing is to be predicted"
            )
        if self.vocab_size is not None and largest >= self.vocab_size:
            raise UserError(
                f"{self.path} holds token id {largest}, but model.vocab_size={self.vocab_size}: "
                f"set model.vocab_size to at least {largest + 1}"
            )


def _flatten(column: Any) -> tuple[np.ndarray, np.ndarray]:
    """(values of all rows as int32, length of each row) of a list column; a missing list is an empty one."""
    import pyarrow.compute as pc

    values = column.flatten().to_numpy(zero_copy_only=False).astype(np.int32, copy=False)
    lengths = pc.call_function("list_value_length", [column]).fill_null(0)
    return values, lengths.to_numpy(zero_copy_only=False).astype(np.int64)
