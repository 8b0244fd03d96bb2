"""A replica's documents one after another, each with the position at which reading goes on from it."""

from typing import Any

from noloco_jax.data.positions import DataPosition, after_document, shard_start
from noloco_jax.data.source import EpochShard, Source
from noloco_jax.errors import UserError


class DocumentReader:
    """Goes through a replica's documents from a position on, epoch after epoch without end.

    Attributes:
      position: the one before the current document.
      begins_part: whether the current document is of another part than the one before it in its shard, see
        `EpochShard.part`.
    """

    position: DataPosition
    begins_part: bool

    def __init__(self, source: Source, replica: int, num_replicas: int, position: DataPosition):
        self._source, self._replica, self._num_replicas = source, replica, num_replicas
        self._epoch, self._shards = position
        self._open_shards: dict[tuple[int, ...], EpochShard] = {}
        self._parts: dict[tuple[int, ...], int] = {}  # of the document before, by open shard
        self._current: tuple[int, ...] = ()  # the shard of the current document

    def advance(self) -> None:
        """Goes to the next document, at first to the first one, without reading it where its shard can tell.

        Raises `UserError` where the replica's own shard of an epoch is empty.
        """
        if self._current and not self.position.shards[0].stride:
            self._close(self._current)
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
            if shard.has(position.document):
                if position.seek_hint != shard.seek_hint:
                    position = position._replace(seek_hint=shard.seek_hint)
                self.position = DataPosition(self._epoch, (position, *rest))
                self._shards = after_document(self.position.shards)
                part = shard.part(position.document)
                self.begins_part = self._parts.get(key) != part
                self._parts[key], self._current = part, key
                return
            self._close(key)
            own = (position.shard, position.num_shards) == (self._replica, self._num_replicas)
            if own and position.document == 0:
                raise UserError(
                    f"replica {self._replica} of {self._num_replicas} gets no document of {self._source.name}: "
                    "use fewer replicas or more data"
                )
            self._shards = tuple(rest)

    def read(self) -> Any:
        """The current document's record."""
        return self._open_shards[self._current].get(self.position.shards[0].document)

    def _close(self, key: tuple[int, ...]) -> None:
        self._open_shards.pop(key).close()
        self._parts.pop(key, None)
        self._current = ()

    def close(self) -> None:
        for shard in self._open_shards.values():
            shard.close()
        self._open_shards.clear()
