"""Packed sequences with their segments, and the same documents each alone."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from noloco_jax.config import ModelConfig
from noloco_jax.data.source import IGNORED_LABEL
from noloco_jax.model import architecture


class Piece(NamedTuple):
    """Position of a document."""

    row: int
    start: int
    stop: int


def packed_batch(lengths: list[list[int]], vocab_size: int, seed: int = 0) -> dict[str, np.ndarray]:
    """One sequence of 16 for each list of its documents' lengths; what they leave is padding, with random ids."""
    rng = np.random.default_rng(seed)
    ids_BT = rng.integers(0, vocab_size, (len(lengths), 16), dtype=np.int32)
    labels_BT, segments_BT = np.full_like(ids_BT, IGNORED_LABEL), np.zeros_like(ids_BT)
    for number, (row, start, stop) in pieces(lengths):
        labels_BT[row, start : stop - 1] = ids_BT[row, start + 1 : stop]
        segments_BT[row, start:stop] = number
    return {"input_ids": ids_BT, "labels": labels_BT, "segment_ids": segments_BT}


def pieces(lengths: list[list[int]]) -> Iterator[tuple[int, Piece]]:
    """Each document's number in its row, from 1, and its place."""
    for row, of_row in enumerate(lengths):
        stops = np.cumsum(of_row).tolist()
        for number, (length, stop) in enumerate(zip(of_row, stops, strict=True), start=1):
            yield number, Piece(row, stop - length, stop)


def apart(batch: dict[str, np.ndarray], lengths: list[list[int]]) -> dict[str, np.ndarray]:
    """Give each document a row of its own without segments, from position 0; token 0 without a label follows it."""
    ids_NT = np.zeros((sum(map(len, lengths)), batch["input_ids"].shape[1]), np.int32)
    labels_NT = np.full_like(ids_NT, IGNORED_LABEL)
    for n, (_, (row, start, stop)) in enumerate(pieces(lengths)):
        ids_NT[n, : stop - start] = batch["input_ids"][row, start:stop]
        labels_NT[n, : stop - start - 1] = ids_NT[n, 1 : stop - start]
    return {"input_ids": ids_NT, "labels": labels_NT}


@functools.partial(jax.jit, static_argnums=0)
def loss_apart(config: ModelConfig, params: Any, rows: dict[str, np.ndarray]) -> jax.Array:
    """Sum the loss over the labels of documents that are `apart`, from the logits of a plain forward pass.

    The model's attention is causal, so what follows a document does not affect it.
    """
    log_p_NTV = jax.nn.log_softmax(architecture.from_params(config, params)(rows["input_ids"]))
    nll_NT = -jnp.take_along_axis(log_p_NTV, jnp.maximum(rows["labels"], 0)[..., None], axis=-1)[..., 0]
    return jnp.where(rows["labels"] == IGNORED_LABEL, 0.0, nll_NT).sum()
