"""Exchanges of two islands whose calls break at every point: what enters, on which side, and how often."""

import asyncio
import gc
import weakref
from collections import Counter
from typing import Any, cast

import numpy as np
import pytest

from noloco_jax.islands.exchange import SILENT_SECONDS, ConnectionLost
from noloco_jax.islands.meetings import Meetings
from support.island_world import Delivered, Sea, Sim, no_faults

KINDS = ("hello", "not_yet", "accept", "piece", "received", "commit", "done", "no")


def pairs_of(sims: list[Sim]) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
    """Return the corrections of both islands by their rounds; fail where one entered twice."""
    found = []
    for sim in sims:
        counts = Counter(round for round, _ in sim.applied)
        assert max(counts.values(), default=1) == 1, f"{sim.name}: a correction entered twice"
        found.append(dict(sim.applied))
    return found[0], found[1]


async def train_two(sea: Sea, rounds: int) -> list[Sim]:
    sims = [sea.add(name) for name in ("a", "b")]
    await asyncio.gather(*(sim.train(rounds * sea.steps_a_round) for sim in sims))
    await asyncio.sleep(60)
    for sim in sims:
        sim.apply()
    return sims


@pytest.mark.parametrize("interrupted", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
async def test_corrections_of_interrupted_exchanges_sum_to_zero_and_enter_once(interrupted):
    """Frames that two islands send end their call, before or after they have arrived."""
    sea = Sea(["a", "b"], steps_a_round=1, step_seconds=2.0)
    broken = Counter()

    async def faults(sender: str, receiver: str, kind: str) -> None:
        await asyncio.sleep(0.001 * sea.random.random())
        if sea.random.random() < (0.3 if kind in ("received", "commit") else 0.1):
            broken[kind] += 1
            raise sea.random.choice((ConnectionLost, Delivered))("a fault of the test")

    sea.faults = faults
    sims = await train_two(sea, interrupted)
    ours, theirs = pairs_of(sims)
    both = ours.keys() & theirs.keys()
    for round in both:
        np.testing.assert_array_equal(ours[round] + theirs[round], 0.0)
    one_sided = ours.keys() ^ theirs.keys()
    assert sum(broken.values()) >= interrupted
    assert set(broken) >= {"hello", "accept", "piece", "received", "commit", "done"}
    assert len(both) > 0.8 * interrupted
    assert len(one_sided) <= sum(sim.node.meetings.one_sided for sim in sims)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sender", "ab")
async def test_a_frame_that_is_lost_once_costs_nothing(kind, sender):
    sea = Sea("ab")
    lost: list[str] = []

    async def faults(sending: str, receiver: str, of_kind: str) -> None:
        await no_faults(sending, receiver, of_kind)
        if of_kind == kind and sending == sender and not lost:
            lost.append(kind)
            raise ConnectionLost("a fault of the test")

    sea.faults = faults
    ours, theirs = pairs_of(await train_two(sea, 6))
    assert ours.keys() >= {0, 1, 2, 3} and theirs.keys() == ours.keys()
    for round in ours:
        np.testing.assert_array_equal(ours[round] + theirs[round], 0.0)


async def test_an_exchange_that_the_partner_accepts_anew_does_not_count_as_one_sided():
    """A lost `Received` leaves it open whether the partner has committed; its next `Accept` says that it has not."""
    sea = Sea("ab")
    lost: list[str] = []

    async def faults(sender: str, receiver: str, kind: str) -> None:
        await no_faults(sender, receiver, kind)
        if (kind == "received" and not lost) or (kind == "piece" and lost):
            lost.append(kind)
            raise ConnectionLost("a fault of the test")

    sea.faults = faults
    sims = await train_two(sea, 4)
    assert lost[0] == "received" and "piece" in lost
    assert [sim.node.meetings.one_sided for sim in sims] == [0, 0]
    assert not any(outcome.one_sided for sim in sims for outcome in sim.outcomes)


async def test_a_lost_commit_is_told_again_as_long_as_the_dialler_may_ask():
    """With eight fragments an exchange lives for 128 rounds: here the messages come 95 rounds late, and then break."""
    sea = Sea("ab", fragments=8, steps_a_round=1)
    late: list[str] = []

    async def faults(sender: str, receiver: str, kind: str) -> None:
        await no_faults(sender, receiver, kind)
        if kind == "received" and not late:
            late.append(receiver)
            await asyncio.sleep(9.5)
            late.append("comes")
        elif kind == "commit" and len(late) == 2 and sender == late[0]:
            late.append("lost")
            raise ConnectionLost("a fault of the test")

    sea.faults = faults
    ours, theirs = pairs_of(await train_two(sea, 200))
    assert late[-1] == "lost" and 0 in ours
    assert ours.keys() == theirs.keys()


async def test_messages_are_freed_as_their_exchanges_end():
    """Without Python's collector of cycles, which may run seldom, and with calls that break in the middle."""
    sea, messages = Sea("ab"), []

    async def faults(sender: str, receiver: str, kind: str) -> None:
        await no_faults(sender, receiver, kind)
        if sea.random.random() < 0.1:
            raise ConnectionLost("a fault of the test")

    def keep(message: np.ndarray) -> np.ndarray:
        messages.append(weakref.ref(message))
        return message

    sea.faults = faults
    sims = [sea.add(name) for name in "ab"]
    for sim in sims:
        sim.tamper = keep
    gc.collect()
    gc.disable()
    try:
        await asyncio.gather(*(sim.train(200) for sim in sims))
        await asyncio.sleep(60)
        assert len(messages) == 40
        assert sum(message() is not None for message in messages) == 0
    finally:
        gc.enable()


async def test_a_peer_that_stops_in_the_middle_is_named_and_costs_rounds_alone():
    sea = Sea("ab", step_seconds=1.0)
    a, b = sea.add("a"), sea.add("b")

    async def faults(sender: str, receiver: str, kind: str) -> None:
        await no_faults(sender, receiver, kind)
        if 35 < asyncio.get_running_loop().time() < 100 and "b" in (sender, receiver):
            await asyncio.sleep(100 - asyncio.get_running_loop().time())

    sea.faults = faults
    await asyncio.gather(a.train(300), b.train(300), b.stop(35, 65))
    assert any(f"b: no answer in {SILENT_SECONDS:g} s" in line or "takes nothing" in line for line in a.lines), a.lines
    last = [outcome.outcome for outcome in a.outcomes if outcome.round >= 20 and outcome.reason != "leaving"]
    assert last and set(last) <= {"met", "late"}, a.outcomes


def test_a_meeting_may_end_while_another_thread_asks_whether_one_is_open():
    """Training asks before its steps, without waiting for the network's thread."""
    none: Any = None
    meetings = Meetings(none, None)

    class Round(int):
        def __ge__(self, other: int) -> bool:
            meetings._open.pop(other)  # as the other thread does, between two comparisons
            return super().__ge__(other)

    meetings._open = dict.fromkeys((3, 4), cast(Any, None))
    assert not meetings.is_open(Round(2))
