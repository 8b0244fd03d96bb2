"""Bounds on corrections: what one member can do to another, and what honest ones never notice."""

import random
from typing import Any

import numpy as np
import pytest

from noloco_jax.islands.payload import pair_windows
from noloco_jax.islands.protocol.bounds import ALONE, EARLY, FIRST, GROWTH, KEPT, MULTIPLE, NEEDED, Bounds, smaller
from noloco_jax.islands.protocol.events import (
    Apply,
    Arrived,
    Broken,
    Content,
    Keep,
    Open,
    Opened,
    Ready,
    RoundEnded,
    Send,
    Start,
)
from noloco_jax.islands.protocol.island import Island, Journal
from noloco_jax.islands.protocol.messages import (
    Accept,
    Caller,
    Commit,
    ExchangeId,
    Hello,
    Message,
    Outcome,
    Received,
    Status,
    StatusRequest,
)
from noloco_jax.islands.roster import Address, Roster
from noloco_jax.islands.roster import Island as Listed
from support.island_world import IDENTITY, ROUND, Node, World
from support.ports import free_ports
from support.sites import Site, side_by_side


def known(sizes: list[list[float]]) -> Bounds:
    bounds = Bounds()
    for one in sizes:
        bounds.accept(one, (), ())
    return bounds


@pytest.mark.parametrize(("count", "multiple"), [(NEEDED, EARLY), (KEPT, MULTIPLE), (3 * KEPT, MULTIPLE)])
def test_each_array_is_bounded_by_a_multiple_of_its_last_sizes_median(count, multiple):
    rng = np.random.default_rng(0)
    sizes = rng.uniform(1, 2, (count, 3)) * [1.0, 10.0, 10.0]
    median = np.median(sizes[-KEPT:], axis=0)
    least = np.sqrt((median**2).mean())  # of arrays that are smaller than most
    alone = ALONE * multiple * np.maximum(median, least)
    together = multiple * np.median(np.linalg.norm(sizes[-KEPT:], axis=1))
    bounds = known(sizes.tolist())
    for size in (median, [0.0, alone[1], 0.0], [0.0, 5 * alone[1], 0.0], 9 * median, np.multiply(median, [9, 1, 1])):
        size = np.asarray(size)
        expected = np.minimum(1.0, np.minimum(alone / np.maximum(size, 1e-9), together / np.linalg.norm(size)))
        assert (bounds.factors(size.tolist(), 1e9) or (1.0,) * 3) == pytest.approx(tuple(expected), rel=1e-2)


def test_the_first_corrections_are_bounded_by_a_share_of_the_own_message():
    assert Bounds().factors([3.0, 4.0], 5.0 / FIRST) == ()
    assert Bounds().factors([3.0, 4.0], 1.0 / FIRST) == (pytest.approx(0.2),) * 2


def test_a_bound_grows_a_little_with_each_exchange_that_it_clips_and_shrinks_with_others():
    bounds = known([[1.0]] * KEPT)
    limits = []
    for size in (100.0, 100.0, 1.0, 1.0, 1.0):
        limits.append(100.0 * bounds.factors([100.0], 1e9)[0])
        own = bounds.factors([size], 1e9)
        bounds.accept([size], own, own)
    assert limits == [pytest.approx(MULTIPLE * GROWTH**power, rel=1e-2) for power in (0, 1, 2, 1, 0)]


def test_one_of_eight_moves_no_bound_of_the_others_and_a_partitions_halves_open_theirs():
    def limit_after(far: set[int]) -> float:
        bounds = known([[1.0]] * KEPT)
        for number in range(10 * 7):
            size = 100.0 if number % 7 in far else 1.0
            own = bounds.factors([size], 1e9)
            bounds.accept([size], own, own)
        factors = bounds.factors([1000.0], 1e9)
        return 1000.0 * factors[0] if factors else 1000.0

    assert limit_after({0}) <= MULTIPLE * GROWTH * 1.01
    assert limit_after({0, 2, 4, 6}) > 90.0


def test_smaller_factors_never_exceed_one():
    assert smaller((), ()) == ()
    assert smaller((0.5, 1.0), ()) == smaller((), (0.5, 1.0)) == (0.5, 1.0)
    assert smaller((0.5, 1.0, 1.0), (0.7, 0.2, 9.0)) == (0.5, 0.2, 1.0)


def trained(journal: Journal | None = None, bounds: Bounds | None = None) -> Island:
    """Island "a", which meets "b" in every round and has ended round 0, or the one after a journal's."""
    island = Island("a", ["b"], IDENTITY, lambda round: "b", 7, journal=journal)
    if bounds is not None:
        island._context.bounds = bounds
    for event in (Start(), Ready()):
        for action in island.handle(event, 0.0):
            if isinstance(action, Open):
                island.handle(Broken(action.channel), 0.0)
    return island


