"""Opens and checks the data set that a configuration names."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from noloco_jax.data.c4 import C4Source
from noloco_jax.data.parquet import ParquetSource
from noloco_jax.data.source import EncodeTexts, Source, SourceOptions
from noloco_jax.data.text import TextSource, piece_bytes
from noloco_jax.data.tokenizers import DocumentEncoder, Tokenizer
from noloco_jax.errors import UserError

if TYPE_CHECKING:
    from noloco_jax.config.fields import DataConfig


_BYTES_PER_TOKEN = 4  # of text, about, for any vocabulary of subwords


def _no_encoder(texts: Sequence[str]) -> list[np.ndarray]:
    raise AssertionError("there is no tokenizer to encode the documents with")


def open_source(
    config: "DataConfig", tokenizer: Tokenizer | None, *, validation: bool, seed: int, vocab_size: int | None
) -> Source:
    """The training or the validation documents of `config`; the latter in an order that no seed changes.

    `tokenizer` may be None where nothing will be tokenized. Raises `UserError` for data that are missing or of another
    form.
    """
    if not config.path:
        raise UserError('data.path is "": name the folder or file with the training data')
    path, field = config.path, "data.path"
    if validation and config.validation_path:
        path, field = config.validation_path, "data.validation_path"
    split = "all" if config.validation_path else "held_out" if validation else "rest"
    seed, shuffle_buffer = (0, 1) if validation else (seed, config.shuffle_buffer)
    options = SourceOptions(path, field, split, seed, shuffle_buffer)
    encode: EncodeTexts = _no_encoder
    if tokenizer is not None:
        encode = DocumentEncoder(tokenizer, add_bos=config.add_bos, add_eos=config.add_eos)
    if config.kind == "c4":
        return C4Source(options._replace(split="validation" if validation else "train"), encode)
    if config.kind == "text":
        # Validation is shuffled too: its first batches must not come from the first file alone.
        piece = piece_bytes(config.sequence_length, 1 if config.tokenizer == "byte" else _BYTES_PER_TOKEN)
        return TextSource(options._replace(shuffle_buffer=config.shuffle_buffer), piece, encode)
    if config.kind == "parquet":
        return ParquetSource(options, config.sequence_length, vocab_size)
    raise UserError(f'data.kind={config.kind!r}: the kinds are "c4", "parquet" and "text"')


def check_data(config: "DataConfig", *, num_replicas: int = 1, vocab_size: int | None = None) -> None:
    """Raises `UserError` for what can be found in a moment to be wrong with the data of `config`.

    Checks the folders, file names, the schema of every Parquet file, the first document or row, and that each of
    `num_replicas` gets a document. Errors deeper inside (a truncated file) show when they are read.
    """
    for validation in (False, True):
        source = open_source(config, None, validation=validation, seed=0, vocab_size=vocab_size)
        source.check_replicas(1 if validation else num_replicas)
