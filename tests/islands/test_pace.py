"""Islands of unequal speed: rounds that end together, by virtual clocks, and nobody who waits."""

import dataclasses
import random
import re
from typing import Any

import pytest

from noloco_jax.islands.protocol.context import Settings
from noloco_jax.islands.protocol.messages import Speed, Timing
from noloco_jax.islands.protocol.pace import ENDS_KEPT, SHARE, Pace
from noloco_jax.islands.protocol.speeds import MOST_TIMED, MOST_TOLD, ROUNDS_KNOWN, Speeds
from support.island_world import FRAME_FAULTS, MOMENTS, NODE_FAULTS, ROUND, Fault, World, all_points

SETTINGS = Settings(answer_seconds=3.0, state_seconds=30.0, keeps_pace=True)
STEPS = 50  # of a round
SPEEDS = (4, 2, 1)


def paced(durations, seconds: float, settings: Settings = SETTINGS, **arguments) -> World:
    return World(len(durations), durations=durations, steps=STEPS, settings=settings, **arguments).run(seconds)


def apart(world: World, round: int) -> float:
    """Seconds from the first to the last end of a round."""
    ends = [node.ends[round] for node in world.nodes.values()]
    return max(ends) - min(ends)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("count", [3, 6])
def test_islands_at_speeds_1_to_2_to_4_meet_in_nine_of_ten_rounds_and_none_is_held_up(count, seed):
    durations = [ROUND * 4 / SPEEDS[number % 3] for number in range(count)]
    world = paced(durations, 60 * ROUND, seed=seed).finish()
    assert world.participation(2, 55) >= 0.9
    for node in world.nodes.values():
        seconds_a_step = node.duration / STEPS
        assert node.all_steps >= 0.98 * 60 * ROUND / seconds_a_step  # it has never waited
        rounds = max(node.ends)
        assert rounds >= 0.95 * 60  # as many as the fastest would have ended alone
        assert not node.heals
    assert all(apart(world, round) < ROUND / 3 for round in range(15, 55))


def test_without_pace_the_same_islands_hardly_meet():
    settings = dataclasses.replace(SETTINGS, keeps_pace=False)
    world = paced([ROUND, 2 * ROUND, 4 * ROUND], 60 * ROUND, settings=settings).finish()
    assert world.participation(2, 55) < 0.5
    told = [line for node in world.nodes.values() for line in node.lines if "--pace=time" in line]
    assert re.search(r"an inner step takes 0\.[0-9]+ s here and 0\.[0-9]+ s on i[0-2]", told[0])
    assert len(told) <= 6  # once of each other island


def test_islands_of_equal_speed_take_every_step_of_the_schedule():
    world = paced([ROUND] * 4, 60 * ROUND).finish()
    for node in world.nodes.values():
        assert node.all_steps >= 0.97 * node.position
    assert world.participation(2, 55) >= 0.9


def test_a_message_weighs_what_was_trained_on_for_it():
    world = paced([ROUND, 4 * ROUND], 40 * ROUND).finish()
    fast, slow = world.nodes.values()
    for xid in fast.weights.keys() & slow.weights.keys():
        if xid.round > 5:
            assert fast.weights[xid][0] / slow.weights[xid][0] == pytest.approx(4, rel=0.35)
    weights = [action.weight for action in slow.applied if action.xid.round > 5]
    assert weights and sum(weights) / len(weights) == pytest.approx(0.8, abs=0.03)


