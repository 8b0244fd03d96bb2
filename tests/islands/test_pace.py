"""Pace of islands: pauses of equal machines, and strides of unequal ones with --pace=time."""

import asyncio
import math

import pytest

from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.pace import EARNED, MAX_EARNED, Pace
from support.island_world import MemoryStream, Sea, participation


async def train_at(
    speeds: dict[str, float], *, by_time: bool, steps: int, stop: float = 0.0, late: float = 0.0, **options
):
    """Train islands of these seconds a step, of which the first one stops for a while and the last starts later."""

    sea = Sea(list(speeds), **options)
    sims = [sea.add(name, step_seconds=seconds, by_time=by_time) for name, seconds in speeds.items()]
    training = [sim.train(steps, after=late if sim is sims[-1] else 0.0) for sim in sims]
    await asyncio.gather(*training, sims[0].stop(40, stop))
    return sims


async def test_islands_of_equal_speed_stay_level_where_one_is_held_up_now_and_then():
    a, b = await train_at({"a": 0.1, "b": 0.103}, by_time=False, steps=4000, stop=1.5)
    for sim in (a, b):
        assert participation(sim) > 0.98
        late = [outcome.steps_late for outcome in sim.outcomes if outcome.steps_late is not None]
        assert sum(late) < 3 * len(late)
        assert "caught up" not in {outcome.outcome for outcome in sim.outcomes}


async def test_islands_whose_speed_differs_for_a_while_stay_level():
    """As where one of those that share a machine stops, and the others have its cores."""
    sea = Sea("abcd")
    sims = [sea.add(name) for name in "abcd"]

    async def contention() -> None:
        await asyncio.sleep(30)
        for seconds in (0.17, 0.1):
            for sim in sims[1:]:
                sim.step_seconds = seconds
            await asyncio.sleep(40)

    await asyncio.gather(*(sim.train(1200) for sim in sims), contention())
    for sim in sims:
        assert participation(sim) > 0.97, sim.name


async def test_islands_meet_where_one_is_always_slower_by_less_than_half():
    """As where a round without an exchange takes less time: an island that is alone would stay ahead for ever."""
    for sim in await train_at({"a": 0.1, "b": 0.14}, by_time=False, steps=6000):
        assert participation(sim) > 0.97


async def test_a_fast_island_pauses_for_a_third_of_its_time_at_most_and_is_told_of_time_s_pace():
    fast, *slow = await train_at({"a": 0.1, "b": 0.2, "c": 0.4}, by_time=False, steps=3000)
    assert fast.finished_at < 0.1 * (3000 + MAX_EARNED + EARNED * 3000) + 5
    assert any("--pace=time" in line for line in fast.lines)
    assert not any("--pace=time" in line for line in slow[-1].lines)


async def test_advice_on_pace_follows_an_exchange_that_was_missed_and_names_the_partner(monkeypatch):
    monkeypatch.setattr(Pace, "has_paused_in_vain", True)
    sea = Sea("ab")
    a, b = sea.add("a"), sea.add("b")
    training = [asyncio.ensure_future(sim.train(10**6)) for sim in (a, b)]
    await asyncio.sleep(60)
    assert {outcome.outcome for outcome in a.outcomes} <= {"met", "late"} and len(a.outcomes) > 40
    assert not any("--pace=time" in line for line in a.lines)
    sea.cut = lambda me, peer: True
    await asyncio.sleep(60)
    assert sum("b is later, although a pauses" in line and "--pace=time" in line for line in a.lines) == 1
    for task in training:
        task.cancel()


@pytest.mark.parametrize(
    ("speeds", "stop", "late"),
    [({"a": 0.1, "b": 0.2, "c": 0.4}, 4.0, 0.0), ({"a": 0.1, "b": 0.2, "c": 1.0}, 0.0, 20.0)],
    ids=["1:2:4 with a stop", "1:2:10 with a late start"],
)
async def test_unequal_islands_meet_in_nearly_every_round_with_time_s_pace(speeds, stop, late):
    sims = await train_at(speeds, by_time=True, steps=4000, stop=stop, late=late, steps_a_round=20)
    for sim in sims:
        due = [outcome for outcome in sim.outcomes if outcome.round >= 40 and outcome.reason != "leaving"]
        exchanged = [one for one in due if one.outcome in ("met", "late")]
        assert len(exchanged) >= 0.97 * len(due), (sim.name, [one for one in due if one.outcome == "alone"])
        assert not any("--pace=time" in line for line in sim.lines)
    fastest = sims[0]
    assert fastest.inner_steps > 0.93 * 4000  # it takes nearly every step, but after a stop
    assert fastest.finished_at - fastest.began_at < 1.05 * 0.1 * 4000
    assert sims[2].inner_steps < 0.5 * 4000


