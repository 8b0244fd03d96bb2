"""The documents of a run, opened once: checks, facts, training streams and validation batches."""

import functools
import itertools
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from noloco_jax.data.documents import Loader, ReplicaDocuments, sequences
from noloco_jax.data.mixture import configs_by_source, mixture_of, source_name
from noloco_jax.data.open_sources import encoder_of, open_source
from noloco_jax.data.packing import HostBatch, HostSequence
from noloco_jax.data.positions import DataPosition
from noloco_jax.data.reading import tell_once
from noloco_jax.data.source import Source
from noloco_jax.data.stream import ReplicaStreams, Stream
from noloco_jax.data.tokenizers import Tokenizer
from noloco_jax.data.validation import batches_of, interleaved_batches
from noloco_jax.errors import UserError
from noloco_jax.labels import IGNORED_LABEL

if TYPE_CHECKING:
    from noloco_jax.config import DataConfig


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
        """True if there are texts to be tokenized, not tokens."""
        if any(one.kind != "parquet" for one in self._configs.values()):
            return True
        return any(source.num_columns == 1 for split in (self.training, self.validation) for source in split.values())

    def check(self, num_replicas: int) -> None:
        """Raise `UserError` for what can be found in a moment to be wrong.

        Checks the folders, file names, the schema of every Parquet file, the first document or row, and that each of
        `num_replicas` gets a document. Errors deeper inside (a truncated file) show when they are read.
        """
        for source in self.training.values():
            source.check_replicas(num_replicas)
        for source in self.validation.values():
            source.check_replicas(1)

    def facts(self, tokenizer: Tokenizer | None) -> dict[str, Any]:
        """Return the facts that tell the training data, and their tokens, from others; a position depends on them."""
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
            tell_once(
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
