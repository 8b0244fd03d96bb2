"""Islands with real calls over links of a limited rate, through proxies in this process."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.roster import Address, Member, Roster
from support.live_island import LiveIsland, training
from support.ports import free_ports
from support.slow_proxy import Link, Proxy

NAMES = "ab"


@contextlib.contextmanager
def islands(folder: Path, rate: float, **options: Any) -> Iterator[tuple[list[LiveIsland], dict[str, Link]]]:
    """Train two islands whose links have this rate, each way; give them and their uplinks."""
    ports = dict(zip(NAMES, free_ports(2), strict=True))
    up, down = ({name: Link(rate) for name in NAMES} for _ in range(2))
    proxies = {
        me: Proxy(ports[me], [up[other], down[me]], [up[me], down[other]])
        for me, other in zip(NAMES, reversed(NAMES), strict=True)
    }
    with contextlib.ExitStack() as stack:
        for proxy in proxies.values():
            stack.enter_context(proxy)
        rows = [Member(i, name, Address("127.0.0.1", proxies[name].port)) for i, name in enumerate(NAMES)]
        roster = Roster("slow", tuple(rows), len(rows))
        made = [LiveIsland(n, roster, folder, listen=Address("127.0.0.1", ports[n]), **options) for n in NAMES]
        stack.enter_context(training(*made))
        yield made, up


@pytest.mark.slow
def test_a_real_link_completes_nearly_all_that_it_has_time_for_and_sends_nothing_in_vain(tmp_path):
    weights = np.ones((512, 512), np.float32)
    rate = weights.nbytes / 1.6
    with islands(tmp_path, rate, weights=weights, step_seconds=0.19) as (made, up):
        while made[0].round < 0:
            time.sleep(0.01)
        began = time.monotonic()
        while made[0].round < 60:
            time.sleep(0.1)
        seconds = time.monotonic() - began
        committed = made[0].link.node.meetings.committed
    assert committed >= 0.9 * min(seconds * rate / weights.nbytes, 60) - 2
    assert up["a"].num_bytes < 1.1 * (committed + 2) * weights.nbytes


@pytest.mark.slow
def test_nobody_is_taken_for_gone_beside_uploads_at_a_megabit_a_second(tmp_path):
    weights = np.ones((1024, 1024), np.float32)  # 34 s
    with islands(tmp_path, 125e3, weights=weights, step_seconds=6.0) as (made, up):
        while up["a"].num_bytes < 1e6:
            time.sleep(0.1)
        for _ in range(10):
            for island, other in zip(made, reversed(NAMES), strict=True):
                asked = island.link.node.table.ask([other], 2.0)
                assert other in asyncio.run_coroutine_threadsafe(asked, island.link._loop).result()
            time.sleep(1)
        assert up["a"].num_bytes > 2e6
        for island, other in zip(made, reversed(NAMES), strict=True):
            assert not [line for line in island.lines if line.startswith(f"{other}:")]


@pytest.mark.slow
def test_weights_come_through_a_line_whose_buffers_hold_more_than_a_ping_would_wait_for(tmp_path):
    """16 MB in 107 s: longer than the limit, and within twice that."""
    weights = np.random.default_rng(0).normal(size=(2000, 2000)).astype(np.float32)
    with islands(tmp_path, 150e3, weights=weights, step_seconds=1.0) as (made, _):
        while min(island.step for island in made) < 1:
            time.sleep(0.1)
        for island in made:
            island.link.leave(pb.Status.FINISHED)
        (found,) = made[0].link.submit(made[0].link.fetch("b", 70.0, 70.0)).result()
        assert found.shape == weights.shape
