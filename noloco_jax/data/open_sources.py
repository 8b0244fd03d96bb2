"""Opening of the data sets that a configuration names."""

from typing import TYPE_CHECKING, Any

from noloco_jax.data.find_files import RARE_JSON_LINES, SUFFIXES, real_path, split_files
from noloco_jax.data.json_lines import JsonLinesSource
from noloco_jax.data.parquet import ParquetSource
from noloco_jax.data.source import EncodeTexts, Source, SourceOptions
from noloco_jax.data.text import TextSource, piece_bytes
from noloco_jax.data.tokenizers import DocumentEncoder, Tokenizer
from noloco_jax.errors import UserError

if TYPE_CHECKING:
    from noloco_jax.config import DataConfig

_LONG_PIECE = 1 << 20  # of a text that is evaluated, so that BOS and EOS between its pieces hardly count
_BYTES_PER_TOKEN = 4  # roughly, of text, for any vocabulary of subwords


def encoder_of(config: "DataConfig", tokenizer: Tokenizer | None, vocab_size: int | None) -> EncodeTexts:
    """Return what makes tokens of a configuration's texts; `tokenizer` may be None where there are no texts."""
    if tokenizer is None:
        return _no_encoder
    return DocumentEncoder(tokenizer, add_bos=config.add_bos, add_eos=config.add_eos, vocab_size=vocab_size)


def _no_encoder(texts: Any) -> Any:
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
    path, validation_path = config.path, config.validation_path
    if not path:
        raise UserError(f'{group}.path is "": name the folder or file with the training data')
    if validation_path and real_path(path) == real_path(validation_path):
        raise UserError(
            f"{group}.validation_path={validation_path!r} is {group}.path: give other data, or leave it empty "
            f"for a part of {group}.path to be held out"
        )
    options = _options(config, f"{group}.path", "train", not validation_path)
    if not validation:
        options = options._replace(exclude=validation_path, seed=seed, shuffle_buffer=config.shuffle_buffer)
    else:
        options = options._replace(split="validation")
        if config.kind == "text":  # whose first batches must not come from the first file alone
            options = options._replace(shuffle_buffer=config.shuffle_buffer)
        if validation_path:
            options = options._replace(path=validation_path, field=options.beside("validation_path"), exclude=path)
    piece = piece_bytes(config.sequence_length, 1 if config.tokenizer == "byte" else _BYTES_PER_TOKEN)
    return _source(config, options, vocab_size, piece)


def open_documents(config: "DataConfig", *, field: str, vocab_size: int | None = None) -> Source:
    """Open the documents below `config.path`, which `field` names in error messages, in the order of the files.

    Of files that are named after a split, those of validation, or else of test. A long text is cut into pieces of a
    MiB, whatever the length of sequences.
    """
    return _source(config, _options(config, field, "validation", False), vocab_size, _LONG_PIECE)


def _options(config: "DataConfig", field: str, split: str, holds_both_splits: bool) -> SourceOptions:
    """Return the options of documents in the order of the files."""
    return SourceOptions(config.path, field, split, holds_both_splits, "", 0, 1, config.text_column)


def _source(config: "DataConfig", options: SourceOptions, vocab_size: int | None, piece: int) -> Source:
    """Open the documents of `options` as `config.kind`; texts in pieces of so many bytes."""
    if config.kind == "text":
        return TextSource(options, piece)
    if config.kind == "jsonl":
        return JsonLinesSource(options, *split_files(options, SUFFIXES["jsonl"], RARE_JSON_LINES))
    if config.kind == "parquet":
        files = split_files(options, SUFFIXES["parquet"])
        return ParquetSource(options, *files, config.sequence_length, vocab_size)
    raise UserError(f'{options.beside("kind")}={config.kind!r}: the kinds are "jsonl", "parquet" and "text"')
