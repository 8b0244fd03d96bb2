"""Link between an island's training and its network: what waits for the training, and what its loop reports."""

import asyncio

import pytest

from noloco_jax.islands import network
from noloco_jax.islands.catch_up import CaughtUp
from support.live_island import LiveIsland, wait_for
from support.rosters import on_loopback


@pytest.fixture
def island(tmp_path):
    """An island that does not train, whose loop runs."""
    island = LiveIsland("a", on_loopback("a", "b"), tmp_path)
    island.link._thread.start()
    yield island
    island.link.close()


def test_a_donor_s_state_takes_the_place_of_all_that_came_before_it_and_is_not_saved(island):
    link = island.link
    link.deliver(3, list)
    link.copies.take_state(CaughtUp(9, 90, {}))
    link.deliver(10, list)
    link._arriving[-1].arrays.result()
    assert link.take_all() == ([], None)
    assert [item.round for item in link.take()] == [9, 10]
    items, saved = link.take_all()
    assert not items and saved is not None


def test_a_donor_s_state_that_comes_after_the_last_step_is_ignored(island):
    link = island.link
    link.deliver(3, list)
    link._arriving[-1].arrays.result()
    assert [item.round for item in link.take_all(is_last=True)[0]] == [3]
    link.copies.take_state(CaughtUp(9, 90, {}))
    items, saved = link.take_all(is_last=True)
    assert not items and saved is not None


def test_an_island_that_is_closed_while_it_waits_for_others_leaves_no_task(island):
    begun = island.link.begin()
    wait_for(lambda: any("waits for b" in line for line in island.lines), 30)
    island.link.close()
    assert not asyncio.all_tasks(island.link._loop) and begun.cancelled()


def test_an_error_in_a_callback_or_a_task_of_the_network_is_reported(island, caplog, monkeypatch):
    async def task() -> None:
        raise ValueError("in a task")

    def write_members(path, roster) -> None:
        raise ValueError("in a task of the second thread")

    def greeting(**fields) -> None:
        raise ValueError("in a question")

    def callback() -> None:
        island.link.keep(None)
        island.link.node.table.start(task())
        raise ValueError("in a callback")

    monkeypatch.setattr(network, "write_members", write_members)
    monkeypatch.setattr(island.link.node.table, "greeting", greeting)
    island.link._loop.call_soon_threadsafe(callback)
    island.link.ask(["b"], 1.0)
    wait_for(lambda: len(island.lines) >= 4, 30)
    for place in ("callback", "task')", "task of the second thread", "question"):
        (line,) = (line for line in island.lines if f"in a {place}" in line)
        assert line.startswith("a fault of this program, please report it: ValueError")
    assert sum("Traceback" in (record.exc_text or "") for record in caplog.records) == 4
