"""Positions of replicas in the data, and their redistribution when the number of replicas changes.

Replica i reads shard i of epoch 0, then shard i of epoch 1, and so on. One beyond the number among which the data were
divided, an island that joined later, reads all of the data in an order of its own (`share`). After a change of the
number of replicas a replica first reads the rest of the shards of the old division (`redistribute`).
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from noloco_jax.data.source import GOLDEN_STEP
from noloco_jax.errors import UserError

_TURNS = 1 << 16  # of a whole shard; of a part at least one: with more, to find its documents would take time
_NEAR = 16  # turns
_EPOCHS = 1 << 12  # epochs of each replica that joined later, in a count of its own


class ShardPosition(NamedTuple):
    """Remainder of one shard of one epoch: its documents from `document` on whose turn is in a range.

    Document k has as its turn k times the golden ratio, modulo 1. So a range of turns has its share of any consecutive
    documents, and can be divided again and again.

    Attributes:
      epoch, shard, num_shards: the shard.
      document: number of the next document in the shard.
      first_turn, end_turn: the range, in units of 2^-16; an empty one stands for this document alone.
      token: number of tokens of the next document that have been read.
      seek_hint: `EpochShard.seek_hint` at that document; empty if not known.
    """

    epoch: int
    shard: int
    num_shards: int
    document: int
    first_turn: int
    end_turn: int
    token: int
    seek_hint: tuple[int, ...]

    @property
    def is_single(self) -> bool:
        return self.first_turn == self.end_turn

    def single(self) -> "ShardPosition":
        """Return the position of the next document alone."""
        return self._replace(end_turn=self.first_turn)

    def next_document(self) -> "ShardPosition":
        return self._replace(document=self._following(self.document + 1), token=0)

    def _following(self, document: int) -> int:
        """Return the first document from `document` on whose turn is in the range."""
        if self.end_turn - self.first_turn == _TURNS:
            return document
        while not self.first_turn <= document * GOLDEN_STEP % 2**64 * _TURNS >> 64 < self.end_turn:
            document += 1
        return document


class DataPosition(NamedTuple):
    """Position of a replica in a source.

    Attributes:
      epoch: the latest epoch begun; of later ones the replica reads its own shard from the start.
      shards: the remainder of this and earlier epochs; the next document is the first one's.
    """

    epoch: int
    shards: tuple[ShardPosition, ...]

    def to_json(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "shards": [[*shard[:-1], list(shard.seek_hint)] for shard in self.shards]}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> "DataPosition":
        shards = (ShardPosition._make([*shard[:-1], tuple(shard[-1])]) for shard in state["shards"])
        return cls(state["epoch"], tuple(shards))


def shard_start(epoch: int, shard: int, num_shards: int) -> ShardPosition:
    """Return the beginning of a shard of an epoch."""
    return ShardPosition(epoch, shard, num_shards, 0, first_turn=0, end_turn=_TURNS, token=0, seek_hint=())


def share(epoch: int, replica: int, num_replicas: int) -> ShardPosition:
    """Return the beginning of a replica's share of an epoch.

    One of number `num_replicas` or more leaves the shares of the others as they are: it reads all documents, in the
    order of an epoch that no other replica comes to. So no two read in the same order, where sources shuffle, and none
    reads a document twice before it has read all.
    """
    if replica < num_replicas:
        return shard_start(epoch, replica, num_replicas)
    return shard_start(epoch + (replica - num_replicas + 1) * _EPOCHS, 0, 1)


def start_position(replica: int, num_replicas: int) -> DataPosition:
    """Return the beginning of epoch 0."""
    return DataPosition(0, (share(0, replica, num_replicas),))


def after_document(shards: tuple[ShardPosition, ...]) -> tuple[ShardPosition, ...]:
    """Return the shards left to read after the next document.

    Single documents come first. Shards of one epoch take turns, a document each, and all of them come before those of
    a later epoch.
    """
    first, rest = shards[0], shards[1:]
    if first.is_single:
        return rest
    turn = next((k for k, shard in enumerate(rest) if not shard.is_single and shard.epoch > first.epoch), len(rest))
    return (*rest[:turn], first.next_document(), *rest[turn:])


def renumbered(state: dict[str, Any], replica: int, num_replicas: int) -> dict[str, Any]:
    """Return a replica's data position for a stream of replica `replica` of `num_replicas` over the same data.

    The replica first reads the rest of its own share of the epochs that it has begun, then its share of the new
    division. Shares of replicas that are not renumbered too are left out of these epochs, and documents that others
    read under their new numbers may be in its own.
    """
    return state | {"replica": replica, "num_replicas": num_replicas}


def redistribute(states: Sequence[dict[str, Any]], num_replicas: int) -> list[dict[str, Any]]:
    """Divide the data positions of N replicas among M = `num_replicas`.

    `states[i]` is `Stream.get_state()` of replica i of N, all of them from one checkpoint. The j-th result is for
    `set_state` of a stream of replica j of M over the same data.

    What the N replicas had left to read, which is equally much, is divided into M equal parts: replica j takes from the
    j N / M-th to the (j + 1) N / M-th rest, of a rest that is cut the shards up to the cut, and of one shard the
    documents with a range of turns, see `ShardPosition`. First comes the rest of the documents that had been begun, one
    after another, each with the beginning of its replica's rest, then the rests in turns.

    A replica so has few shards open, however often the number changes. The price: parts of unequal width take turns at
    one pace, so a second change within an epoch divides the rest only about equally.

    Of a mixture, the positions in every source are divided so, with the guarantee for each; replica j continues in the
    order of the sources where replica j % N was.

    Guarantee: let E be the latest epoch that any replica has begun. Each token of the epochs up to E that was not an
    input before is an input of exactly one replica afterwards, once; none is skipped and none is repeated. From epoch
    E + 1 on, documents are divided among M replicas as in a new run. Sequences begin at other tokens than before. Where
    one document's rest is followed by another document, the label is the next token of the new stream, as between any
    two documents. The result can be redistributed again.

    Raises:
      UserError: for states that do not belong together.
    """
    _check_one_checkpoint(states)
    if num_replicas < 1:
        raise UserError(f"num_replicas={num_replicas}: data positions are for at least one replica")
    if num_replicas == len(states):
        return [dict(state) for state in states]
    by_source = {
        name: _divide([state | state["positions"][name] for state in states], num_replicas)
        for name in states[0]["positions"]
    }
    return [
        {
            **states[j % len(states)],
            "replica": j,
            "num_replicas": num_replicas,
            "positions": {name: divided[j].to_json() for name, divided in by_source.items()},
        }
        for j in range(num_replicas)
    ]


def _divide(states: Sequence[dict[str, Any]], num_replicas: int) -> list[DataPosition]:
    """Redistribute one source, whose positions are merged into `states`."""
    last_epoch = max(state["epoch"] for state in states)
    remainders = [_remainder(state, last_epoch) for state in states]
    divided: list[DataPosition] = []
    for replica in range(num_replicas):
        begun: list[ShardPosition] = []
        shards: list[ShardPosition] = []
        for former, (its_begun, its_shards) in enumerate(remainders):
            # In parts of which `num_replicas` are a remainder, and as many as there are remainders a replica's.
            first = replica * len(states) - former * num_replicas
            start, stop = max(first, 0), min(first + len(states), num_replicas)
            if start < stop:
                begun += its_begun if start == 0 else []
                shards += _cut_shards(its_shards, start, stop, num_replicas)
        divided.append(DataPosition(last_epoch, (*begun, *sorted(shards, key=lambda shard: shard.epoch))))
    return divided


def _cut_shards(shards: Sequence[ShardPosition], start: int, stop: int, count: int) -> list[ShardPosition]:
    """Return parts `start` to `stop` - 1 of `count` equal ones of each epoch's shards, laid end to end."""
    parts: list[ShardPosition] = []
    # In an order that reading does not change: borders of earlier divisions are met again, and no new parts arise.
    in_order = sorted(shards, key=lambda shard: (shard.epoch, shard.num_shards, shard.shard, shard.first_turn))
    for _, group in itertools.groupby(in_order, key=lambda shard: shard.epoch):
        same = [*group]
        total = sum(shard.end_turn - shard.first_turn for shard in same)
        low, high = total * start // count, total * stop // count
        for shard in same:
            width = shard.end_turn - shard.first_turn
            begin, end = _snapped(low, width), _snapped(high, width)
            if begin < end:
                part = shard._replace(first_turn=shard.first_turn + begin, end_turn=shard.first_turn + end)
                parts.append(part._replace(document=part._following(shard.document)))
            low, high = low - width, high - width
    return parts


