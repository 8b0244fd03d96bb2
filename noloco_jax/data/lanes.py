"""Which replica reads which documents, and where it stands: lanes, cursors, and dealing them out anew.

An epoch's documents are dealt into as many *lanes* as there are replicas. A source gives each lane its order, a
function of (epoch, lane, number of lanes) and the run's seed, so a place in it is a few integers. Replica i reads
lane i of epoch 0, then lane i of epoch 1, and so on; after a change of the number of replicas it first reads what
is left of the lanes of the old dealing (`redistribute`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from noloco_jax.errors import UserError


class Lane(Protocol):
    """One lane of one epoch, open for reading."""

    @property
    def anchor(self) -> tuple[int, ...]:
        """What helps `Source.lane` to find the position last read again without reading all before it."""
        ...

    def get(self, position: int) -> Any | None:
        """The document at `position` as the source loads it, or None beyond the end."""
        ...

    def close(self) -> None: ...


class Source(Protocol):
    """A data set. `columns` is 1 for plain token streams, 2 where labels are stored beside the input ids."""

    columns: int
    chunk: int  # documents that are worth loading together
    summary: dict[str, int | str]  # what a saved position depends on

    def check_replicas(self, num_replicas: int) -> None:
        """Raises `UserError` where some replica would get no document."""
        ...

    def lane(self, epoch: int, lane: int, lanes: int, anchor: tuple[int, ...]) -> Lane: ...

    def load(self, documents: Sequence[Any]) -> list[np.ndarray]:
        """int32 (columns, n) arrays of what `Lane.get` gave."""
        ...


class Part(NamedTuple):
    """Documents `position`, `position + stride`, ... of a lane; of the first of them, the tokens from `offset` on.

    Stride 0 means that one document alone.
    """

    epoch: int
    lane: int
    lanes: int
    position: int
    stride: int
    offset: int
    anchor: tuple[int, ...]

    def after_first(self) -> "Part":
        return self._replace(position=self.position + self.stride, offset=0)


class Cursor(NamedTuple):
    """Where a replica stands: parts still to be read, in turn; epochs up to `epoch` are among them or behind it."""

    epoch: int
    parts: tuple[Part, ...]

    def to_json(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "parts": [[*part[:-1], list(part.anchor)] for part in self.parts]}

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> "Cursor":
        return cls(state["epoch"], tuple(Part._make([*part[:-1], tuple(part[-1])]) for part in state["parts"]))


def first_cursor(replica: int, num_replicas: int) -> Cursor:
    """The start of epoch 0."""
    return Cursor(0, (Part(0, replica, num_replicas, 0, 1, 0, ()),))


def _advance(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """`parts` without the first one's first document. Lanes of one epoch take turns, an older epoch goes before."""
    first, rest = parts[0], parts[1:]
    if not first.stride:
        return rest
    turn = next((k for k, part in enumerate(rest) if part.stride and part.epoch > first.epoch), len(rest))
    return (*rest[:turn], first.after_first(), *rest[turn:])


class Walker:
    """A replica's endless documents, from a cursor on, each with the cursor that stands before it."""

    def __init__(self, source: Source, replica: int, num_replicas: int, cursor: Cursor):
        self._source, self._replica, self._num_replicas = source, replica, num_replicas
        self._epoch, self._parts = cursor
        self._lanes: dict[tuple[int, ...], Lane] = {}

    def next(self) -> tuple[Cursor, Any]:
        while True:
            if not self._parts:
                self._epoch += 1
                self._parts = (Part(self._epoch, self._replica, self._num_replicas, 0, 1, 0, ()),)
            part, *rest = self._parts
            # Two parts may share a lane (a split one, merged again), each with a pace of its own.
            start = part.position % part.stride if part.stride else part.position
            key = (part.epoch, part.lane, part.lanes, part.stride, start)
            if key not in self._lanes:
                self._lanes[key] = self._source.lane(part.epoch, part.lane, part.lanes, part.anchor)
            lane = self._lanes[key]
            document = lane.get(part.position)
            part = part._replace(anchor=lane.anchor)
            if document is None or not part.stride:
                self._lanes.pop(key).close()
            if document is not None:
                cursor = Cursor(self._epoch, (part, *rest))
                self._parts = _advance(cursor.parts)
                return cursor, document
            own = part.lanes == self._num_replicas and part.lane == self._replica
            if own and part.position == 0:
                raise UserError(
                    f"replica {self._replica} of {self._num_replicas} gets no document of data.path: "
                    "use fewer replicas or more data"
                )
            self._parts = tuple(rest)

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()


def _check_saved(states: Sequence[dict[str, Any]]) -> None:
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


def _carry_over(state: dict[str, Any], last_epoch: int) -> tuple[list[Part], list[Part]]:
    """(documents begun, remaining parts) of a replica, its own lanes of epochs that others are ahead by included."""
    cursor = Cursor.from_json(state)
    parts = cursor.parts
    begun = [part for part in parts if not part.stride]
    if not begun and parts and parts[0].offset:
        begun = [parts[0]._replace(stride=0)]
        parts = _advance(parts)
    parts = [part for part in parts if part.stride]
    for epoch in range(cursor.epoch + 1, last_epoch + 1):
        parts.append(Part(epoch, state["replica"], state["num_replicas"], 0, 1, 0, ()))
    return begun, parts


def redistribute(states: Sequence[dict[str, Any]], num_replicas: int) -> list[dict[str, Any]]:
    """Data positions of N replicas, dealt out anew to M = `num_replicas`.

    `states[i]` is `Stream.get_state()` of replica i of N, all of them from one checkpoint. The j-th result is for
    `set_state` of a stream of replica j of M over the same data.

    M < N: replica j takes over from the replicas i with i % M == j: first the rest of the documents they were in, one
    after another, then the rest of their lanes in turns. M > N: replica i's remainder goes to the replicas j with
    j % N == i, the k-th of c taking documents k, k + c, k + 2c, ... of what remains of each of its lanes; the rest of
    the document it was in goes to the first.

    What holds: let E be the latest epoch that any replica has begun. Of the documents of every epoch up to E, each
    token that was not an input before is an input of exactly one replica after, once; none is skipped and none is
    repeated. From epoch E + 1 on, documents are dealt to M replicas as in a fresh run. Until then replicas differ in
    how much is left for them. The sequence borders shift; at the seams of taken-over documents the label is the next
    token of the new stream, as at every other place. The result can be redistributed again.
    """
    _check_saved(states)
    if num_replicas < 1:
        raise UserError(f"num_replicas={num_replicas}: data positions are for at least one replica")
    if num_replicas == len(states):
        return [dict(state) for state in states]
    last_epoch = max(state["epoch"] for state in states)
    remains = [_carry_over(state, last_epoch) for state in states]
    shares: list[tuple[Part, ...]] = []
    for replica in range(num_replicas):
        if num_replicas < len(states):
            begun = [part for i in range(replica, len(states), num_replicas) for part in remains[i][0]]
            parts = [part for i in range(replica, len(states), num_replicas) for part in remains[i][1]]
        else:
            owner = replica % len(states)
            k, count = replica // len(states), len(range(owner, num_replicas, len(states)))
            begun = [] if k else remains[owner][0]
            parts = [
                part._replace(position=part.position + k * part.stride, stride=count * part.stride)
                for part in remains[owner][1]
            ]
        shares.append((*begun, *sorted(parts, key=lambda part: part.epoch)))
    return [
        {"replica": j, "num_replicas": num_replicas, "source": states[0]["source"]}
        | Cursor(last_epoch, parts).to_json()
        for j, parts in enumerate(shares)
    ]
