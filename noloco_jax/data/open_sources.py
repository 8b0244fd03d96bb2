"""Opening of the data sets that a configuration names."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from noloco_jax.data.find_files import split_files
from noloco_jax.data.json_lines import SUFFIXES as JSON_LINES_SUFFIXES
from noloco_jax.data.json_lines import JsonLinesSource, find_c4_files
from noloco_jax.data.mixture import configs_by_source
from noloco_jax.data.parquet import SUFFIXES as PARQUET_SUFFIXES
from noloco_jax.data.parquet import ParquetSource
from noloco_jax.data.source import EncodeTexts, Source, SourceOptions
from noloco_jax.data.text import TextSource, piece_bytes
from noloco_jax.data.tokenizers import DocumentEncoder, Tokenizer
from noloco_jax.errors import UserError
from noloco_jax.storage.addresses import is_remote

if TYPE_CHECKING:
    from noloco_jax.config import DataConfig

_LONG_PIECE = 1 << 20  # of a text that is evaluated, so that BOS and EOS between its pieces hardly count
_BYTES_PER_TOKEN = 4  # roughly, of text, for any vocabulary of subwords


def encoder_of(config: "DataConfig", tokenizer: Tokenizer | None, vocab_size: int | None) -> EncodeTexts:
    """Return what makes tokens of a configuration's texts; `tokenizer` may be None where there are no texts."""
    if tokenizer is None:
        return _no_encoder
    return DocumentEncoder(tokenizer, add_bos=config.add_bos, add_eos=config.add_eos, vocab_size=vocab_size)


def _no_encoder(texts: Sequence[str]) -> list[np.ndarray]:
    raise AssertionError("there is no tokenizer to encode the documents with")


def open_source(
    config: "DataConfig", *, validation: bool, seed: int, vocab_size: int | None, group: str = "data"
) -> Source:
    """Open the training or the validation documents of a configuration of one source.

    Args:
      config: the source's configuration, see `configs_by_source`.
      validation: whether to open the validation documents, whose order no seed changes.
      seed: seed of the shuffles.
      vocab_size: the model's, which the ids in Parquet files must fit; unchecked if None.
      group: the group of its fields in error messages.

    Raises:
      UserError: for data that are missing or of another form.
    """
    if not config.path:
        raise UserError(f'{group}.path is "": name the folder or file with the training data')
    if config.kind != "c4" and config.validation_path and _same_place(config.path, config.validation_path):
        raise UserError(
            f"{group}.validation_path={config.validation_path!r} is {group}.path: give other data, or leave it empty "
            f"for a part of {group}.path to be held out"
        )
    options = SourceOptions(
        path=config.path,
        field=f"{group}.path",
        split="validation" if validation else "train",
        holds_both_splits=not config.validation_path,
        exclude=config.validation_path,
        seed=seed,
        shuffle_buffer=config.shuffle_buffer,
        on_bad_shard=config.on_bad_shard,
        text_column=config.text_column,
    )
    if validation:
        options = options._replace(seed=0)
        if config.kind != "text":  # whose first batches must not come from the first file alone
            options = options._replace(shuffle_buffer=1)
        if config.validation_path:
            options = options._replace(path=config.validation_path, field=options.validation_field, exclude=config.path)
    piece = piece_bytes(config.sequence_length, 1 if config.tokenizer == "byte" else _BYTES_PER_TOKEN)
    return _source(config, options, vocab_size, piece)


def open_documents(config: "DataConfig", *, field: str, vocab_size: int | None = None) -> Source:
    """Open all documents below `config.path`, which `field` names in error messages, in the order of the files.

    Of kind "c4" those named validation. A long text is cut into pieces of a MiB, whatever the length of sequences.
    """
    options = SourceOptions(
        path=config.path,
        field=field,
        split="validation" if config.kind == "c4" else "all",
        holds_both_splits=False,
        exclude="",
        seed=0,
        shuffle_buffer=1,
        on_bad_shard=config.on_bad_shard,
        text_column=config.text_column,
    )
    return _source(config, options, vocab_size, _LONG_PIECE)


def _source(config: "DataConfig", options: SourceOptions, vocab_size: int | None, piece: int) -> Source:
    """Open the documents of `options` as `config.kind`; texts in pieces of so many bytes."""
    if config.kind == "text":
        return TextSource(options, piece)
    if config.kind == "c4":
        return JsonLinesSource(options, find_c4_files(options), "all", config.kind)
    if config.kind == "jsonl":
        files, part = split_files(options, JSON_LINES_SUFFIXES)
        return JsonLinesSource(options, files, part, config.kind)
    if config.kind == "parquet":
        files, part = split_files(options, PARQUET_SUFFIXES)
        return ParquetSource(options, files, part, config.sequence_length, vocab_size)
    raise UserError(f'{options.kind_field}={config.kind!r}: the kinds are "c4", "jsonl", "parquet" and "text"')


def _same_place(path: str, other: str) -> bool:
    if is_remote(path) or is_remote(other):
        return path.rstrip("/") == other.rstrip("/")
    return Path(path).expanduser().resolve() == Path(other).expanduser().resolve()


def open_sources(config: "DataConfig", *, validation: bool, seed: int, vocab_size: int | None) -> dict[str, Source]:
    """Open each source of a configuration, see `open_source`, with the keys of `configs_by_source`."""
    return {
        group: open_source(one, validation=validation, seed=seed, vocab_size=vocab_size, group=group)
        for group, one in configs_by_source(config).items()
    }


def check_apart(training: Mapping[str, Source], validation: Mapping[str, Source]) -> None:
    """Raise `UserError` where one source of a mixture trains on files whose documents validate another.

    Two that read the same files, and hold documents out of them, hold the same ones out.
    """
    trained_on, validating = (
        {group: (list(map(_real, source.files)), source.part, type(source)) for group, source in sources.items()}
        for sources in (training, validation)
    )
    for group, (ours, held_out, kind) in validating.items():
        for other, (theirs, rest, other_kind) in trained_on.items():
            are_apart = (held_out, rest) == ("held_out", "rest") and ours == theirs and kind is other_kind
            if other == group or are_apart:
                continue
            if common := set(ours) & set(theirs):
                raise UserError(
                    f"{other} trains on {min(common)}, of which documents validate {group}: give the two other files, "
                    f"or one validation_path outside of what {other} reads"
                )


def _real(file: str) -> str:
    return file if is_remote(file) else os.path.realpath(file)