def test_who_was_held_up_is_back_with_the_others_in_a_few_rounds():
    world = World(3, durations=[ROUND, 2 * ROUND, 4 * ROUND], steps=STEPS, settings=SETTINGS)
    world.at(20.2 * ROUND, setattr, world.nodes["i1"], "stopped_until", 21.2 * ROUND)
    world.run(45 * ROUND).finish()
    held_up = world.nodes["i1"].ends
    assert max(apart(world, round) for round in (19, 20, 21)) > 0.7 * ROUND
    assert all(apart(world, round) < 0.25 * ROUND for round in range(28, 40))
    assert len(held_up) > 38 and not world.nodes["i1"].heals


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("seconds", [0.5, 1.0])
def test_who_was_stopped_for_rounds_closes_the_lead_of_the_fastest(seconds, seed):
    """The fastest never falls back, so that the two others must catch up, though they are level with each other."""
    durations = [seconds, 2 * seconds, 4 * seconds]
    world = World(3, durations=durations, steps=10, settings=SETTINGS, seed=seed)
    world.transfer = 0.05 * seconds
    for name in ("i1", "i2"):
        world.at(20 * seconds, setattr, world.nodes[name], "stopped_until", 20 * seconds + 4.0)
    world.run(80 * seconds + 4.0)
    last = world.nodes["i0"].round
    world.finish()
    assert world.participation(last - 30, last - 4) >= 0.9


@pytest.mark.parametrize("seed", range(2))
def test_islands_at_speeds_1_to_2_to_10_that_start_apart_meet(seed):
    world = World(3, durations=[1.0, 2.0, 10.0], steps=10, settings=SETTINGS, seed=seed, starts=[0.0, 3.9, 7.8])
    world.transfer = 0.05
    world.run(80.0)
    last = world.nodes["i0"].round
    world.finish()
    assert world.participation(last - 30, last - 4) >= 0.9


def test_who_hears_of_a_later_round_makes_up_for_half_of_its_steps():
    pace = Pace("me", ["other"])
    _, now = after(pace, 10, 2.0)
    told(pace, now, 1.0)
    strides, now = after(pace, 20, 2.0, now)
    pace.round_ended(1, now)
    pace.meet(3, Timing(0.0, None, None), now, 0.0)
    caught_up = sum(after(pace, 100, 2.0, now)[0])
    assert caught_up == pytest.approx(200 + 0.5 * 2 * sum(strides), abs=2)


def test_when_the_fastest_has_gone_the_others_take_all_the_steps_that_they_can():
    world = World(3, durations=[ROUND, 2 * ROUND, 4 * ROUND], steps=STEPS, settings=SETTINGS, downtime=None)
    world.at(15 * ROUND, world.crash, world.nodes["i0"], "kill")
    world.run(70 * ROUND)
    before = {name: (node.position, node.all_steps) for name, node in world.nodes.items()}
    world.run(100 * ROUND).finish()
    strides = []
    for name in ("i1", "i2"):
        node, (position, steps) = world.nodes[name], before[name]
        strides.append((node.position - position) / (node.all_steps - steps))
    assert strides == [pytest.approx(1, rel=0.05), pytest.approx(2, rel=0.1)]
    assert world.participation(15, 15 + ROUNDS_KNOWN) > 0  # of the two that are left


@pytest.mark.parametrize("seed", range(4))
def test_no_fault_leaves_half_an_exchange_among_islands_that_keep_pace(seed):
    """Σ w c = 0 with weights that are the inner steps taken: `World.check`."""
    rng = random.Random(seed)
    for _ in range(8):
        number = rng.randrange(10**6)
        durations = [ROUND * rng.choice((1, 2, 4)) for _ in range(rng.randrange(2, 5))]
        at = all_points(paced(durations, 45.0, seed=number))
        faults = []
        for _ in range(rng.randrange(2, 8)):
            kind, nth = rng.choice(at)
            if kind == "Apply" or rng.random() < 0.4:
                faults.append(Fault(kind, nth, rng.choice(NODE_FAULTS), rng.choice(MOMENTS)))
            else:
                faults.append(Fault(kind, nth, rng.choice(FRAME_FAULTS)))
        world = paced(durations, 200.0, seed=number, faults=faults, quiet_after=60.0).finish()
        assert any(node.applied for node in world.nodes.values())


def after(pace: Pace, count: int, seconds: float, now: float = 0.0) -> tuple[list[int], float]:
    """The strides of so many steps, and the time after them."""
    strides = []
    for _ in range(count):
        strides.append(pace.stride(now, 10**6))
        now += seconds
    return strides, now


