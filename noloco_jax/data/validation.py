"""Batches to validate on.

Shapes: B sequences of T tokens.
"""

from collections.abc import Generator
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import numpy as np

from noloco_jax.data.from_config import mixture_of, open_sources
from noloco_jax.data.packing import HostBatch, Packer
from noloco_jax.data.positions import start_position
from noloco_jax.data.source import Source
from noloco_jax.data.tokenizers import Tokenizer
from noloco_jax.errors import UserError
from noloco_jax.labels import IGNORED_LABEL

if TYPE_CHECKING:
    from noloco_jax.config import DataConfig


def validation_batches(
    config: "DataConfig",
    tokenizer: Tokenizer | None,
    *,
    num_batches: int,
    batch_size: int | None = None,
    vocab_size: int | None = None,
) -> list[HostBatch]:
    """The first `num_batches` batches of the validation documents in an order that no seed changes.

    Of a mixture, each source has its share of the sequences. There are fewer batches where the documents, those of any
    source, hold fewer: none is repeated, and the last one is filled up with ignored labels. Arguments and errors are
    those of `train_stream`; documents without a label to score are an error too.
    """
    sources = open_sources(config, tokenizer, validation=True, seed=0, vocab_size=vocab_size)
    mixture = mixture_of(config)
    batch_size = config.batch_size if batch_size is None else batch_size
    found: list[HostBatch] = []
    with ExitStack() as stack:
        iterators = {
            group: stack.enter_context(closing(_sequences(group, source, config))) for group, source in sources.items()
        }
        for place in range(num_batches * batch_size):
            sequence = next(iterators[mixture.source_at(place)], None)
            if sequence is None:
                break
            found.append(sequence)
    return [_batch(found[start : start + batch_size], batch_size) for start in range(0, len(found), batch_size)]


def _sequences(group: str, source: Source, config: "DataConfig") -> Generator[HostBatch]:
    """The documents as batches of one sequence; the last one may be filled up with ignored labels."""
    packer = Packer(source.num_columns, 1, config.sequence_length, document_mask=config.document_mask)
    position = start_position(0, 1)  # nobody asks where these batches end
    start, any_yet = 0, False
    with closing(source.open_shard(0, 0, 1, ())) as shard:
        while True:
            records = [shard.get(start + k) for k in range(source.chunk_size)]
            for document in source.load([record for record in records if record is not None]):
                packer.add(document, position)
            while packer.full:
                any_yet = True
                yield packer.pop()
            start += source.chunk_size
            if records[-1] is None:
                break
    rest = packer.pop_rest()
    if rest is not None:
        yield rest
    elif not any_yet:
        raise UserError(
            f"the validation documents of {source.name} hold no token to predict: give {group}.validation_path"
        )


def _batch(sequences: list[HostBatch], batch_size: int) -> HostBatch:
    """The sequences one below the other, and below them as many with ignored labels as are missing."""
    first = sequences[0]
    ignored = {key: np.full_like(array, IGNORED_LABEL if key == "labels" else 0) for key, array in first.items()}
    rows = [*sequences, *[ignored] * (batch_size - len(sequences))]
    return {key: np.concatenate([row[key] for row in rows]) for key in first}