def dialled(island: Island, round: int = 0) -> tuple[Any, ExchangeId]:
    actions = island.handle(RoundEnded(round, 1, 1.0), 1.0)
    ((channel, hello),) = [
        (a.channel, a.header) for a in actions if isinstance(a, Open) and isinstance(a.header, Hello)
    ]
    return channel, hello.xid


def usual() -> Bounds:
    return known([[1.0, 1.0]] * KEPT)


FAR = Content(1.0, (4 * MULTIPLE,) * 2)  # half of the correction is clipped away


def test_who_answers_has_both_use_the_smaller_factors():
    a = trained(bounds=usual())
    channel, _ = dialled(a)
    a.handle(Broken(channel), 1.0)
    xid = ExchangeId(0, "b", 1, 1)
    a.handle(Opened("x", "b", Hello(Caller(IDENTITY, "b", "a", 1, 0), xid, 1)), 1.0)
    a.handle(Arrived("x", Message(xid), FAR), 1.0)
    done = a.handle(Arrived("x", Received(xid, True, (0.25, 1.0))), 1.0)
    assert done[0] == Send("x", Commit(xid, (0.25, 0.5)))
    assert [action.factors for action in done if isinstance(action, Apply)] == [(0.25, 0.5)]


def test_who_dialled_never_uses_more_than_its_own_factors():
    a = trained(bounds=usual())
    channel, xid = dialled(a)
    a.handle(Arrived(channel, Accept(1, 0, 1)), 1.0)
    sent = Send(channel, Received(xid, True, (0.5, 0.5)))
    assert a.handle(Arrived(channel, Message(xid), FAR), 1.0) == [Keep(xid), sent]
    done = a.handle(Arrived(channel, Commit(xid, (0.1, 1.0))), 1.0)
    assert [action.factors for action in done if isinstance(action, Apply)] == [(0.1, 0.5)]


def test_a_lost_commit_is_asked_for_with_the_factors_of_both():
    a = trained(bounds=usual())
    channel, xid = dialled(a)
    a.handle(Arrived(channel, Accept(1, 0, 1)), 1.0)
    a.handle(Arrived(channel, Message(xid), FAR), 1.0)
    actions = a.handle(Broken(channel), 1.0)
    (asked,) = [action for action in actions if isinstance(action, Open) and isinstance(action.header, StatusRequest)]
    assert isinstance(asked.header, StatusRequest) and asked.header.factors == (0.5, 0.5)
    answer = Status(1, 0, True, True, 1, 1, 0.0, "a", Outcome.COMMITTED, (0.25, 0.5))
    done = a.handle(Arrived(asked.channel, answer), 1.0)
    assert [action.factors for action in done if isinstance(action, Apply)] == [(0.25, 0.5)]


def test_a_question_settles_a_held_message_with_the_askers_factors_also_after_a_restart():
    a = trained(bounds=usual())
    channel, _ = dialled(a)
    a.handle(Broken(channel), 1.0)
    xid = ExchangeId(0, "b", 1, 1)
    a.handle(Opened("x", "b", Hello(Caller(IDENTITY, "b", "a", 1, 0), xid, 1)), 1.0)
    a.handle(Arrived("x", Message(xid), FAR), 1.0)
    question = StatusRequest(IDENTITY, xid, factors=(0.25, 1.0))
    restarted = None
    for _ in range(2):
        actions = (restarted or a).handle(Opened("y", "b", question), 1.0)
        (answer,) = [x.header for x in actions if isinstance(x, Send) and isinstance(x.header, Status)]
        assert (answer.outcome, answer.factors) == (Outcome.COMMITTED, (0.25, 0.5))
        restarted = trained(Journal.from_json(a.journal().to_json()))


def test_a_restarted_island_clips_as_before():
    a = trained(bounds=usual())
    a.peers["b"].quarantined_until = 99
    journal = a.journal()
    again = trained(Journal.from_json(journal.to_json()))
    assert again.journal()._replace(round=0) == journal._replace(round=0)
    assert again._context.bounds.factors([2 * MULTIPLE] * 2, 1e9) == (0.5, 0.5)