def told(pace: Pace, now: float, seconds: float, late: float = 0.0) -> None:
    """A partner takes `seconds` a step, and has ended the round that ends here now `late` seconds before."""
    speed = Speed("other", seconds, 0)
    timing = Timing(late, speed, speed)
    pace.round_ended(0, now)
    pace.hear("other", 0, timing, now)
    pace.meet(0, timing, now, 0.0)


@pytest.mark.parametrize("ratio", [1.0, 1.5, 2.0, 3.7])
def test_an_inner_step_stands_for_what_the_fastest_takes_meanwhile(ratio):
    pace = Pace("me", ["other"])
    _, now = after(pace, 10, 2.0 * ratio)
    told(pace, now, 2.0)
    strides, _ = after(pace, 100, 2.0 * ratio, now)
    assert sum(strides) == pytest.approx(100 * ratio, abs=1)
    assert max(strides) - min(strides) <= 1


def test_what_holds_all_up_alike_skips_no_step():
    pace = Pace("me", ["other"])
    _, now = after(pace, 10, 1.0)
    told(pace, now, 1.0)
    strides, _ = after(pace, 50, 1.0, now + 600.0)
    assert set(strides) == {1}


def test_the_first_never_slows_down_below_a_step_a_step_and_the_others_fall_back_by_half_of_their_lead():
    for seconds, expected in ((1.0, 60), (3.0, 180 - 15)):
        pace = Pace("me", ["other"])
        _, now = after(pace, 10, seconds)
        told(pace, now, 1.0, late=-30.0)
        strides, _ = after(pace, 60, seconds, now)
        assert sum(strides) == pytest.approx(expected, abs=1)


def test_who_is_late_makes_up_half_of_it_once():
    pace = Pace("me", ["other"])
    _, now = after(pace, 10, 2.0)
    told(pace, now, 1.0, late=30.0)
    assert sum(after(pace, 60, 2.0, now)[0]) == pytest.approx(120 + 15, abs=1)


def test_who_goes_on_from_anothers_weights_makes_up_for_no_delay_of_the_old_ones():
    pace = Pace("me", ["other"])
    _, now = after(pace, 10, 1.0)
    told(pace, now, 1.0, late=30.0)
    pace.restart()
    assert set(after(pace, 60, 1.0, now)[0]) == {1}


def test_a_speed_that_no_round_was_timed_for_moves_nobody_by_more_than_the_bound():
    pace = Pace("me", ["other"])
    _, now = after(pace, 10, 1.0)
    told(pace, now, 1e-9)
    assert set(after(pace, 20, 1.0, now)[0]) == {MOST_TOLD}


@pytest.mark.parametrize("says", ["of itself", "of an island that is away"])
@pytest.mark.parametrize(
    ("times", "is_believed"), [(0.99 * MOST_TIMED, True), (1.01 * MOST_TIMED, False), (1e9, False)]
)
def test_a_speed_is_believed_up_to_twice_the_one_at_which_its_teller_ends_its_rounds(says, times, is_believed):
    pace = Pace("me", ["other", "away"])
    now, speed = 0.0, Speed("other" if says == "of itself" else "away", 1.0 / times, 0)
    for round in range(6):
        _, now = after(pace, 10, 1.0, now)
        pace.round_ended(round, now)
        timing = Timing(0.0, speed, None) if says == "of itself" else Timing(0.0, None, speed)
        pace._speeds.hear("other", timing, round)
        pace._speeds.time("other", round, 10 * round, now)
    assert pace._fastest_seconds() == pytest.approx(speed.seconds if is_believed else 1.0)


def test_an_islands_own_word_counts_and_not_what_others_say_of_it():
    speeds = Speeds(["b", "c"])
    for name, of_c in (("c", 1.0), ("b", 0.5)):
        own = Speed("c", of_c, 0) if name == "c" else None
        speeds.hear(name, Timing(0.0, own, Speed("c", of_c, 2**62)), 0)
    assert [speed.seconds for speed in speeds.believed(1.0)] == [1.0]


