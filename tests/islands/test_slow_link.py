"""Islands whose links are too slow for their messages: what is exchanged, how late, and what it does to the weights."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from noloco_jax.islands import exchange
from noloco_jax.islands.exchange import PIECE_BYTES, SILENT_SECONDS, ConnectionLost
from noloco_jax.islands.meetings import Meeting
from noloco_jax.islands.network import Correction
from noloco_jax.islands.payload import Message
from noloco_jax.islands.transport import CALLS_OF_ONE
from noloco_jax.tools.cost import Setting
from noloco_jax.tools.simulate import completed_share
from support import slow_links
from support.island_world import Sim
from support.live_island import WEIGHTS, LiveIsland
from support.rosters import on_loopback
from support.slow_links import MESSAGE_BYTES, SlowSea

ALLOWED = {0.5: 0.99, 0.95: 0.99, 1.05: 0.93, 1.25: 0.75, 1.6: 0.58}  # rounds a message takes -> share completed


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(exchange, "PIECE_BYTES", slow_links.PIECE_BYTES)


async def train(sea: SlowSea, num_rounds: int) -> tuple[list[Sim], list[float]]:
    """Train all islands; return them, and the spread of their weights after every round."""
    sims, spreads = [sea.add(name) for name in sea.names], list[float]()
    for sim in sims:
        sim.target = sim.target + 3.0  # so that messages do not become small beside what differs

    async def watch() -> None:
        while True:
            await asyncio.sleep(sea.step_seconds * sea.steps_a_round)
            weights = np.stack([sim.slow for sim in sims])
            spreads.append(float(np.sqrt(np.mean((weights - weights.mean(axis=0)) ** 2))))

    watching = asyncio.ensure_future(watch())
    await asyncio.gather(*(sim.train(num_rounds * sea.steps_a_round) for sim in sims))
    watching.cancel()
    return sims, spreads[:num_rounds]


def completed(sims: list[Sim], num_rounds: int) -> float:
    """Return the share of exchanges that were completed, but for the last rounds', which the end cuts off."""
    last = num_rounds - 5 * sims[0].sea.fragments
    outcomes = [outcome.outcome in ("met", "late") for sim in sims for outcome in sim.outcomes if outcome.round < last]
    return sum(outcomes) / len(outcomes)


def setting_of(load: float, num_islands: int, fragments: int) -> Setting:
    """Return the setting of `simulate` for a run with rounds of a second."""
    bandwidth = 8 * 4e6 / fragments / load
    return Setting(
        params=1e6,
        bandwidth=bandwidth,
        latency=0.3,
        step_time=0.1,
        replicas=num_islands,
        sync_every=10 * fragments,
        fragments=fragments,
        islands=True,
    )


@pytest.mark.parametrize("load", ALLOWED)
@pytest.mark.parametrize(
    ("num_islands", "fragments"),
    [(2, 1), (8, 1), (4, 8), *(pytest.param(*one, marks=pytest.mark.slow) for one in [(4, 1), (2, 8), (8, 8)])],
)
async def test_a_link_completes_nearly_all_that_it_has_time_for(load, num_islands, fragments):
    sea = SlowSea("abcdefgh"[:num_islands], load, fragments=fragments)
    num_rounds = 160
    sims, _ = await train(sea, num_rounds)
    share = completed(sims, num_rounds)
    assert share >= ALLOWED[load]
    assert share == pytest.approx(completed_share(setting_of(load, num_islands, fragments)), rel=0.15)
    assert max(sim.finished_at for sim in sims) < 1.1 * num_rounds  # nobody waits
    committed = sum(sim.node.meetings.committed for sim in sims)
    assert sum(sea.sent.values()) < 1.06 * committed * MESSAGE_BYTES  # little is sent in vain
    assert max(outcome.steps_late or 0 for sim in sims for outcome in sim.outcomes) <= 80  # eight rounds


@pytest.mark.parametrize("num_islands", [2, 4])
@pytest.mark.parametrize("load", [0.95, 1.05, 1.6])
async def test_corrections_that_come_after_the_next_message_bring_islands_together(load, num_islands):
    """In full they would drive two islands apart, by a tenth in every round."""
    names, num_rounds = "abcd"[:num_islands], 120
    _, alone = await train(SlowSea(names, 1000.0), num_rounds)
    _, together = await train(SlowSea(names, load), num_rounds)
    assert np.mean(together[60:]) < 0.5 * np.mean(alone[60:])


@pytest.mark.parametrize("latency", [0.1, 0.3])
async def test_latency_costs_neither_exchanges_nor_time(latency):
    sea = SlowSea("abcd", 0.3, latency)
    sims, _ = await train(sea, 100)
    assert completed(sims, 100) >= 0.99
    assert max(sim.finished_at for sim in sims) < 1.03 * 100


async def test_what_a_broken_call_has_brought_is_not_sent_again():
    """A call brings a whole message only now and then."""
    sea, pieces = SlowSea("ab", 0.5), MESSAGE_BYTES // slow_links.PIECE_BYTES

    async def faults(sender: str, receiver: str, kind: str) -> None:
        if kind == "piece" and sea.random.random() < 1 / pieces:
            raise ConnectionLost("a fault of the test")

    sea.faults = faults
    sims, _ = await train(sea, 100)
    ours, theirs = (dict(sim.applied) for sim in sims)
    for round in ours.keys() & theirs.keys():
        np.testing.assert_array_equal(ours[round] + theirs[round], 0.0)
    assert len(ours.keys() ^ theirs.keys()) <= sum(sim.node.meetings.one_sided for sim in sims)
    assert completed(sims, 100) > 0.8
    committed = sum(sim.node.meetings.committed for sim in sims)
    assert sum(sea.sent.values()) < 1.25 * committed * MESSAGE_BYTES


