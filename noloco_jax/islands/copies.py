"""Copies of the training's state, as an island gives them to others, and states as it receives them.

The training gives copies between two inner steps: it looks at `Copies.wanted`, and calls `Copies.give`.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.catch_up import CATCH_UP, GIVE_SECONDS, CaughtUp
from noloco_jax.islands.checked_mean import FAR_WEIGHTS, Arrays, apart
from noloco_jax.islands.exchange import ConnectionLost, ProtocolError
from noloco_jax.islands.payload import EXACT, StateCodec, pack
from noloco_jax.islands.peer_table import PeerTable

_KEPT_SECONDS = 15.0  # for which encoded weights serve further requests: peers that merge ask at the same time


class Copies:
    """`catch_up.State` of a training in another thread.

    `run` calls a function that takes long beside the loop, `take_state` makes the training continue from a state.
    """

    def __init__(
        self,
        table: PeerTable,
        state_codec: StateCodec,
        run: Callable[..., Awaitable[Any]],
        take_state: Callable[[CaughtUp], None],
    ):
        self._table, self._state_codec, self._run, self.take_state = table, state_codec, run, take_state
        self._lock = threading.Lock()
        self._wanted: dict[asyncio.Future[CaughtUp], Sequence[int]] = {}  # who waits for copies of which arrays
        self._encoded: tuple[int, Any, bytes] | None = None  # kind, phase, bytes

    # The training's thread.

    @property
    def wanted(self) -> tuple[int, ...]:
        """Numbers of the state's arrays of which somebody waits for a copy: call `give` then."""
        with self._lock:
            numbers = {number for numbers in self._wanted.values() for number in numbers}
            return tuple(sorted(numbers | {0})) if self._wanted else ()  # a position may have no arrays of its own

    def give(self, leaves: Mapping[int, np.ndarray], round: int, step: int) -> None:
        """Give copies of the `wanted` arrays, which nobody will change, after a round and a step."""
        with self._lock:
            for given in [one for one, numbers in self._wanted.items() if leaves.keys() >= {*numbers}]:
                del self._wanted[given]
                given.get_loop().call_soon_threadsafe(_resolve, given, CaughtUp(round, step, dict(leaves)))

    # The network's thread.

    def num_bytes(self, kind: int) -> int:
        return self._state_codec.num_bytes(kind)

    async def weights(self, kind: int) -> bytes:
        phase = self._table.phase
        if self._encoded is not None and self._encoded[:2] == (kind, phase):
            return self._encoded[2]
        given = await self._copy(self._state_codec.large(kind))
        data: bytes = await self._run(self._state_codec.encode, kind, given.leaves)
        self._encoded = kept = kind, phase, data
        asyncio.get_running_loop().call_later(_KEPT_SECONDS, self._forget, kept)
        return data

    async def position(self) -> pb.Position:
        given = await self._copy(self._state_codec.small)
        small = pack([given.leaves[number] for number in self._state_codec.small])
        return pb.Position(round=given.round, step=given.step, has_averaged=self._table.has_averaged, small=small)

    async def received(self, data: bytes, position: pb.Position) -> CaughtUp:
        table, numbers = self._table, self._state_codec.large(EXACT)
        leaves = await self._run(self._state_codec.decode, CATCH_UP, data, position.small)
        if table.has_averaged and table.phase == pb.Status.TRAINING:
            own = await self._copy(numbers)
            await self._run(_check_distance, *([x[n] for n in numbers] for x in (own.leaves, leaves)))
        return CaughtUp(position.round, position.step, leaves)

    async def _copy(self, numbers: Sequence[int]) -> CaughtUp:
        """Return copies of these arrays, and where the training was."""
        given: asyncio.Future[CaughtUp] = asyncio.get_running_loop().create_future()
        with self._lock:
            self._wanted[given] = numbers
        try:
            async with asyncio.timeout(GIVE_SECONDS):
                return await given
        except TimeoutError:
            raise ConnectionLost(f"its training gave no copy of the weights in {GIVE_SECONDS:g} s") from None
        finally:
            with self._lock:
                self._wanted.pop(given, None)

    def _forget(self, kept: Any) -> None:
        if self._encoded is kept:
            self._encoded = None


def _check_distance(own: Arrays, others: Arrays) -> None:
    """Raise `ProtocolError` for weights far from the own ones."""
    if not (distance := apart(own, others)) <= FAR_WEIGHTS:
        raise ProtocolError(f"weights {distance:.3g} times their norm away from the own ones")


def _resolve(given: "asyncio.Future[CaughtUp]", copied: CaughtUp) -> None:
    if not given.done():
        given.set_result(copied)
