"""Documents of a run: their sources, training streams and validation batches.

Shapes: B sequences of T tokens.
"""

import functools
import itertools
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from noloco_jax.data.documents import Loader, ReplicaDocuments, sequences
from noloco_jax.data.find_files import RARE_JSON_LINES, SUFFIXES, log_once, real_path, split_files
from noloco_jax.data.json_lines import JsonLinesSource
from noloco_jax.data.packing import HostBatch, HostSequence, as_batch
from noloco_jax.data.positions import DataPosition, start_position
from noloco_jax.data.source import IGNORED_LABEL, EncodeTexts, Source, SourceOptions
from noloco_jax.data.stream import Mixture, ReplicaStreams, Stream
from noloco_jax.data.text import TextSource, piece_bytes
from noloco_jax.data.tokenizers import DocumentEncoder, Tokenizer
from noloco_jax.errors import UserError

if TYPE_CHECKING:
    from noloco_jax.config import DataConfig

_LONG_PIECE = 1 << 20  # of a text that is evaluated, so that BOS and EOS between its pieces hardly count
_BYTES_PER_TOKEN = 4  # roughly, of text, for any vocabulary of subwords
_MIXTURE = "data.mixture."


class RunData:
    """The training and the validation documents that a configuration names, each opened when it is first needed.

    Every method raises `UserError` for data that are missing or of another form.

    Args:
      config: the data.
      seed: seed of the order to train in; validation has an order of its own.
      vocab_size: the model's, which token ids must fit; unchecked if None.
    """

    def __init__(self, config: "DataConfig", *, seed: int, vocab_size: int | None = None):
        self.config, self._seed, self._vocab_size = config, seed, vocab_size
        self._mixture, self._configs = mixture_of(config), configs_by_source(config)

    @functools.cached_property
    def training(self) -> Mapping[str, Source]:
        """The sources to train on, with the keys of `configs_by_source`."""
        return self._open(validation=False)

    @functools.cached_property
    def validation(self) -> Mapping[str, Source]:
        """The sources of validation documents."""
        return self._open(validation=True)

    def _open(self, *, validation: bool) -> dict[str, Source]:
        options: Any = {"validation": validation, "seed": self._seed, "vocab_size": self._vocab_size}
        return {group: open_source(one, **options, group=group) for group, one in self._configs.items()}

    @functools.cached_property
    def needs_tokenizer(self) -> bool:
        """True if the data are texts, False if they are token ids."""
        if any(one.kind != "parquet" for one in self._configs.values()):
            return True
        return any(source.num_columns == 1 for split in (self.training, self.validation) for source in split.values())

    def check(self, num_replicas: int) -> None:
        """Raise `UserError` for mistakes that show without reading the data through.

        Checks the folders, file names, the schema of every Parquet file, the first document or row, and that each of
        `num_replicas` gets a document. Errors deeper inside (a truncated file) show when they are read.
        """
        for source in self.training.values():
            source.check_replicas(num_replicas)
        for source in self.validation.values():
            source.check_replicas(1)

    def facts(self, tokenizer: Tokenizer | None) -> dict[str, Any]:
        """Return facts that identify the training data and their tokens; a position is valid for equal facts only."""
        config, sources = self.config, self.training
        if list(sources) == ["data"]:
            facts: dict[str, Any] = dict(sources["data"].fingerprint)
        else:
            facts = {"kind": "mixture"}
            for group, source in sources.items():
                facts |= {f"{group} {name}": fact for name, fact in source.fingerprint.items()}
        facts["shuffle_buffer"] = config.shuffle_buffer
        if tokenizer is not None and any(source.num_columns == 1 for source in sources.values()):
            facts |= {"tokenizer": tokenizer.fingerprint, "add_bos": config.add_bos, "add_eos": config.add_eos}
        return facts | {"seed": self._seed}

    def streams(self, tokenizer: Tokenizer | None, replicas: Mapping[int, int], num_replicas: int) -> ReplicaStreams:
        """Open the training batches of some replicas: epoch after epoch of each one's share of the documents.

        The batches are a function of the configuration, seed and tokenizer alone. In every epoch each document goes to
        exactly one replica, in an order drawn from the seed and the epoch. Replicas with unequal shares begin the next
        epoch at different steps; one that joined later reads all documents: see `positions.share`. A sequence is of one
        source, and each source has its own epochs. A thread for each replica reads and packs, and tokenizes unless
        processes do.

        Args:
          tokenizer: may be None for data that are tokens already, see `needs_tokenizer`.
          replicas: a replica's name in the result -> its number among those that share the data.
          num_replicas: the number among which the data are divided.

        Raises:
          UserError: for a replica that would get no document. A stream itself raises it where it meets a damaged file.
        """
        config, sources = self.config, self.training
        for source in sources.values():
            source.check_replicas(num_replicas)
        encode = encoder_of(config, tokenizer, self._vocab_size)
        loader = Loader(sources, encode, config.num_workers, len(replicas))
        facts = self.facts(tokenizer)

        def open_stream(replica: int) -> Stream:
            if replica < 0:
                raise UserError(f"replica {replica} of {num_replicas}: replicas are numbered from 0")

            def open_sequences(name: str, position: DataPosition) -> Generator[tuple[HostSequence, DataPosition]]:
                documents = ReplicaDocuments(name, sources[name], replica, num_replicas)
                return sequences(documents, position, config.sequence_length, config.document_mask, loader)

            identity = {"replica": replica, "num_replicas": num_replicas, "source": facts}
            return Stream(open_sequences, self._mixture, config.batch_size, identity)

        streams = {name: open_stream(replica) for name, replica in replicas.items()}
        return ReplicaStreams(streams, loader.close)

    def validation_batches(self, tokenizer: Tokenizer | None, num_batches: int) -> list[HostBatch]:
        """Return the first `num_batches` batches of the validation documents in an order that no seed changes.

        Of a mixture, each source has its share of the sequences. There are fewer batches where the documents, those of
        any source, hold fewer: none is repeated, and the last one is filled up with ignored labels. A warning says that
        they do not fill a single sequence. Raises `UserError` for documents without a label to score.
        """
        encode = encoder_of(self.config, tokenizer, self._vocab_size)
        batches = interleaved_batches(self.validation, self._mixture, encode, self.config)
        read = list(itertools.islice(batches, num_batches))
        if len(read) == 1 and next(batches, None) is None:
            self._warn_if_short(read[0]["labels"] != IGNORED_LABEL)
        return read

    def _warn_if_short(self, scored_BT: np.ndarray) -> None:
        """Print a warning if the only validation batch does not fill one sequence."""
        length = self.config.sequence_length
        if scored_BT.any(axis=1).sum() == 1 and scored_BT.sum() < length - 1:  # a row's last token may have no label
            log_once(
                f"warning: data.sequence_length={length}, but the validation documents hold only "
                f"{scored_BT.sum()} tokens to predict: lower it, or give more by data.validation_path"
            )

    def validation_by_source(self, tokenizer: Tokenizer | None, num_batches: int) -> dict[str, Sequence[HostBatch]]:
        """Return the name of each source of a mixture -> its validation batches, as if it were the only one.

        Empty for data that are no mixture.
        """
        if self.config.kind != "mixture":
            return {}
        encode = encoder_of(self.config, tokenizer, self._vocab_size)
        return {
            source_name(group): list(itertools.islice(batches_of(source, encode, self.config), num_batches))
            for group, source in self.validation.items()
        }


