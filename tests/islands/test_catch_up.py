"""Catching up: when, from whom, and what a false donor can do."""

import asyncio

import numpy as np
import pytest

from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.catch_up import CatchUp, locate, receive
from noloco_jax.islands.exchange import ConnectionLost, ProtocolError
from noloco_jax.islands.interfaces import RoundOutcome
from noloco_jax.islands.peers import MAX_ROUND
from support.island_world import Sea, Sim, participation


def over(outcome: RoundOutcome) -> bool:
    """Return whether a round was alone as one of the two had taken its last step."""
    return outcome.reason in ("leaving", "it has finished", "the partner has finished")


@pytest.mark.parametrize("behind", [3, 10, 40, 84, 200])
async def test_an_island_with_fast_rounds_that_is_behind_meets_again_within_seconds(behind):
    """Rounds of 60 ms: neither the patience nor the five seconds leave a zone in which nothing happens."""
    sea = Sea(["a", "b"], step_seconds=0.006)
    a, b = sea.add("a"), sea.add("b")
    await asyncio.gather(a.train(8000), b.train(8000), b.stop(3, 0.06 * behind))
    stopped = 50  # rounds before
    last_missed = max(
        (outcome.round for outcome in b.outcomes if outcome.outcome == "alone" and not over(outcome)), default=0
    )
    assert last_missed < stopped + behind + 100, [outcome for outcome in b.outcomes if outcome.outcome == "alone"][-3:]
    assert participation(a, stopped + behind + 100) > 0.97


async def test_a_round_that_ends_before_a_donor_s_weights_are_taken_is_left_out():
    """Each step ends a round: one ends after the weights have come, and before the next step continues from them."""
    sea = Sea(["a", "b"], steps_a_round=1)
    a, b = sea.add("a"), sea.add("b")
    await asyncio.gather(a.train(1000), b.train(1000), b.stop(10, 20))
    (caught_up,) = (outcome.round for outcome in b.outcomes if outcome.outcome == "caught up")
    assert [outcome.round for outcome in b.outcomes if outcome.round > caught_up][:3] == [
        caught_up + 1,
        caught_up + 2,
        caught_up + 3,
    ]
    assert participation(b, caught_up + 5) > 0.97 and b.round == a.round


class Liar(Sim):
    """Claims another round than its own, and gives these weights."""

    claim = 1_000_000
    given = 1e6

    async def position(self) -> pb.Position:
        return pb.Position(round=self.claim, step=10 * (self.claim + 1), has_averaged=True)

    async def weights(self, kind: int) -> bytes:
        return np.full(4, self.given).tobytes()


def _lying(sea: Sea, name: str, claim: int, weights: float) -> Liar:
    sim = sea.islands[name] = Liar(sea, name)
    sim.claim, sim.given = claim, weights
    told = sim.node.status

    def status(**fields) -> pb.Status:
        made = told(**fields)
        made.round, made.has_averaged = claim, True
        return made

    sim.node.status = status  # type: ignore[method-assign]
    return sim


async def test_a_member_that_claims_the_largest_round_is_nobody_s_donor():
    """One of five tells round 1,000,000, to an island that must catch up again and again."""
    sea = Sea(["a", "b", "c", "d", "liar"])
    sims = [sea.add(name) for name in "abcd"]
    liar = _lying(sea, "liar", 1_000_000, 1e6)
    stops = [sims[3].stop(40 * i, 15) for i in range(1, 7)]
    await asyncio.gather(*(sim.train(4000) for sim in sims), liar.train(4000), *stops)
    donors = [outcome.partner for sim in sims for outcome in sim.outcomes if outcome.outcome == "caught up"]
    assert len(donors) >= 4 and "liar" not in donors
    assert all(np.abs(sim.slow).max() < 10 for sim in sims)


async def test_a_donor_is_near_the_median_round_when_it_is_chosen_and_when_its_weights_have_come():
    a = Sea(list("abcde")).add("a")
    catch_up = CatchUp(a.node, a)
    rounds = zip("bcde", (10, 10, 11, 1000), strict=True)
    found = {name: pb.Status(phase=pb.Status.TRAINING, round=round) for name, round in rounds}
    assert sorted(catch_up._donors(found)) == ["b", "c", "d"]
    catch_up._check(pb.Position(round=11), found)
    with pytest.raises(ProtocolError, match="where most are at"):
        catch_up._check(pb.Position(round=1000), found)


