"""Start of islands: together, later, again, with lost weights, and refused."""

import asyncio

import numpy as np
import pytest

from noloco_jax.errors import UserError
from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.catch_up import CatchUp
from noloco_jax.islands.exchange import ConnectionLost
from noloco_jax.islands.start import LOST_SECONDS, TOGETHER_SECONDS, admit, begin
from support.island_world import Sea, Sim, participation


async def test_islands_that_compile_unequally_long_begin_together():
    sea = Sea("abc")
    sims = [sea.add(name) for name in "abc"]

    async def start(sim: Sim, seconds: float) -> float:
        await asyncio.sleep(seconds)
        await begin(sim.node.table, CatchUp(sim.node, sim), False, False)
        return asyncio.get_running_loop().time()

    begun = await asyncio.gather(start(sims[0], 1), start(sims[1], 30), start(sims[2], 60))
    assert max(begun) - min(begun) < 1 and min(begun) >= 60


async def test_an_island_that_never_comes_is_waited_for_two_minutes_and_named():
    sea = Sea("abc")
    a, b = sea.add("a"), sea.add("b")
    await asyncio.gather(a.train(50), b.train(50))
    assert any("waits for c to begin together, 120 s at most" in line for line in a.lines), a.lines
    assert TOGETHER_SECONDS < asyncio.get_running_loop().time() < TOGETHER_SECONDS + 30


async def test_an_island_that_comes_later_takes_a_peer_s_weights():
    sea = Sea("abc")
    sims = [sea.add(name) for name in "ab"]

    training = asyncio.gather(*(sim.train(2000) for sim in sims))
    await asyncio.sleep(TOGETHER_SECONDS + 30)
    c = sea.add("c")
    await asyncio.gather(training, c.train(2000))
    assert c.outcomes[0].outcome == "caught up" and c.outcomes[0].round > 20
    assert participation(c) > 0.6  # one of three is alone in each round


@pytest.mark.parametrize("behind", [1, 100])
async def test_a_killed_island_resumes_from_its_checkpoint_or_from_a_peer_where_that_is_far_behind(behind):
    sea = Sea("ab")
    a, b = sea.add("a"), sea.add("b")
    training, killed = asyncio.ensure_future(a.train(3000)), asyncio.ensure_future(b.train(10_000))
    await asyncio.sleep(50.05)
    b.apply()
    saved = b.node.to_json()
    killed.cancel()
    b.kill()
    await asyncio.sleep(behind)
    again = sea.add("b", saved=saved, incarnation=2)
    again.slow, again.momentum, again.step = b.slow, b.momentum, b.step
    await asyncio.gather(training, again.train(3000, has_weights=True))
    outcomes = {outcome.outcome for outcome in again.outcomes}
    assert ("caught up" in outcomes) is (behind == 100)
    assert participation(again) > 0.95
    rounds = [round for round, _ in again.applied]
    assert len(rounds) == len(set(rounds))
    if behind == 1:
        assert participation(a) > 0.95


async def test_an_island_without_weights_waits_for_those_of_the_run_and_begins_anew_where_nobody_has_any():
    sea = Sea("ab")
    a = sea.add("a")
    alone = asyncio.ensure_future(a.train(50, began_before=True))
    await asyncio.sleep(LOST_SECONDS - 10)
    assert a.step == 0
    assert any("waits for an island with weights" in line for line in a.lines)
    b = sea.add("b")
    await asyncio.gather(alone, b.train(50, began_before=True))
    assert a.step == b.step == 50


async def test_an_island_without_weights_ends_where_all_others_have_finished_and_gone():
    sea = Sea("ab")
    a, b = sea.add("a"), sea.add("b")
    a.node.table.phase, a.node.table.round = pb.Status.FINISHED, 99
    for _ in range(6):  # its inner steps have a duration
        a.node.table.pace.stride(asyncio.get_running_loop().time(), 1)
        await asyncio.sleep(0.1)
    starting = asyncio.ensure_future(b.train(50))
    b.weights = a.weights = never_given
    await asyncio.sleep(30)
    assert not starting.done()
    a.kill()
    with pytest.raises(UserError, match="a finished in round 100 and no island gives weights any more"):
        await starting


