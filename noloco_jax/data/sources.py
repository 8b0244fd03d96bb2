"""The data set that a configuration names."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from noloco_jax.data.c4 import C4Source
from noloco_jax.data.lanes import Source
from noloco_jax.data.order import Encode, Wanted
from noloco_jax.data.parquet import ParquetSource
from noloco_jax.data.text import TextSource, piece_bytes
from noloco_jax.data.tokenizers import DocumentEncoder, Tokenizer
from noloco_jax.errors import UserError

if TYPE_CHECKING:
    from noloco_jax.config.fields import DataConfig


_TOKEN_BYTES = 4  # of a token of text, about, for any vocabulary


def _no_encoder(texts: Sequence[str]) -> list[np.ndarray]:
    raise AssertionError("documents were to be encoded without a tokenizer")


def open_source(
    config: "DataConfig", tokenizer: Tokenizer | None, *, validation: bool, seed: int, vocab_size: int | None
) -> Source:
    """The training or the validation documents of `config`; the latter in an order that no seed changes.

    `tokenizer` may be None where nothing will be tokenized. Raises `UserError` for what is missing or of another form.
    """
    if not config.path:
        raise UserError('data.path is "": name the folder or file with the training data')
    apart = bool(config.validation_path) and validation
    path, field = (config.validation_path, "data.validation_path") if apart else (config.path, "data.path")
    split = "all" if config.validation_path else "held_out" if validation else "rest"
    seed, shuffle_buffer = (0, 1) if validation else (seed, config.shuffle_buffer)
    wanted = Wanted(path, field, split, seed, shuffle_buffer)
    encode: Encode = _no_encoder
    if tokenizer is not None:
        encode = DocumentEncoder(tokenizer, add_bos=config.add_bos, add_eos=config.add_eos)
    if config.kind == "c4":
        return C4Source(wanted._replace(split="validation" if validation else "train"), encode)
    if config.kind == "text":
        # Validation too is shuffled: the first file in order stands for no other.
        piece = piece_bytes(config.sequence_length, 1 if config.tokenizer == "byte" else _TOKEN_BYTES)
        return TextSource(wanted._replace(shuffle_buffer=config.shuffle_buffer), piece, encode)
    if config.kind == "parquet":
        return ParquetSource(wanted, config.sequence_length, vocab_size)
    raise UserError(f'data.kind={config.kind!r}: the kinds are "c4", "parquet" and "text"')


def check_data(config: "DataConfig", *, num_replicas: int = 1, vocab_size: int | None = None) -> None:
    """Finds in a moment what training and validation on `config` would stumble over.

    Looks at folders, file names, the schema of every Parquet file, the first document or row, and whether
    `num_replicas` get a document each. What lies deeper (a truncated shard) shows when it is read.
    Raises `UserError`.
    """
    for validation in (False, True):
        source = open_source(config, None, validation=validation, seed=0, vocab_size=vocab_size)
        source.check_replicas(1 if validation else num_replicas)
