"""Batches from files: sources, tokenizers, packing, and one checkpointable stream a replica."""

from noloco_jax.data.packing import HostBatch
from noloco_jax.data.positions import redistribute, renumbered
from noloco_jax.data.run_data import RunData
from noloco_jax.data.stream import ReplicaStreams, Stream
from noloco_jax.data.tokenizers import (
    ByteTokenizer,
    FastTokenizer,
    Tokenizer,
    check_vocabulary,
    load_tokenizer,
    makes_same_ids,
)

__all__ = [
    "ByteTokenizer",
    "FastTokenizer",
    "HostBatch",
    "ReplicaStreams",
    "RunData",
    "Stream",
    "Tokenizer",
    "check_vocabulary",
    "load_tokenizer",
    "makes_same_ids",
    "redistribute",
    "renumbered",
]
