"""Packed sequences with their segments, and the same documents each alone."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from noloco_jax.config import ModelConfig
from noloco_jax.labels import IGNORED_LABEL
from noloco_jax.model.llama import Llama


class Piece(NamedTuple):
    """Where a document stands."""

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


def loss_alone(config: ModelConfig, params: Any, batch: dict[str, np.ndarray], lengths: list[list[int]]) -> jax.Array:
    """The summed loss of a batch's labels, of every document by itself in a forward pass of its own."""
    model, total = Llama.from_params(config, params), jnp.float32(0)
    for _, (row, start, stop) in pieces(lengths):
        ids_1T = jnp.asarray(batch["input_ids"][row, start:stop])[None]
        log_p_TV = jax.nn.log_softmax(model(ids_1T)[0, :-1])
        total -= jnp.take_along_axis(log_p_TV, ids_1T[0, 1:, None], axis=-1).sum()
    return total
