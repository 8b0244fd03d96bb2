"""Batches to train and to validate on.

Shapes: B sequences of T tokens.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from noloco_jax.data.from_config import open_source
from noloco_jax.data.packing import HostBatch, Packer
from noloco_jax.data.positions import start_position
from noloco_jax.data.source import Source
from noloco_jax.data.tokenizers import Tokenizer
from noloco_jax.errors import UserError

if TYPE_CHECKING:
    import grain

    from noloco_jax.config import DataConfig


class Stream(Iterator[HostBatch]):
    """A replica's endless batches, each {"input_ids", "labels"}: int32 (B, T).

    The state is the position after the batches delivered, whatever has been prefetched. It is small and can be written
    as JSON. A stream of the same configuration that is set to it yields bitwise the batches that this one would.
    """

    def __init__(self, iterator: "grain.DatasetIterator[HostBatch]", identity: dict[str, Any]):
        self._open_iterator: grain.DatasetIterator[HostBatch] | None = iterator
        self._identity = identity

    @property
    def _iterator(self) -> "grain.DatasetIterator[HostBatch]":
        if self._open_iterator is None:
            raise ValueError("the stream is closed")
        return self._open_iterator

    def start(self) -> None:
        """Begins to make batches ahead of time; without it, the first one that is asked for does."""
        self._iterator.start_prefetch()

    def __next__(self) -> HostBatch:
        return next(self._iterator)

    @property
    def source(self) -> dict[str, Any]:
        """What tells its data and their tokens from others; a position is of use with the same alone."""
        return self._identity["source"]

    def get_state(self) -> dict[str, Any]:
        return self._identity | self._iterator.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues from a `get_state` of the same replica, or from a `redistribute`d one.

        Raises `UserError` for the state of another replica, number of replicas or data set.
        """
        if state["num_replicas"] != self._identity["num_replicas"]:
            raise UserError(
                f"num_replicas={self._identity['num_replicas']}, but the saved data position is one of "
                f"{state['num_replicas']} replicas: redistribute the positions, or restore the number"
            )
        if state["replica"] != self._identity["replica"]:
            raise UserError(
                f"the data position of replica {state['replica']} was given to replica {self._identity['replica']}: "
                "give each replica its own"
            )
        saved, mine = state["source"], self._identity["source"]
        for name in mine | saved:
            if saved.get(name) != mine.get(name):
                raise UserError(
                    f"the saved data position is of data with {name} {saved.get(name)!r}, this run's has "
                    f"{mine.get(name)!r}: restore the former data and configuration, or start afresh"
                )
        self._iterator.set_state(state)

    def close(self) -> None:
        """Ends the thread and the worker processes. The stream yields nothing afterwards."""
        if self._open_iterator is not None:
            self._open_iterator.close()
            self._open_iterator = None


def train_stream(
    config: "DataConfig",
    tokenizer: Tokenizer | None,
    *,
    replica: int,
    num_replicas: int,
    seed: int,
    batch_size: int | None = None,
    vocab_size: int | None = None,
) -> Stream:
    """The training batches of replica `replica` of `num_replicas`: epoch after epoch of its share of the documents.

    The batches are a function of the arguments alone. In every epoch each document goes to exactly one replica, in an
    order drawn from `seed` and the epoch. Replicas with unequal shares begin the next epoch at different steps.

    Args:
      tokenizer: may be None for data that are tokens already, see `needs_tokenizer`.
      batch_size: sequences per batch; `config.batch_size` if None.
      vocab_size: the model's, which the ids in Parquet files must fit; unchecked if None.

    With `config.num_workers` 0 a thread prefetches the batches; otherwise as many processes read and tokenize for this
    stream. The batches are the same.

    Raises `UserError` for data that are missing or of another form, and for a replica that would get no document. The
    stream itself raises it where it meets a damaged file.
    """
    # Grain takes a second to import.
    from noloco_jax.data.prefetch import ReplicaDocuments, closed_at_exit, prefetched_batches

    source = open_source(config, tokenizer, validation=False, seed=seed, vocab_size=vocab_size)
    if not 0 <= replica < num_replicas:
        raise UserError(f"replica {replica} of {num_replicas}: replicas are numbered from 0")
    source.check_replicas(num_replicas)
    identity = {
        "replica": replica,
        "num_replicas": num_replicas,
        "source": source.fingerprint | _what_tells_tokens_apart(config, tokenizer, source) | {"seed": seed},
    }
    iterator = prefetched_batches(
        ReplicaDocuments(source, replica, num_replicas),
        config.batch_size if batch_size is None else batch_size,
        config.sequence_length,
        config.num_workers,
        start_position(replica, num_replicas),
    )
    stream = Stream(iterator, identity)
    closed_at_exit.add(stream)
    return stream


def _what_tells_tokens_apart(config: "DataConfig", tokenizer: Tokenizer | None, source: Source) -> dict[str, Any]:
    """Besides files and seed, what a position depends on: it is an offset into a replica's tokens."""
    known: dict[str, Any] = {"shuffle_buffer": config.shuffle_buffer}
    if tokenizer is not None and source.num_columns == 1:
        known |= {"tokenizer": tokenizer.fingerprint, "add_bos": config.add_bos, "add_eos": config.add_eos}
    return known


def validation_batches(
    config: "DataConfig",
    tokenizer: Tokenizer | None,
    *,
    num_batches: int,
    batch_size: int | None = None,
    vocab_size: int | None = None,
) -> list[HostBatch]:
    """The first `num_batches` batches of the validation documents in an order that no seed changes.

    There are fewer where the documents hold fewer: none is repeated, and the last one is filled up with ignored labels.
    Arguments and errors are those of `train_stream`; documents without a label to score are an error too.
    """
    source = open_source(config, tokenizer, validation=True, seed=0, vocab_size=vocab_size)
    packer = Packer(source.num_columns, config.batch_size if batch_size is None else batch_size, config.sequence_length)
    position = start_position(0, 1)  # nobody asks where these batches end
    shard = source.open_shard(0, 0, 1, ())
    batches: list[HostBatch] = []
    start = 0
    try:
        while len(batches) < num_batches:
            records = [shard.get(start + k) for k in range(source.chunk_size)]
            for document in source.load([record for record in records if record is not None]):
                packer.add(document, position)
            while packer.full and len(batches) < num_batches:
                batches.append(packer.pop())
            start += source.chunk_size
            if records[-1] is None:
                rest = packer.pop_rest() if len(batches) < num_batches else None
                batches += [] if rest is None else [rest]
                break
    finally:
        shard.close()
    if num_batches and not batches:
        path = config.validation_path or config.path
        raise UserError(f"the validation documents of {path!r} hold no token to predict: give data.validation_path")
    return batches
