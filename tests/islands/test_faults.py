"""Thousands of fault schedules: no exchange is applied on one side alone unless that is logged.

`support/island_world.py` asserts in each of them: Σ w c = 0 except for halves that were logged or lost with their
island's weights, nothing applied or dropped twice, nothing waited for longer than `patience` rounds.
"""

import functools
import random

import pytest

from noloco_jax.islands.protocol.context import Settings
from noloco_jax.islands.protocol.pace import MOST_UNEQUAL
from support.island_world import FRAME_FAULTS, MOMENTS, NODE_FAULTS, ROUND, Fault, World, all_points


def settings(patience: int = 2) -> Settings:
    return Settings(patience, answer_seconds=3.0, state_seconds=30.0)


@functools.cache
def points(count: int, seed: int = 0, until: float = 2.6 * ROUND, patience: int = 2) -> list[tuple[str, int]]:
    return all_points(World(count, seed=seed, settings=settings(patience)).run(until))


def met_again(world: World) -> bool:
    """Return whether exchanges continue after all faults: lately committed, or a late island has just taken a state."""
    last = min(node.round for node in world.nodes.values())
    return world.participation(last - 7, last - 1) >= 0.3 or any(
        heal.round >= last - 8 for node in world.nodes.values() for heal in node.heals
    )


def draw_fault(rng: random.Random, at: list[tuple[str, int]]) -> Fault:
    kind, nth = rng.choice(at)
    if kind == "Apply" or rng.random() < 0.4:
        return Fault(kind, nth, rng.choice(NODE_FAULTS), rng.choice(MOMENTS))
    return Fault(kind, nth, rng.choice(FRAME_FAULTS))


@pytest.mark.parametrize("action", FRAME_FAULTS)
def test_exchanges_continue_after_any_one_faulty_header_of_the_first_rounds(action):
    for kind, nth in points(2):
        if kind != "Apply":
            assert met_again(World(2, [Fault(kind, nth, action)], settings=settings()).run(110).finish())


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("action", NODE_FAULTS)
def test_exchanges_continue_after_either_side_dies_or_stops_at_any_point(action, moment):
    for kind, nth in points(2):
        assert met_again(World(2, [Fault(kind, nth, action, moment)], settings=settings()).run(120).finish())


@pytest.mark.parametrize("seed", range(4))
def test_exchanges_continue_after_random_pairs_of_faults(seed):
    rng = random.Random(seed)
    for _ in range(200):
        at, number = points(2), rng.randrange(10**6)
        faults = [draw_fault(rng, at), draw_fault(rng, at)]
        assert met_again(World(2, faults, seed=number, settings=settings()).run(120).finish()), (faults, number)


@pytest.mark.parametrize("seed", range(4))
def test_exchanges_continue_after_random_sequences_of_faults_and_partitions(seed):
    rng = random.Random(100 + seed)
    for _ in range(25):
        count, number = rng.randrange(2, 6), rng.randrange(10**6)
        patience = rng.choice((1, 2, 2, 3))
        at = points(count, number, 45.0, patience)
        faults = [draw_fault(rng, at) for _ in range(rng.randrange(3, 12))]
        world = World(
            count,
            faults,
            seed=number,
            settings=settings(patience),
            durations=[ROUND * rng.uniform(0.98, 1.02) for _ in range(count)],
            downtime=rng.choice((0.3, 1.3, 3.0)) * ROUND,
            save_every=rng.choice((1, 2, 4)),
            quiet_after=60.0,
        )
        begin = rng.uniform(5.0, 40.0)
        if rng.random() < 0.3:
            world.cuts.append((begin, begin + rng.uniform(3.0, 20.0), frozenset(rng.sample(world.names, count // 2))))
        assert met_again(world.run(170).finish()), (faults, number, patience)


@pytest.mark.parametrize("action", NODE_FAULTS)
def test_a_failed_island_costs_the_others_no_exchange(action):
    for kind, nth in [point for point in points(4, until=1.5 * ROUND) if point[0] in ("Hello", "Message", "Commit")]:
        world = World(4, [Fault(kind, nth, action, MOMENTS[1])], settings=settings(), downtime=None).run(125).finish()
        (hit,) = [node.name for node in world.nodes.values() if node.disturbed]
        for node in world.nodes.values():
            met = {xid.round for xid in node.weights}
            for round in range(8):
                partner = world.partner(node.name)(round)
                if hit not in (node.name, partner):
                    assert round in met, f"{node.name} and {partner} in round {round}: {hit} is away"


@pytest.mark.parametrize("durations", [(10.0, 20.0, 40.0), (10.0, 10.7, 11.9, 13.0)])
def test_slow_islands_delay_nobody_and_leave_no_half_exchange(durations):
    world = World(len(durations), settings=settings(), durations=durations).run(400).finish()
    fastest = min(world.nodes.values(), key=lambda node: node.duration)
    followed = [duration for duration in durations if duration <= MOST_UNEQUAL * fastest.duration]
    assert fastest.round >= int((400 - 10) / max(followed)) - 1  # without the start


def test_one_lost_header_leaves_no_exchange_one_sided():
    """Cover each header of the first rounds."""
    one_sided_count = applied = 0
    for kind, nth in points(2):
        world = World(2, [Fault(kind, nth, "drop")], settings=settings()).run(110).finish()
        one_sided_count += sum(len(node.one_sided) for node in world.nodes.values())
        applied += sum(len(node.applied) for node in world.nodes.values())
    assert one_sided_count == 0
    assert applied > 0