@pytest.mark.parametrize("step", [0, 55, 10**9])
async def test_a_position_whose_step_and_round_do_not_belong_together_is_refused(step):
    sea = Sea("ab")
    sea.add("a", fits=lambda round, step: round + 1 == step // 10)
    liar = sea.islands["b"] = Liar(sea, "b")
    a = sea.islands["a"]
    a.node.table.phase = liar.node.table.phase = pb.Status.TRAINING
    liar.node.table.round = 5
    catch_up = CatchUp(a.node, a)
    status = pb.Status(phase=pb.Status.TRAINING, round=5)

    async def position() -> pb.Position:
        return pb.Position(round=5, step=step)

    liar.position = position
    assert not await catch_up.from_one_of({"b": status})
    assert any("do not belong together" in line for line in a.lines), a.lines
    assert not a.inbox


async def test_a_position_is_asked_for_once_the_weights_have_come_through_a_line_that_holds_them():
    """Buffers of a slow line take all weights at once, and deliver them half a minute later."""
    sea = Sea("ab")
    a, b = sea.add("a"), sea.add("b")
    training = asyncio.ensure_future(a.train(10_000, has_weights=True))
    await asyncio.sleep(180)
    weights = b.node.table.network.weights

    async def slow_line(peer, request):
        frames = [frame async for frame in weights(peer, request)]
        for frame in frames:
            await asyncio.sleep(0.1 if request.position else 15)
            yield frame

    b.node.table.network.weights = slow_line  # type: ignore[method-assign]
    assert await CatchUp(b.node, b).from_one_of({"a": a.node.status()})
    assert not training.done() and a.node.table.round > 60 and a.node.table.round - b.node.table.round <= 1


async def test_a_donor_whose_inner_steps_take_minutes_is_waited_for():
    sea = Sea("ab")
    a, b = sea.add("a"), sea.add("b")
    weights = a.weights

    async def after_a_step(kind: int) -> bytes:
        await asyncio.sleep(300)
        return await weights(kind)

    a.weights = after_a_step
    a.node.table.phase = pb.Status.TRAINING
    data = await receive(b.node.table.network, "a", pb.WeightsRequest(), b.num_bytes(0))
    assert len(data) == 32


@pytest.mark.parametrize(
    "fault",
    ["not finite", "too long", "too short", "another size", "silent", "dripping", "piece first"],
)
async def test_weights_that_are_not_whole_or_not_finite_are_refused(fault):
    async def frames():
        if fault == "silent":
            await asyncio.sleep(1e6)
        if fault != "piece first":
            yield pb.WeightsFrame(offer=pb.Offer(num_bytes=16 if fault != "another size" else 1 << 40))
        while fault == "dripping":
            await asyncio.sleep(10)
            yield pb.WeightsFrame(piece=pb.Piece(data=b"x"))
        size = {"too long": 24, "too short": 8}.get(fault, 16)
        yield pb.WeightsFrame(piece=pb.Piece(data=np.full(size // 8, np.nan).tobytes()))

    class Network:
        def weights(self, peer, request):
            return frames()

    with pytest.raises(ConnectionLost if fault == "silent" else ProtocolError):
        async with asyncio.timeout(60):
            data = await receive(Network(), "b", pb.WeightsRequest(), 16)  # type: ignore[arg-type]
        await Sea("ab").add("a").received(data, pb.Position())


@pytest.mark.parametrize(("round", "step"), [(-2, 0), (MAX_ROUND, 0), (0, MAX_ROUND)])
async def test_an_impossible_position_is_refused(round, step):
    class Network:
        async def weights(self, peer, request):
            yield pb.WeightsFrame(position=pb.Position(round=round, step=step))

    with pytest.raises(ProtocolError, match="impossible round"):
        await locate(Network(), "b")  # type: ignore[arg-type]