def test_a_speed_is_passed_on_by_those_alone_who_heard_it_of_its_island():
    speeds = Speeds(["b", "c"])
    speeds.hear("b", Timing(0.0, Speed("b", 0.8, 0), Speed("c", 0.5, 0)), 0)
    assert {speed.name for speed in speeds.believed(1.0)} == {"b", "c"}
    assert speeds.fastest_met(Speed("me", 1.0, 0)).name == "b"


@pytest.mark.parametrize("of", ["told", "passed on"])
def test_a_speed_of_a_round_that_is_yet_to_come_is_forgotten_like_any_other(of):
    speeds = Speeds(["b", "c"])
    false = Speed("b" if of == "told" else "c", 0.5, 2**62)
    speeds.hear("b", Timing(0.0, *((false, None) if of == "told" else (None, false))), 3)
    for round, known in ((3 + ROUNDS_KNOWN, True), (4 + ROUNDS_KNOWN, False)):
        speeds.hear("b", Timing(0.0, None, None), round)
        assert bool(list(speeds.believed(1.0))) is known


LIES = {
    "a stranger's, for three rounds": lambda name: Timing(0.0, None, Speed("nobody", 1e-9, 2**62)),
    "a member's that is away, for three rounds": lambda name: Timing(0.0, None, Speed("i3", 1e-9, 2**62)),
    "its own, for three rounds": lambda name: Timing(0.0, Speed(name, 1e-9, 2**62), None),
    "its own, always": lambda name: Timing(0.0, Speed(name, 1e-9, 2**62), None),
    "a member's that is away, always": lambda name: Timing(0.0, None, Speed("i3", 1e-9, 2**62)),
}


@pytest.mark.parametrize("said", ["an age", "a later round"])
def test_a_false_age_costs_less_of_the_schedule_than_a_speed_is_known_for(said):
    """The liar, the only other island, says it once and ends: nobody is left to say that it is not so."""
    world = paced([ROUND] * 2, 10.2 * ROUND, downtime=None)
    honest, liar = world.nodes.values()
    assert honest.machine is not None
    ago, round = (1e12, honest.round) if said == "an age" else (0.0, honest.round + ENDS_KEPT)
    honest.machine._context.pace.meet(round, Timing(ago, None, None), world.now, 0.0)
    world.crash(liar, "kill")
    before = honest.position
    world.run(60 * ROUND).finish()
    rounds = (honest.position - before) / STEPS
    usual = 1.05 * 49.8
    assert usual < rounds < usual + SHARE * ROUNDS_KNOWN


@pytest.mark.parametrize("lie", LIES)
def test_false_timings_cost_islands_a_few_rounds_of_their_schedule(lie):
    """i2 lies in rounds 10 to 12, in which it meets all; i3 has ended."""
    world = paced([ROUND] * 4, 10.2 * ROUND, downtime=None)
    world.crash(world.nodes["i3"], "kill")
    liar = world.nodes["i2"].machine
    assert liar is not None
    pace: Any = liar._context.pace
    lies = [LIES[lie]("i2")] * (10**6 if "always" in lie else 6)
    told = pace.timing
    pace.timing = lambda *arguments: lies.pop() if lies else told(*arguments)
    honest = [world.nodes["i0"], world.nodes["i1"]]
    before = [node.position for node in honest]
    world.run(40 * ROUND).finish()
    for node, position in zip(honest, before, strict=True):
        assert node.position - position <= 1.1 * 29.8 * STEPS


def test_a_member_that_always_says_what_is_just_believed_moves_others_by_less_than_it_says():
    """It says twice the speed at which the others pass through the schedule, whatever that is."""
    world = paced([ROUND] * 3, 5.2 * ROUND)
    honest, _, liar = world.nodes.values()
    assert honest.machine is not None and liar.machine is not None
    pace: Any = liar.machine._context.pace
    others = honest.machine._context.pace

    def timing(round: int, now: float) -> Timing:
        return Timing(0.0, Speed(liar.name, others._fastest_seconds() / (0.98 * MOST_TIMED), round), None)

    pace.timing = timing
    before = honest.position
    world.run(45 * ROUND).finish()
    assert 1.1 * 39.8 * STEPS < honest.position - before <= MOST_TIMED * 39.8 * STEPS  # it was heard