async def test_a_status_tells_the_round_time_that_is_kept_and_a_timing_that_of_all_inner_steps():
    slow = (await train_at({"a": 0.1, "b": 0.2, "c": 0.4}, by_time=True, steps=1000, steps_a_round=20))[2].node
    assert slow.table.pace.timing(0, 0.0).round_seconds == pytest.approx(0.4 * 20)
    assert slow.status().round_seconds == pytest.approx(0.1 * 20, rel=0.2)


async def test_one_fast_island_of_five_does_not_make_the_others_skip_steps():
    fast, *others = await train_at({"a": 0.15} | dict.fromkeys("bcde", 0.2), by_time=True, steps=1000)
    for sim in (fast, *others):
        assert sim.inner_steps > 0.95 * 1000
        assert participation(sim, 20) > 0.7  # one of five is alone in each round


LIES = {  # (round, ago, round_seconds) -> what is told in their place
    "behind": lambda round, ago, seconds: (max(round - 60, 0), 0.0, seconds),
    "ahead": lambda round, ago, seconds: (round + 1000, 0.0, seconds),
    "huge": lambda round, ago, seconds: (2**40 - 1, 9e5, 9e5),
    "negative": lambda round, ago, seconds: (round, -9e5, -9e5),
    "no number": lambda round, ago, seconds: (round, math.nan, math.inf),
    "fast": lambda round, ago, seconds: (round, ago, 1e-9),
    "fast and early": lambda round, ago, seconds: (round, ago + 3, 0.1),
    "jumping": lambda round, ago, seconds: (round + round % 7, 1e3 * (round % 3), (1e-9, 0.3, 1e5)[round % 3]),
}


def lying(lie: str, liar: str) -> type[MemoryStream]:
    """Return streams in which one island's frames, and no others, tell false times and rounds."""

    class Lying(MemoryStream):
        async def send(self, frame: pb.Frame) -> None:
            kind = frame.WhichOneof("kind")
            if self._me == liar and kind in ("hello", "accept", "no"):
                told, round = getattr(frame, kind), self._sea.islands[liar].node.table.round
                if kind == "no":
                    told.round = LIES[lie](round, 0.0, 0.0)[0]
                else:
                    timing = told.timing
                    _, timing.ago, timing.round_seconds = LIES[lie](round, timing.ago, timing.round_seconds)
            await super().send(frame)

    return Lying


@pytest.mark.parametrize("by_time", [False, True], ids=["equal steps", "time"])
@pytest.mark.parametrize("lie", LIES)
async def test_what_one_member_tells_of_its_time_costs_the_others_a_twentieth_at_most(lie, by_time):
    for names in ("ab", "abc", "abcd"):
        sea = Sea(names)
        sea.stream = lying(lie, names[-1])
        *honest, _ = [sea.add(name, by_time=by_time) for name in names]
        await asyncio.gather(*(sim.train(600) for sim in sea.islands.values()))
        for sim in honest:
            assert sim.inner_steps >= 0.95 * 600, (names, sim.name)
            assert sim.finished_at - sim.began_at <= 1.05 * 0.1 * 600, (names, sim.name)


async def test_calls_for_rounds_that_the_caller_has_left_behind_hold_nobody_up():
    sea = Sea("ab")
    a, b = sea.add("a"), sea.add("b")

    async def calling() -> None:
        while a.node.table.round < 55:
            await asyncio.sleep(0.5)
            if a.node.table.round >= 20:
                hello = pb.Hello(round=a.node.table.round - 20, incarnation=1, tokens=100, identity=a.node.table.digest)
                async with b.node.table.network.exchange("a") as stream:
                    await stream.send(pb.Frame(hello=hello))
                    await stream.receive()

    await asyncio.gather(a.train(600), b.train(600), calling())
    assert a.finished_at - a.began_at <= 1.05 * 0.1 * 600


def test_a_pause_is_a_quarter_of_the_speed_and_ends_with_the_lead():
    pace = Pace(10)
    now = 0.0
    for step in range(40):
        pace.stride(now, 1)
        now += 1.0
        if step % 10 == 9:
            pace.round_ended(step // 10, now)
    pace.stride(now, 1)
    for _ in range(5):
        now += 1.0
        pace.stride(now, 1)
    pace.adapt("b", 3, pb.Timing(), now, now)  # the partner has ended the same round only now
    assert pace.pause() == pytest.approx(3.0)
    assert 0 < pace.pause() <= 3.0
    assert pace.pause() == 0.0
