"""Deadlines of a fetch, on a virtual clock, over a line of some speed."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.exchange import PIECE_BYTES, ConnectionLost
from noloco_jax.islands.fetch import fetch
from noloco_jax.islands.payload import specs_of

WEIGHTS = np.random.default_rng(0).normal(size=4_000_000).astype(np.float32)  # 16 MB
SPEED = 150e3  # bytes a second: 107 s


class Line:
    """A network that carries so many bytes a second, and stops after so many pieces."""

    def __init__(self, speed: float, pieces: int = 1000):
        self._speed, self._pieces = speed, pieces

    async def weights(self, peer: str, request: pb.WeightsRequest):
        assert request.last
        data = WEIGHTS.tobytes()
        for _ in range(10):  # it copies its weights for 10 s
            yield pb.WeightsFrame(not_yet=pb.NotYet())
            await asyncio.sleep(1)
        yield pb.WeightsFrame(offer=pb.Offer(num_bytes=len(data), round=79))
        for number, start in enumerate(range(0, len(data), PIECE_BYTES)):
            while number >= self._pieces:
                yield pb.WeightsFrame(not_yet=pb.NotYet())
                await asyncio.sleep(4)
            await asyncio.sleep(PIECE_BYTES / self._speed)
            yield pb.WeightsFrame(piece=pb.Piece(data=data[start : start + PIECE_BYTES]))


async def fetched(line: Any, folder: Path, seconds: float) -> tuple[str | np.ndarray, float]:
    """Return the array, or why it did not come, and the seconds that it took."""
    now = asyncio.get_running_loop().time
    started = now()
    try:
        (array,), round = await fetch(line, "rome", specs_of([WEIGHTS]), folder, seconds, last=True)
        assert round == 79
        return array, now() - started
    except ConnectionLost as error:
        return str(error), now() - started


@pytest.mark.parametrize("limit", [600, 120, 70])
async def test_weights_of_a_slow_line_are_kept_while_they_will_have_come_in_twice_the_limit(tmp_path, limit):
    array, seconds = await fetched(Line(SPEED), tmp_path, limit)
    np.testing.assert_array_equal(array, WEIGHTS)
    assert seconds == pytest.approx(10 + WEIGHTS.nbytes / SPEED, abs=2)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("line", "limit", "reason", "after"),
    [
        (Line(SPEED), 40, "of its weights 4.46 MB of 16 MB came in 40 s", 40),
        (Line(SPEED, pieces=0), 40, "of its weights nothing came in 40 s", 40),
        (Line(SPEED, pieces=70), 70, "of its weights 9.18 MB of 16 MB came in 140 s", 140),
    ],
    ids=["too slow", "never", "stops after the limit"],
)
async def test_a_fetch_ends_at_its_limit_or_twice_that_and_says_how_far_it_came(tmp_path, line, limit, reason, after):
    assert await fetched(line, tmp_path, limit) == (reason, pytest.approx(after, abs=0.1))
