"""Start of islands: together, later, again, with lost weights, and refused."""

import asyncio

import pytest

from noloco_jax.errors import UserError
from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.catch_up import CatchUp
from noloco_jax.islands.start import LOST_SECONDS, TOGETHER_SECONDS, admit, begin
from support.island_world import Sea, Sim, participation
from support.virtual_time import run_virtual


async def later(seconds: float, sim: Sim, steps: int, **options) -> None:
    await asyncio.sleep(seconds)
    await sim.train(steps, **options)


def test_islands_that_compile_unequally_long_begin_together():
    async def main():
        sea = Sea(["a", "b", "c"])
        sims = [sea.add(name) for name in "abc"]
        begun = {}

        async def start(sim: Sim, seconds: float) -> None:
            await asyncio.sleep(seconds)
            await begin(sim.node, CatchUp(sim.node, sim), False, False)
            begun[sim.name] = asyncio.get_running_loop().time()

        await asyncio.gather(start(sims[0], 1), start(sims[1], 30), start(sims[2], 60))
        await sea.close()
        return begun

    begun = run_virtual(main())
    assert max(begun.values()) - min(begun.values()) < 1
    assert min(begun.values()) >= 60


def test_an_island_that_never_comes_is_waited_for_two_minutes_and_named():
    async def main():
        sea = Sea(["a", "b", "c"])
        a, b = sea.add("a"), sea.add("b")
        await asyncio.gather(a.train(50), b.train(50))
        await sea.close()
        return a, asyncio.get_running_loop().time()

    a, now = run_virtual(main())
    assert any("waits for c to begin together, 120 s at most" in line for line in a.lines), a.lines
    assert TOGETHER_SECONDS < now < TOGETHER_SECONDS + 30


def test_an_island_that_comes_later_takes_a_peer_s_weights():
    async def main():
        sea = Sea(["a", "b", "c"])
        sims = [sea.add(name) for name in "ab"]

        async def late() -> Sim:
            await asyncio.sleep(TOGETHER_SECONDS + 30)
            c = sea.add("c")
            await c.train(2000)
            return c

        *_, c = await asyncio.gather(*(sim.train(2000) for sim in sims), late())
        await sea.close()
        return c

    c = run_virtual(main())
    assert c.met[0].outcome == "caught up" and c.met[0].round > 20
    assert participation(c) > 0.6  # one of three is alone in each round


@pytest.mark.parametrize("behind", [1, 100])
def test_a_killed_island_resumes_from_its_checkpoint_or_from_a_peer_where_that_is_far_behind(behind):
    async def main():
        sea = Sea(["a", "b"])
        a, b = sea.add("a"), sea.add("b")

        async def killed() -> Sim:
            first = asyncio.ensure_future(b.train(10_000))
            await asyncio.sleep(50.05)
            checkpoint = b.save()
            first.cancel()
            b.kill()
            await asyncio.sleep(behind)
            again = sea.add("b", checkpoint=checkpoint, incarnation=2)
            await again.train(3000, has_weights=True)
            return again

        _, again = await asyncio.gather(a.train(3000), killed())
        await sea.close()
        return a, again

    a, again = run_virtual(main())
    outcomes = {met.outcome for met in again.met}
    assert ("caught up" in outcomes) is (behind == 100)
    assert participation(again) > 0.95
    rounds = [round for round, _ in again.applied]
    assert len(rounds) == len(set(rounds))
    if behind == 1:
        assert participation(a) > 0.95


def test_an_island_without_weights_waits_for_those_of_the_run_and_begins_anew_where_nobody_has_any():
    async def main():
        sea = Sea(["a", "b"])
        a = sea.add("a")
        alone = asyncio.ensure_future(a.train(50, began_before=True))
        await asyncio.sleep(LOST_SECONDS - 10)
        assert a.step == 0
        assert any("waits for an island with weights" in line for line in a.lines)
        b = sea.add("b")
        other = asyncio.ensure_future(b.train(50, began_before=True))
        await asyncio.gather(alone, other)
        await sea.close()
        return a, b

    a, b = run_virtual(main())
    assert a.step == b.step == 50


def test_an_island_ends_where_all_others_have_finished_and_it_has_no_weights():
    async def main():
        sea = Sea(["a", "b"])
        a = sea.add("a")
        a.node.phase, a.node.round = pb.Status.FINISHED, 99
        b = sea.add("b")
        with pytest.raises(UserError, match="a finished in round 100 and no island trains any more"):
            await b.train(50)
        await sea.close()

    run_virtual(main())


def test_most_others_that_refuse_an_island_end_its_start_with_the_value_that_differs():
    async def main():
        sea = Sea(["a", "b", "c"])
        for name in "ab":
            sea.add(name, identity={"run": "simulation", "inner.lr": "0.001"})
        c = sea.add("c", identity={"run": "simulation", "inner.lr": "0.01"})
        with pytest.raises(UserError, match=r"most islands refuse c: inner.lr: 0.01 here, 0.001 at (a|b)"):
            await admit(c.node)
        await sea.close()

    run_virtual(main())