async def test_one_of_three_that_says_it_has_finished_does_not_end_a_run_that_begins():
    sea = Sea("abc")
    a, b = sea.add("a"), sea.add("b")
    for sim in (a, b):
        sim.node.table.hear("c", 99)
        sim.node.table.hear_phase("c", pb.Status.FINISHED)
    await asyncio.gather(a.train(50), b.train(50))
    assert a.step == b.step == 50


async def test_an_island_that_lost_its_weights_ends_where_all_others_were_given_up():
    a = Sea("ab").add("a")
    a.node.table.hear_phase("b", pb.Status.GONE)
    with pytest.raises(UserError, match="all other islands have ended for good"):
        await a.train(50, began_before=True)


async def test_the_weights_of_a_short_run_that_is_over_are_taken_without_a_checkpoint():
    sea = Sea("ab")
    a, b = sea.add("a"), sea.add("b")
    await asyncio.gather(a.train(50), b.train(50))
    b.kill()
    back = sea.add("b", incarnation=2000)
    await back.train(50, began_before=True)
    assert back.inner_steps == 0 and np.array_equal(back.slow, a.slow)


async def never_given(kind: int) -> bytes:
    raise ConnectionLost("no copy of the weights")


@pytest.mark.parametrize("has_weights", [True, False], ids=["with a checkpoint", "without"])
@pytest.mark.parametrize("killed_in", range(70, 80))
async def test_an_island_killed_near_the_end_comes_back_after_it_and_ends_with_the_finished_weights(
    killed_in, has_weights
):
    """The others, which have 80 rounds, wait for it and hear that it has finished."""
    sea = Sea("abcd")
    sims = [sea.add(name) for name in "abcd"]
    training = [asyncio.ensure_future(sim.train(800)) for sim in sims]
    victim, others = sims[0], sims[1:]
    await victim.node.table.until(lambda: victim.node.table.round >= killed_in - 1)
    victim.kill()
    training[0].cancel()
    round = 60  # of the checkpoint
    saved = {"round": round, "has_averaged": True, "peers": {}} | victim.node.meetings.to_json()
    await asyncio.gather(*training[1:])
    await asyncio.sleep(1)
    assert [sim.node.unfinished() for sim in others] == [["a"]] * 3
    back = sea.add("a", incarnation=2000, saved=saved if has_weights else None)
    back.step = 10 * (round + 1) if has_weights else 0
    await back.train(800, has_weights=has_weights, began_before=True)
    assert back.step == 800 and back.inner_steps == 0 and back.node.table.round == 79
    assert any(np.array_equal(back.slow, sim.slow) for sim in others)
    assert [outcome.outcome for outcome in back.outcomes] == ["caught up"]
    await asyncio.sleep(1)
    assert [sim.node.unfinished() for sim in sims[1:]] == [[]] * 3


async def test_an_island_that_comes_back_within_its_patience_of_the_end_takes_its_own_last_steps():
    sea = Sea("ab")
    a, b = sea.add("a"), sea.add("b", incarnation=2000, saved=None)
    await asyncio.gather(a.train(800), b.train(800))
    saved = b.node.to_json() | {"round": 77}
    b.kill()
    back = sea.add("b", incarnation=3000, saved=saved)
    back.slow, back.step = b.slow.copy(), 780
    await back.train(800, has_weights=True)
    assert back.step == 800 and back.inner_steps == 20


async def test_most_others_that_refuse_an_island_end_its_start_with_the_value_that_differs():
    sea = Sea("abc")
    for name in "ab":
        sea.add(name, identity={"run": "simulation", "inner.lr": "0.001"})
    c = sea.add("c", identity={"run": "simulation", "inner.lr": "0.01"})
    with pytest.raises(UserError, match=r"most islands refuse c: inner.lr: 0.01 here, 0.001 at (a|b)"):
        await admit(c.node.table)
