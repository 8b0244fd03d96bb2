"""Opening and checking of the data sets that a configuration names, and the order of several."""

import itertools
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from noloco_jax.data.find_files import split_files
from noloco_jax.data.json_lines import SUFFIXES as JSON_LINES_SUFFIXES
from noloco_jax.data.json_lines import JsonLinesSource, find_c4_files
from noloco_jax.data.parquet import SUFFIXES as PARQUET_SUFFIXES
from noloco_jax.data.parquet import ParquetSource
from noloco_jax.data.source import GOLDEN_STEP, EncodeTexts, Source, SourceOptions
from noloco_jax.data.text import TextSource, piece_bytes
from noloco_jax.data.tokenizers import DocumentEncoder, Tokenizer
from noloco_jax.errors import UserError
from noloco_jax.storage.addresses import is_remote

if TYPE_CHECKING:
    from noloco_jax.config import DataConfig


_MIXTURE = "data.mixture."
_SPAN = 2**64
_LONG_PIECE = 1 << 20  # of a text that is evaluated, so that BOS and EOS between its pieces hardly count
_BYTES_PER_TOKEN = 4  # roughly, of text, for any vocabulary of subwords


def _no_encoder(texts: Sequence[str]) -> list[np.ndarray]:
    raise AssertionError("there is no tokenizer to encode the documents with")


def configs_by_source(config: "DataConfig") -> dict[str, "DataConfig"]:
    """Return each source's configuration as if it were the only one, by the group of its fields: "data.mixture.web".

    The only one itself is "data".
    """
    if config.kind != "mixture":
        return {"data": config}
    return {
        _group(name): replace(
            config,
            kind=source.kind,
            path=source.path,
            validation_path=source.validation_path,
            text_column=source.text_column,
        )
        for name, source in config.mixture.items()
    }


class Mixture:
    """A fixed order of sources in which each has its share of the places.

    Place k belongs to the source in whose part of [0, 1) the point k times the golden ratio modulo 1 lies. Each point
    falls into one of the largest gaps that those before it left (Knuth, The Art of Computer Programming, volume 3,
    section 6.4), so that any consecutive places, wherever they begin, have every source in its share but for a few.
    Nothing but k has to be remembered, and the weights may change at any place.
    """

    def __init__(self, weights: Mapping[str, float]):
        total = sum(map(Fraction, weights.values()))
        self.shares = {name: float(Fraction(weight) / total) for name, weight in weights.items()}
        self._names = tuple(weights)
        ends = itertools.accumulate(map(Fraction, weights.values()))
        self._ends = [int(_SPAN * end / total) for end in ends][:-1]

    def source_at(self, place: int) -> str:
        """Return the name of the source of the sequence at `place`, counted from 0."""
        return self._names[bisect_right(self._ends, place * GOLDEN_STEP % _SPAN)]


def mixture_of(config: "DataConfig") -> Mixture:
    """Return the order of the sources, with the keys of `configs_by_source`."""
    if config.kind != "mixture":
        return Mixture({"data": 1.0})
    return Mixture({_group(name): source.weight for name, source in config.mixture.items()})


def _group(name: str) -> str:
    return f"{_MIXTURE}{name}"


def source_name(group: str) -> str:
    """Return the name in `data.mixture` of the source with the fields of `group`."""
    return group.removeprefix(_MIXTURE)


def open_sources(
    config: "DataConfig", tokenizer: Tokenizer | None, *, validation: bool, seed: int, vocab_size: int | None
) -> dict[str, Source]:
    """Open the training or the validation documents of `config`; the latter in an order that no seed changes.

    `tokenizer` may be None where nothing will be tokenized. The keys are those of `configs_by_source`. Raises
    `UserError` for data that are missing or of another form.
    """
    return {
        group: open_source(one, tokenizer, validation=validation, seed=seed, vocab_size=vocab_size, group=group)
        for group, one in configs_by_source(config).items()
    }


def open_source(
    config: "DataConfig",
    tokenizer: Tokenizer | None,
    *,
    validation: bool,
    seed: int,
    vocab_size: int | None,
    group: str = "data",
) -> Source:
    """Open the source of a configuration that has one, whose fields are those of `group` in error messages."""
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
    return _source(config, options, tokenizer, vocab_size, piece)


def open_documents(
    config: "DataConfig", tokenizer: Tokenizer | None, *, field: str, vocab_size: int | None = None
) -> Source:
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
    return _source(config, options, tokenizer, vocab_size, _LONG_PIECE)


def _source(
    config: "DataConfig", options: SourceOptions, tokenizer: Tokenizer | None, vocab_size: int | None, piece: int
) -> Source:
    """Open the documents of `options` as `config.kind`; texts in pieces of so many bytes."""
    encode: EncodeTexts = _no_encoder
    if tokenizer is not None:
        encode = DocumentEncoder(tokenizer, add_bos=config.add_bos, add_eos=config.add_eos, vocab_size=vocab_size)
    if config.kind == "text":
        return TextSource(options, piece, encode)
    if config.kind == "c4":
        return JsonLinesSource(options, find_c4_files(options), "all", config.kind, encode)
    if config.kind == "jsonl":
        files, part = split_files(options, JSON_LINES_SUFFIXES)
        return JsonLinesSource(options, files, part, config.kind, encode)
    if config.kind == "parquet":
        files, part = split_files(options, PARQUET_SUFFIXES)
        return ParquetSource(options, files, part, encode, config.sequence_length, vocab_size)
    raise UserError(f'{options.kind_field}={config.kind!r}: the kinds are "c4", "jsonl", "parquet" and "text"')


def _same_place(path: str, other: str) -> bool:
    first, second = (Path(name).expanduser().resolve() for name in (path, other))
    return first == second or (first.is_file() and second.is_file() and first.samefile(second))


def needs_tokenizer(config: "DataConfig") -> bool:
    """Return True if `config` names texts to be tokenized, not tokens. Raises `UserError` as `check_data` does."""
    if any(one.kind != "parquet" for one in configs_by_source(config).values()):
        return True
    splits = [open_sources(config, None, validation=which, seed=0, vocab_size=None) for which in (False, True)]
    return any(source.num_columns == 1 for sources in splits for source in sources.values())


def check_data(config: "DataConfig", *, num_replicas: int = 1, vocab_size: int | None = None) -> None:
    """Raise `UserError` for what can be found in a moment to be wrong with the data of `config`.

    Checks the folders, file names, the schema of every Parquet file, the first document or row, and that each of
    `num_replicas` gets a document. Errors deeper inside (a truncated file) show when they are read.
    """
    opened = []
    for validation in (False, True):
        opened.append(open_sources(config, None, validation=validation, seed=0, vocab_size=vocab_size))
        for source in opened[-1].values():
            source.check_replicas(1 if validation else num_replicas)
    _check_apart(*opened)


def _check_apart(training: Mapping[str, Source], validation: Mapping[str, Source]) -> None:
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