def _snapped(border: int, width: int) -> int:
    """Return the border of two parts of a shard, at the shard's own where that is near: rounding leaves no slivers."""
    near = min(_NEAR, width / 2)
    return 0 if border < near else width if width - border <= near else border


def _check_one_checkpoint(states: Sequence[dict[str, Any]]) -> None:
    count = len(states)
    for replica, state in enumerate(states):
        if (state["num_replicas"], state["replica"]) != (count, replica):
            raise UserError(
                f"data position {replica} of {count} is that of replica {state['replica']} of "
                f"{state['num_replicas']}: give all positions of one checkpoint, in the order of the replicas"
            )
        if state["source"] != states[0]["source"]:
            raise UserError(
                f"the data positions of replicas 0 and {replica} are of different data sets, {states[0]['source']} "
                f"and {state['source']}: give positions of one checkpoint"
            )


def _remainder(state: dict[str, Any], last_epoch: int) -> tuple[list[ShardPosition], list[ShardPosition]]:
    """Return the remainder of a replica up to `last_epoch`: (documents begun, shards)."""
    position = DataPosition.from_json(state)
    shards = position.shards
    begun = [shard for shard in shards if shard.is_single]
    if not begun and shards and shards[0].token:
        begun = [shards[0].single()]
        shards = after_document(shards)
    later_epochs = range(position.epoch + 1, last_epoch + 1)
    own = [share(epoch, state["replica"], state["num_replicas"]) for epoch in later_epochs]
    return begun, [shard for shard in shards if not shard.is_single] + own
