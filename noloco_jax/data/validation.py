"""Batches to evaluate on: all documents of one source, or of several in the order of a mixture.

Shapes: B sequences of T tokens.
"""

import itertools
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import numpy as np

from noloco_jax.data.documents import Loader, ReplicaDocuments, read_documents
from noloco_jax.data.mixture import Mixture
from noloco_jax.data.packing import HostBatch, HostSequence, Packer
from noloco_jax.data.positions import start_position
from noloco_jax.data.source import EncodeTexts, Source
from noloco_jax.errors import UserError
from noloco_jax.labels import IGNORED_LABEL

if TYPE_CHECKING:
    from noloco_jax.config import DataConfig


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
    loader = Loader(sources, encode)
    with ExitStack() as stack:
        sequences = {
            name: stack.enter_context(closing(_sequences(ReplicaDocuments(name, source, 0, 1), loader, config)))
            for name, source in sources.items()
        }
        rows: list[HostSequence] = []
        for place in itertools.count():
            row = next(sequences[mixture.source_at(place)], None)
            if row is None:
                break
            rows.append(row)
            if len(rows) == config.batch_size:
                yield _stacked(rows)
                rows = []
    if rows:
        ignored = {key: np.full_like(x, IGNORED_LABEL if key == "labels" else 0) for key, x in rows[0].items()}
        yield _stacked(rows + [ignored] * (config.batch_size - len(rows)))


def _stacked(rows: list[HostSequence]) -> HostBatch:
    return {key: np.stack([row[key] for row in rows]) for key in rows[0]}


def _sequences(documents: ReplicaDocuments, loader: Loader, config: "DataConfig") -> Generator[HostSequence]:
    """Yield the documents of one epoch as sequences; the last one may be filled up with ignored labels."""
    source, any_yet = documents.source, False
    packer = Packer(source.num_columns, config.sequence_length, document_mask=config.document_mask)
    with closing(read_documents(documents, start_position(0, 1), loader, last_epoch=0)) as read:
        for tokens, position in read:
            packer.add(tokens, position)
            while packer.full:
                any_yet = True
                yield packer.pop()
    rest = packer.pop_rest()
    if rest is not None:
        yield rest
    elif not any_yet:
        field = source.options.field
        others = f"another {field}" if field.startswith("--") else source.options.beside("validation_path")
        raise UserError(f"the validation documents of {source.name} hold no token to predict: give {others}")
