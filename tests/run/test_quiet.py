"""Messages of a failing save that are hidden, besides the error."""

import asyncio
import gc

import pytest

from noloco_jax.run.quiet import quiet_saves


def test_writes_that_fail_beside_the_one_that_is_raised_are_not_told(caplog):
    async def write() -> None:
        raise ValueError("no space left")

    async def save() -> None:
        writes = [asyncio.create_task(write()) for _ in range(3)]
        await asyncio.wait(writes)
        writes[0].result()

    quiet_saves()
    with pytest.raises(ValueError):
        asyncio.run(save())
    gc.collect()  # asyncio tells of an error that nobody took when its task goes
    assert not caplog.records
