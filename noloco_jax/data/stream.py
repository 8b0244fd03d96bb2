"""Batches to train on.

Shapes: B sequences of T tokens.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from noloco_jax.data.from_config import mixture_of, open_sources
from noloco_jax.data.packing import HostBatch
from noloco_jax.data.positions import start_position
from noloco_jax.data.source import Source
from noloco_jax.data.tokenizers import Tokenizer
from noloco_jax.errors import UserError

if TYPE_CHECKING:
    import grain

    from noloco_jax.config import DataConfig

# Facts of a source that checkpoints of earlier versions do not have.
_NOT_ALWAYS_SAVED = ("sampled contents", "text column")


class Stream(Iterator[HostBatch]):
    """A replica's endless batches, each {"input_ids", "labels"}, and "segment_ids" with a document mask: int32 (B, T).

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
            if name not in saved and name.endswith(_NOT_ALWAYS_SAVED):
                continue
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

    A sequence is of one source. Of a mixture, each source has its share of the sequences in the order of `Mixture`,
    whatever the lengths of its documents, and comes to the end of its epochs at its own pace.

    Args:
      tokenizer: may be None for data that are tokens already, see `needs_tokenizer`.
      batch_size: sequences per batch; `config.batch_size` if None.
      vocab_size: the model's, which the ids in Parquet files must fit; unchecked if None.

    With `config.num_workers` 0 a thread prefetches the batches; otherwise as many processes read and tokenize for this
    stream, at least one for each source. The batches are the same.

    Raises `UserError` for data that are missing or of another form, and for a replica that would get no document. The
    stream itself raises it where it meets a damaged file.
    """
    # Grain takes a second to import.
    from noloco_jax.data.mixed_batches import MixedDataset
    from noloco_jax.data.prefetch import BatchDataset, ReplicaDocuments, closed_at_exit, prefetched_batches

    sources = open_sources(config, tokenizer, validation=False, seed=seed, vocab_size=vocab_size)
    if not 0 <= replica < num_replicas:
        raise UserError(f"replica {replica} of {num_replicas}: replicas are numbered from 0")
    for source in sources.values():
        source.check_replicas(num_replicas)
    batch_size = config.batch_size if batch_size is None else batch_size

    def batches(group: str, batch_size: int, num_workers: int) -> BatchDataset:
        documents = ReplicaDocuments(sources[group], replica, num_replicas)
        position = start_position(replica, num_replicas)
        shape = batch_size, config.sequence_length
        return BatchDataset(documents, *shape, num_workers, position, document_mask=config.document_mask)

    if config.kind == "mixture":
        mixture = mixture_of(config)
        sequences = {
            group: batches(group, 1, _workers_of_share(config.num_workers, share))
            for group, share in mixture.shares.items()
        }
        dataset = MixedDataset(sequences, mixture, replica, batch_size)
    else:
        dataset = batches("data", batch_size, config.num_workers)
    identity = {
        "replica": replica,
        "num_replicas": num_replicas,
        "source": _fingerprint(sources) | _what_tells_tokens_apart(config, tokenizer, sources) | {"seed": seed},
    }
    stream = Stream(prefetched_batches(dataset), identity)
    closed_at_exit.add(stream)
    return stream


def _workers_of_share(num_workers: int, share: float) -> int:
    """A source's part of the processes, at least one; the batches do not depend on it."""
    return max(1, round(num_workers * share)) if num_workers else 0


def _fingerprint(sources: Mapping[str, Source]) -> dict[str, Any]:
    """The facts on the files; those of a mixture with the source in front of the name."""
    if list(sources) == ["data"]:
        return dict(sources["data"].fingerprint)
    facts = {f"{group} {name}": fact for group, source in sources.items() for name, fact in source.fingerprint.items()}
    return {"kind": "mixture"} | facts


def _what_tells_tokens_apart(
    config: "DataConfig", tokenizer: Tokenizer | None, sources: Mapping[str, Source]
) -> dict[str, Any]:
    """Besides files and seed, what a position depends on: it is an offset into a replica's tokens."""
    known: dict[str, Any] = {"shuffle_buffer": config.shuffle_buffer}
    if tokenizer is not None and any(source.num_columns == 1 for source in sources.values()):
        known |= {"tokenizer": tokenizer.fingerprint, "add_bos": config.add_bos, "add_eos": config.add_eos}
    return known
