"""Log messages of a failed save other than its error, which are hidden."""

import asyncio
import gc

import pytest

from noloco_jax.checkpoint.quiet import quiet_saves


def test_further_failed_writes_of_a_save_are_not_logged(caplog):
    async def write() -> None:
        raise ValueError("no space left")

    async def save() -> None:
        writes = [asyncio.create_task(write()) for _ in range(3)]
        await asyncio.wait(writes)
        writes[0].result()

    quiet_saves()
    with pytest.raises(ValueError):
        asyncio.run(save())
    gc.collect()  # asyncio logs an unretrieved exception when its task is collected
    assert not caplog.records
