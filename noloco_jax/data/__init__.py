"""Batches from files: sources, tokenizers, packing, and one checkpointable stream a replica."""

from noloco_jax.data.from_config import check_data, needs_tokenizer, open_documents
from noloco_jax.data.packing import HostBatch
from noloco_jax.data.positions import redistribute, renumbered
from noloco_jax.data.stream import ReplicaStreams, Stream, data_facts, train_stream
from noloco_jax.data.tokenizers import ByteTokenizer, Tokenizer, check_vocabulary, load_tokenizer, makes_same_ids
from noloco_jax.data.validation import batches_of, validation_batches, validation_by_source

__all__ = [
    "ByteTokenizer",
    "HostBatch",
    "ReplicaStreams",
    "Stream",
    "Tokenizer",
    "batches_of",
    "check_data",
    "check_vocabulary",
    "data_facts",
    "load_tokenizer",
    "makes_same_ids",
    "needs_tokenizer",
    "open_documents",
    "redistribute",
    "renumbered",
    "train_stream",
    "validation_batches",
    "validation_by_source",
]