async def test_a_partner_that_stops_in_the_middle_of_a_message_costs_the_others_nothing():
    sea = SlowSea("abcd", 0.6)
    is_stopped = asyncio.Event()

    async def faults(sender: str, receiver: str, kind: str) -> None:
        if kind == "piece" and "d" in (sender, receiver) and is_stopped.is_set():
            await asyncio.Event().wait()

    sea.faults = faults
    asyncio.get_running_loop().call_later(20.5, is_stopped.set)
    sims, _ = await train(sea, 80)
    for sim in sims[:3]:
        due = [outcome for outcome in sim.outcomes if outcome.partner != "d" and outcome.round < 75]
        assert sum(outcome.outcome in ("met", "late") for outcome in due) >= 0.97 * len(due)
        assert len(sim.node.meetings._open) <= 5


async def test_a_partner_that_sends_its_message_for_ever_costs_the_others_little():
    """A piece every ten seconds, so that its calls are never silent: an exchange of it flows until it is given up."""
    sea = SlowSea("abcd", 0.6)

    async def faults(sender: str, receiver: str, kind: str) -> None:
        if kind == "piece" and sender == "d":
            await asyncio.sleep(10.0)

    sea.faults = faults
    sims, most = [sea.add(name) for name in sea.names], 0

    async def watch() -> None:
        nonlocal most
        while True:
            await asyncio.sleep(0.5)
            most = max(most, *(len(sim.node.meetings._open) for sim in sims[:3]))

    watching = asyncio.ensure_future(watch())
    await asyncio.gather(*(sim.train(1000) for sim in sims))
    watching.cancel()
    for sim in sims[:3]:
        due = [outcome for outcome in sim.outcomes if outcome.partner != "d" and outcome.round < 95]
        assert sum(outcome.outcome in ("met", "late") for outcome in due) >= 0.95 * len(due)
    assert most <= 6


@pytest.mark.parametrize(("load", "told"), [(0.9, None), (1.6, 0.62)])
async def test_a_link_that_is_too_slow_is_told_once_with_what_would_fit(load, told):
    sea = SlowSea("ab", load)
    sims = [sea.add(name) for name in "ab"]
    await asyncio.gather(*(sim.train(1000) for sim in sims))
    for sim in sims:
        lines = [line for line in sim.lines if "carries" in line]
        assert len(lines) == (told is not None)
        for line in lines:
            assert line.startswith(f"{sim.name}'s link carries 0.")
            assert ": give a narrower wire, if there is one, or sync_every=" in line
            assert 10 / float(line.rsplit("=")[1]) == pytest.approx(told, abs=0.08)


def test_a_piece_of_each_of_a_members_calls_passes_a_megabit_a_second_before_they_count_as_silent():
    assert CALLS_OF_ONE * 8 * PIECE_BYTES / 1e6 < SILENT_SECONDS


def test_a_message_lacks_what_is_committed_until_its_exchange_begins(tmp_path, monkeypatch):
    link, begun = LiveIsland("a", on_loopback("a", "b"), tmp_path).link, []
    meetings, link.node.table.round = link.node.meetings, 4
    monkeypatch.setattr(link.node.table.pace, "round_ended", lambda *all: None)
    monkeypatch.setattr(meetings, "begin", lambda *all: begun.append(set(meetings.unapplied)))
    link.round_ended(5, 50, Message(5, [WEIGHTS]), 1.0, 100)
    for round in (3, 4):  # committed before the network's thread hears of the round's end, and taken after it
        meetings.unapplied.add(round)
        link.deliver(round, list)
        cast(Correction, link._arriving[-1]).arrays.result()
    assert [item.round for item in link.take()] == [3, 4]
    link.round_ended(6, 60, Message(6, [WEIGHTS]), 1.0, 100)
    link._loop.run_until_complete(asyncio.sleep(0))
    link._loop.close()
    assert begun == [{3, 4}, set()]


async def test_the_size_on_record_is_what_was_applied_of_a_correction(monkeypatch):
    """It lacked one other when it was judged, and three when it was committed, with the partner's factor of 0.1."""
    sea, accepted = SlowSea("ab", 0.5), []
    a, _ = sea.add("a"), sea.add("b")
    attempt: Any = SimpleNamespace(own=0.0, read=0.0, norm=100.0, size=1.0, weight=0.5)
    meetings, meeting = a.node.meetings, Meeting(0, "b", attempt, 0, lacks=1.0)
    meetings._open[0] = meeting
    monkeypatch.setattr(meetings._bounds, "accept", lambda *all: accepted.append(all[-1]))
    monkeypatch.setattr(a, "deliver", lambda round, correct: None)
    attempt.factor, meeting.lacks = meetings._factor(0, 1.0), 3.0
    meetings._commit(meeting, 0.1)
    assert accepted == [pytest.approx(0.1 * 2**1.5)] and meetings.unapplied == {0}