def encoder_of(config: "DataConfig", tokenizer: Tokenizer | None, vocab_size: int | None) -> EncodeTexts:
    """Return the encoder of a configuration's texts; `tokenizer` may be None for data that are token ids."""
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
    """Open the documents of `options` in the format `config.kind`; long texts are cut into pieces of `piece` bytes."""
    if config.kind == "text":
        return TextSource(options, piece)
    if config.kind == "jsonl":
        return JsonLinesSource(options, *split_files(options, SUFFIXES["jsonl"], RARE_JSON_LINES))
    if config.kind == "parquet":
        from noloco_jax.data.parquet import ParquetSource  # pyarrow starts threads

        files = split_files(options, SUFFIXES["parquet"])
        return ParquetSource(options, *files, config.sequence_length, vocab_size)
    raise UserError(f'{options.beside("kind")}={config.kind!r}: the kinds are "jsonl", "parquet" and "text"')


def batches_of(source: Source, encode: EncodeTexts, config: "DataConfig") -> Iterator[HostBatch]:
    """Return an iterator over batches of all documents of a source, the last one filled up with ignored labels.

    Args:
      source: documents that are not divided among replicas.
      encode: makes tokens of its texts.
      config: batch size, sequence length and document mask; the rest has no effect.

    Raises:
      UserError: for documents without a label to score, and where the files are damaged.
    """
    return interleaved_batches({"": source}, Mixture({"": 1.0}), encode, config)


def interleaved_batches(
    sources: Mapping[str, Source], mixture: Mixture, encode: EncodeTexts, config: "DataConfig"
) -> Generator[HostBatch]:
    """Yield batches of the sources' sequences in the order of `mixture` until one has no more."""
    loader, start = Loader(sources, encode), start_position(0, 1)

    def in_order(name: str, source: Source) -> Generator[tuple[HostSequence, DataPosition]]:
        documents = ReplicaDocuments(name, source, 0, 1)
        return sequences(documents, start, config.sequence_length, config.document_mask, loader, last_epoch=0)

    with ExitStack() as stack:
        read = {name: stack.enter_context(closing(in_order(name, source))) for name, source in sources.items()}
        rows: list[HostSequence] = []
        for place in itertools.count():
            found = next(read[mixture.source_at(place)], None)
            if found is None:
                break
            rows.append(found[0])
            if len(rows) == config.batch_size:
                yield as_batch(rows)
                rows = []
    if rows:
        ignored = {key: np.full_like(x, IGNORED_LABEL if key == "labels" else 0) for key, x in rows[0].items()}
        yield as_batch(rows + [ignored] * (config.batch_size - len(rows)))


def configs_by_source(config: "DataConfig") -> dict[str, "DataConfig"]:
    """Return each source's configuration as if it were the only one, by the group of its fields: "data.mixture.web".

    The only one itself is "data".
    """
    if config.kind != "mixture":
        return {"data": config}
    return {
        f"{_MIXTURE}{name}": replace(
            config,
            kind=source.kind,
            path=source.path,
            validation_path=source.validation_path,
            text_column=source.text_column,
        )
        for name, source in config.mixture.items()
    }


def mixture_of(config: "DataConfig") -> Mixture:
    """Return the order of the sources, with the keys of `configs_by_source`."""
    if config.kind != "mixture":
        return Mixture({"data": 1.0})
    return Mixture({f"{_MIXTURE}{name}": source.weight for name, source in config.mixture.items()})


def source_name(group: str) -> str:
    """Return the name in `data.mixture` of the source with the fields of `group`."""
    return group.removeprefix(_MIXTURE)
