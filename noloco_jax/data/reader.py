"""A replica's documents one after another, each with the position at which reading goes on from it."""

from typing import Any

from noloco_jax.data.positions import DataPosition, after_document, shard_start
from noloco_jax.data.source import EpochShard, Source
from noloco_jax.errors import UserError


class DocumentReader:
    """Reads a replica's documents from a position on, epoch after epoch without end."""

    def __init__(self, source: Source, replica: int, num_replicas: int, position: DataPosition):
        self._source, self._replica, self._num_replicas = source, replica, num_replicas
        self._epoch, self._shards = position
        self._open_shards: dict[tuple[int, ...], EpochShard] = {}

    def next(self) -> tuple[DataPosition, Any]:
        """(position before the next document, that document's record).

        Raises `UserError` where the replica's own shard of an epoch is empty.
        """
        while True:
            if not self._shards:
                self._epoch += 1
                self._shards = (shard_start(self._epoch, self._replica, self._num_replicas),)
            position, *rest = self._shards
            # Two positions may be in the same shard (divided once and merged again); each reads it at its own pace.
            start = position.document % position.stride if position.stride else position.document
            key = (position.epoch, position.shard, position.num_shards, position.stride, start)
            if key not in self._open_shards:
                self._open_shards[key] = self._source.open_shard(
                    position.epoch, position.shard, position.num_shards, position.seek_hint
                )
            shard = self._open_shards[key]
            record = shard.get(position.document)
            position = position._replace(seek_hint=shard.seek_hint)
            if record is None or not position.stride:
                self._open_shards.pop(key).close()
            if record is not None:
                before = DataPosition(self._epoch, (position, *rest))
                self._shards = after_document(before.shards)
                return before, record
            own = (position.shard, position.num_shards) == (self._replica, self._num_replicas)
            if own and position.document == 0:
                raise UserError(
                    f"replica {self._replica} of {self._num_replicas} gets no document of {self._source.name}: "
                    "use fewer replicas or more data"
                )
            self._shards = tuple(rest)

    def close(self) -> None:
        for shard in self._open_shards.values():
            shard.close()
        self._open_shards.clear()