class Numbers(World):
    """Islands whose weights are a number that takes random steps; `poison` makes what the last one sends."""

    def __init__(self, poison: float | None, count: int = 8, **arguments: Any):
        super().__init__(count, durations=[ROUND] * count, **arguments)
        self.poison, self.weights = poison, dict.fromkeys(self.names, 1000.0)
        self.steps_of = {name: random.Random(name) for name in self.names}

    def message(self, node: Node) -> tuple[float, int]:
        self.weights[node.name] += self.steps_of[node.name].choice((-1.0, 1.0))
        if node.name == "i7" and self.poison is not None:
            return self.poison, 1
        return self.weights[node.name], 1

    def distances(self, own: float, other: float) -> tuple[float, ...]:
        return (abs(own - other) + 2.0,)  # weights of many dimensions are never close in all of them

    def correction(self, node: Node, own: float, other: float, action: Apply) -> float:
        correction = super().correction(node, own, other, action)
        self.weights[node.name] += correction
        return correction

    def honest(self) -> list[float]:
        return [weight for name, weight in self.weights.items() if name != "i7"]


def test_who_is_far_and_comes_no_closer_is_left_out_and_named_by_all_and_moves_them_by_little():
    world = Numbers(poison=4000.0)
    world.run(60 * ROUND).finish()
    honest = [node for node in world.nodes.values() if node.name != "i7"]
    for node in honest:
        assert any(line.startswith("i7 is far from") for line in node.lines)
        assert not any(line.startswith(other.name) for other in honest for line in node.lines)
        assert sum(action.peer == "i7" for action in node.applied) <= 3
    assert max(abs(weight - 1000.0) for weight in world.honest()) < 200.0


def test_the_halves_of_a_partition_meet_again_and_nobody_is_named():
    world = Numbers(poison=None)
    world.cuts.append((0.0, 50 * ROUND, frozenset(world.names[:4])))
    world.at(49 * ROUND, lambda: world.weights.update({name: world.weights[name] + 60.0 for name in world.names[:4]}))
    world.run(80 * ROUND)
    assert max(world.weights.values()) - min(world.weights.values()) < 10.0
    assert not any("is far from" in line for node in world.nodes.values() for line in node.lines)
    world.finish()
    assert world.participation(52, 75) == 1.0


class Drifting(Numbers):
    """Honest islands that move apart, from round 20 on faster with every round than any bound opens."""

    def message(self, node: Node) -> tuple[float, int]:
        speed = 1.4 ** max(node.round - 20, 0)
        self.weights[node.name] += speed if self.names.index(node.name) % 2 else -speed
        return self.weights[node.name], 1


def test_two_islands_that_drift_apart_are_clipped_and_exchange_on():
    world = Drifting(None, count=2)
    world.run(60 * ROUND).finish()
    assert world.participation(3, 55) == 1.0
    assert min(min(action.factors, default=1.0) for node in world.nodes.values() for action in node.applied) < 0.5


def test_an_island_leaves_out_at_most_half_of_those_that_it_exchanges_with():
    world = Drifting(None)
    most = 0

    def count() -> None:
        nonlocal most
        for node in world.nodes.values():
            assert node.machine is not None
            peers = node.machine.peers.values()
            left_out = [peer for peer in peers if peer.quarantined_until > node.machine.status().round]
            most = max(most, len(left_out))

    for round in range(20, 60):
        world.at((round + 0.5) * ROUND, count)
    world.run(60 * ROUND)
    assert 0 < most <= 3


def test_a_pairs_windows_are_capped_by_the_more_modest_one_and_equal_on_both_sides():
    modest, wide = np.array([[10, 60, 255]], np.uint8), np.array([[254, 100, 3]], np.uint8)
    for one, other in ((modest, wide), (wide, modest)):  # 255 marks a broken block
        (found,) = pair_windows([one], [other])
        np.testing.assert_array_equal(found, [[60 + 32, 60 + 32, 255]])
        assert found.dtype == np.uint8


def test_corrections_of_real_agents_are_clipped_alike_on_both_sides():
    names = ("paris", "berlin")
    addresses = [Address("127.0.0.1", port) for port in free_ports(2)]
    roster = Roster("test", tuple(map(Listed, names, addresses)))
    paris, berlin = (Site(name, roster) for name in names)
    side_by_side(paris.open, berlin.open)
    good = berlin.message
    berlin.message = lambda round: good(round) * np.float32(1.2 if round == 6 else 1)
    side_by_side(*[lambda site=site: site.train(12, 0.3) for site in (paris, berlin)])
    side_by_side(paris.close, berlin.close)
    clipped = [one for one in paris.met if one.factor < 1]
    assert [one.round for one in clipped] == [6]
    for round in paris.corrections.keys() & berlin.corrections.keys():
        np.testing.assert_array_equal(paris.corrections[round], -berlin.corrections[round])
    usual_size = np.median([np.linalg.norm(c) for c in paris.corrections.values()])
    assert np.linalg.norm(paris.corrections[6]) == pytest.approx(EARLY * usual_size, rel=0.2)
