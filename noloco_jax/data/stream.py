"""Batches to train and to validate on.

Shapes: B sequences of T tokens.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from noloco_jax.data.lanes import first_cursor
from noloco_jax.data.packing import Batch, Packer
from noloco_jax.data.sources import open_source
from noloco_jax.data.tokenizers import Tokenizer
from noloco_jax.errors import UserError

if TYPE_CHECKING:
    import grain

    from noloco_jax.config.fields import DataConfig


class Stream(Iterator[Batch]):
    """A replica's endless batches, each {"input_ids", "labels"}: int32 (B, T).

    The state is that of the batches delivered, whatever was made ahead: small, and plain enough for JSON. A stream of
    the same configuration that is set to it yields bitwise the batches that this one would.
    """

    def __init__(self, iterator: "grain.DatasetIterator[Batch]", identity: dict[str, Any]):
        self._open_iterator: grain.DatasetIterator[Batch] | None = iterator
        self._identity = identity

    @property
    def _iterator(self) -> "grain.DatasetIterator[Batch]":
        if self._open_iterator is None:
            raise ValueError("the stream is closed")
        return self._open_iterator

    def __next__(self) -> Batch:
        return next(self._iterator)

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
        for name in {**mine, **saved}:
            if saved.get(name) != mine.get(name):
                raise UserError(
                    f"the saved data position is of data with {name} {saved.get(name)!r}, this run's has "
                    f"{mine.get(name)!r}: restore the former data and configuration, or start afresh"
                )
        self._iterator.set_state({name: state[name] for name in ("epoch", "parts")})

    def close(self) -> None:
        """Ends the thread and the worker processes; the stream gives nothing any more."""
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
    """Replica `replica` of `num_replicas`' stream: epoch after epoch of its share of the training documents.

    A function of its arguments alone. In every epoch each document goes to exactly one replica, in an order drawn
    from `seed` and the epoch; replicas with unequal shares begin the next epoch each in its own time.

    Args:
      tokenizer: None only for kind "parquet", whose rows are tokens already.
      batch_size: sequences a batch; `config.batch_size` if None.
      vocab_size: the model's, to which the ids in Parquet files are held; unchecked if None.

    `config.num_workers` 0 makes batches ahead in a thread; otherwise as many processes read and tokenize for this
    stream. The batches are the same.

    Raises `UserError` for data that are missing or of another form, and for a replica that would get no document; the
    stream itself raises it where it meets a damaged file.
    """
    from noloco_jax.data.pipeline import Replica, batches, closed_at_exit  # Grain takes a second to import

    source = open_source(config, tokenizer, validation=False, seed=seed, vocab_size=vocab_size)
    if not 0 <= replica < num_replicas:
        raise UserError(f"replica {replica} of {num_replicas}: replicas are numbered from 0")
    source.check_replicas(num_replicas)
    identity = {
        "replica": replica,
        "num_replicas": num_replicas,
        "source": source.summary | {"seed": seed, "shuffle_buffer": config.shuffle_buffer},
    }
    iterator = batches(
        Replica(source, replica, num_replicas),
        config.batch_size if batch_size is None else batch_size,
        config.sequence_length,
        config.num_workers,
        first_cursor(replica, num_replicas),
    )
    stream = Stream(iterator, identity)
    closed_at_exit.add(stream)
    return stream


def validation_batches(
    config: "DataConfig",
    tokenizer: Tokenizer | None,
    *,
    num_batches: int,
    batch_size: int | None = None,
    vocab_size: int | None = None,
) -> list[Batch]:
    """The first `num_batches` batches of the validation documents in the files' order, the same at every call.

    Fewer where the documents hold fewer: none is repeated, and the last one is filled up with labels -100.
    Arguments and errors are those of `train_stream`; documents without a label to score are an error too.
    """
    source = open_source(config, tokenizer, validation=True, seed=0, vocab_size=vocab_size)
    packer = Packer(source.columns, config.batch_size if batch_size is None else batch_size, config.sequence_length)
    cursor = first_cursor(0, 1)
    lane = source.lane(0, 0, 1, ())
    made: list[Batch] = []
    position = 0
    try:
        while len(made) < num_batches:
            documents = [lane.get(position + k) for k in range(source.chunk)]
            for document in source.load([document for document in documents if document is not None]):
                packer.add(document, cursor)
            while packer.full and len(made) < num_batches:
                made.append(packer.pop())
            position += source.chunk
            if documents[-1] is None:
                rest = packer.pop_rest() if len(made) < num_batches else None
                made += [] if rest is None else [rest]
                break
    finally:
        lane.close()
    if num_batches and not made:
        path = config.validation_path or config.path
        raise UserError(f"the validation documents of {path!r} hold no token to predict: give data.validation_path")
    return made
