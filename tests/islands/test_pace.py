"""Pace (`--pace=time`) of islands of unequal speed, in virtual time: rounds end together and no island waits."""

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
STEPS = 50  # per round
SPEEDS = (4, 2, 1)


def paced(durations, seconds: float, settings: Settings = SETTINGS, **arguments) -> World:
    return World(len(durations), durations=durations, steps=STEPS, settings=settings, **arguments).run(seconds)


def end_spread(world: World, round: int) -> float:
    """Return the seconds between the first and the last island's end of a round."""
    ends = [node.ends[round] for node in world.nodes.values()]
    return max(ends) - min(ends)


@pytest.mark.parametrize(("count", "seed"), [(3, 0), (6, 1)])
def test_islands_at_speeds_1_to_2_to_4_meet_in_nine_of_ten_rounds_and_never_wait(count, seed):
    durations = [ROUND * 4 / SPEEDS[number % 3] for number in range(count)]
    world = paced(durations, 60 * ROUND, seed=seed).finish()
    assert world.participation(2, 55) >= 0.9
    for node in world.nodes.values():
        seconds_a_step = node.duration / STEPS
        assert node.all_steps >= 0.98 * 60 * ROUND / seconds_a_step  # it has never waited
        rounds = max(node.ends)
        assert rounds >= 0.95 * 60  # as many as the fastest would have ended alone
        assert not node.heals
    assert all(end_spread(world, round) < ROUND / 3 for round in range(15, 55))


def test_islands_of_unequal_speed_without_pace_rarely_meet_and_advise_it():
    settings = dataclasses.replace(SETTINGS, keeps_pace=False)
    world = paced([ROUND, 2 * ROUND, 4 * ROUND], 60 * ROUND, settings=settings).finish()
    assert world.participation(2, 55) < 0.5
    advice = [line for node in world.nodes.values() for line in node.lines if "--pace=time" in line]
    assert re.search(r"an inner step takes 0\.[0-9]+ s here and 0\.[0-9]+ s on i[0-2]", advice[0])
    assert len(advice) <= 6  # once for each other island


def test_unequal_speed_that_costs_no_exchange_is_not_told():
    """A machine may be busy for a while: the slower island loses a third of a round in each, within the patience."""
    settings = dataclasses.replace(SETTINGS, keeps_pace=False)
    world = paced([ROUND, 1.3 * ROUND], 6 * ROUND, settings=settings)
    nodes = world.nodes.values()
    assert all(len(node.applied) >= 4 for node in nodes)
    assert not any("--pace=time" in line for node in nodes for line in node.lines)


def test_islands_of_equal_speed_take_every_step_of_the_schedule():
    world = paced([ROUND] * 4, 60 * ROUND).finish()
    for node in world.nodes.values():
        assert node.all_steps >= 0.97 * node.position
    assert world.participation(2, 55) >= 0.9


def test_a_messages_weight_is_proportional_to_the_inner_steps_behind_it():
    world = paced([ROUND, 4 * ROUND], 40 * ROUND).finish()
    fast, slow = world.nodes.values()
    for xid in fast.weights.keys() & slow.weights.keys():
        if xid.round > 5:
            assert fast.weights[xid][0] / slow.weights[xid][0] == pytest.approx(4, rel=0.35)
    weights = [action.weight for action in slow.applied if action.xid.round > 5]
    assert weights and sum(weights) / len(weights) == pytest.approx(0.8, abs=0.03)


def test_an_island_paused_for_one_round_realigns_within_a_few_rounds():
    world = World(3, durations=[ROUND, 2 * ROUND, 4 * ROUND], steps=STEPS, settings=SETTINGS)
    world.at(20.2 * ROUND, setattr, world.nodes["i1"], "stopped_until", 21.2 * ROUND)
    world.run(45 * ROUND).finish()
    held_up = world.nodes["i1"].ends
    assert max(end_spread(world, round) for round in (19, 20, 21)) > 0.7 * ROUND
    assert all(end_spread(world, round) < 0.25 * ROUND for round in range(28, 40))
    assert len(held_up) > 38 and not world.nodes["i1"].heals


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("seconds", [0.5, 1.0])
def test_islands_paused_for_several_rounds_close_the_gap_to_the_fastest(seconds, seed):
    """The fastest never slows down, so the two others must close the gap, although they are level with each other."""
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


def test_an_island_behind_its_partners_round_makes_up_half_of_the_missing_steps():
    pace = Pace("me", ["other"])
    _, now = take_steps(pace, 10, 2.0)
    hear_partner(pace, now, 1.0)
    strides, now = take_steps(pace, 20, 2.0, now)
    pace.round_ended(1, now)
    pace.meet(3, Timing(0.0, None, None), now, 0.0)
    caught_up = sum(take_steps(pace, 100, 2.0, now)[0])
    assert caught_up == pytest.approx(200 + 0.5 * 2 * sum(strides), abs=2)


def test_the_next_fastest_island_sets_the_pace_after_the_fastest_has_crashed():
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
    assert world.participation(15, 15 + ROUNDS_KNOWN) > 0  # between the two remaining islands


@pytest.mark.parametrize("seed", range(4))
def test_no_fault_leaves_a_one_sided_correction_among_islands_that_keep_pace(seed):
    """`World.check` asserts Σ w c = 0, where each weight w is the number of inner steps taken."""
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


def take_steps(pace: Pace, count: int, seconds: float, now: float = 0.0) -> tuple[list[int], float]:
    """Return the strides of `count` steps of `seconds` each, and the time after them."""
    strides = []
    for _ in range(count):
        strides.append(pace.stride(now, 10**6))
        now += seconds
    return strides, now


def hear_partner(pace: Pace, now: float, seconds: float, late: float = 0.0) -> None:
    """Report a partner that takes `seconds` per step and ended its round `late` seconds before it ends here, `now`."""
    speed = Speed("other", seconds, 0)
    timing = Timing(late, speed, speed)
    pace.round_ended(0, now)
    pace.hear("other", 0, timing, now)
    pace.meet(0, timing, now, 0.0)


@pytest.mark.parametrize("ratio", [1.0, 1.5, 2.0, 3.7])
def test_the_mean_stride_is_the_speed_ratio_to_the_fastest(ratio):
    pace = Pace("me", ["other"])
    _, now = take_steps(pace, 10, 2.0 * ratio)
    hear_partner(pace, now, 2.0)
    strides, _ = take_steps(pace, 100, 2.0 * ratio, now)
    assert sum(strides) == pytest.approx(100 * ratio, abs=1)
    assert max(strides) - min(strides) <= 1


def test_a_pause_that_delays_all_islands_alike_skips_no_step():
    pace = Pace("me", ["other"])
    _, now = take_steps(pace, 10, 1.0)
    hear_partner(pace, now, 1.0)
    strides, _ = take_steps(pace, 50, 1.0, now + 600.0)
    assert set(strides) == {1}


def test_a_leading_island_drops_half_of_its_lead_but_never_below_stride_one():
    for seconds, expected in ((1.0, 60), (3.0, 180 - 15)):
        pace = Pace("me", ["other"])
        _, now = take_steps(pace, 10, seconds)
        hear_partner(pace, now, 1.0, late=-30.0)
        strides, _ = take_steps(pace, 60, seconds, now)
        assert sum(strides) == pytest.approx(expected, abs=1)


def test_a_late_island_makes_up_half_of_its_delay_once():
    pace = Pace("me", ["other"])
    _, now = take_steps(pace, 10, 2.0)
    hear_partner(pace, now, 1.0, late=30.0)
    assert sum(take_steps(pace, 60, 2.0, now)[0]) == pytest.approx(120 + 15, abs=1)


def test_an_island_that_caught_up_from_a_donor_makes_up_no_earlier_delay():
    pace = Pace("me", ["other"])
    _, now = take_steps(pace, 10, 1.0)
    hear_partner(pace, now, 1.0, late=30.0)
    pace.restart()
    assert set(take_steps(pace, 60, 1.0, now)[0]) == {1}


def test_the_stride_for_a_reported_speed_without_timed_rounds_is_capped():
    pace = Pace("me", ["other"])
    _, now = take_steps(pace, 10, 1.0)
    hear_partner(pace, now, 1e-9)
    assert set(take_steps(pace, 20, 1.0, now)[0]) == {MOST_TOLD}


@pytest.mark.parametrize("says", ["of itself", "of an island that is away"])
@pytest.mark.parametrize(
    ("times", "is_believed"), [(0.99 * MOST_TIMED, True), (1.01 * MOST_TIMED, False), (1e9, False)]
)
def test_a_reported_speed_is_believed_up_to_twice_the_reporters_timed_speed(says, times, is_believed):
    pace = Pace("me", ["other", "away"])
    now, speed = 0.0, Speed("other" if says == "of itself" else "away", 1.0 / times, 0)
    for round in range(6):
        _, now = take_steps(pace, 10, 1.0, now)
        pace.round_ended(round, now)
        timing = Timing(0.0, speed, None) if says == "of itself" else Timing(0.0, None, speed)
        pace._speeds.hear("other", timing, round)
        pace._speeds.time("other", round, 10 * round, now)
    assert pace._fastest_seconds() == pytest.approx(speed.seconds if is_believed else 1.0)


def test_an_islands_own_report_overrides_what_others_report_of_its_speed():
    speeds = Speeds(["b", "c"])
    for name, of_c in (("c", 1.0), ("b", 0.5)):
        own = Speed("c", of_c, 0) if name == "c" else None
        speeds.hear(name, Timing(0.0, own, Speed("c", of_c, 2**62)), 0)
    assert [speed.seconds for speed in speeds.believed(1.0)] == [1.0]


def test_only_a_speed_heard_from_its_own_island_is_passed_on():
    speeds = Speeds(["b", "c"])
    speeds.hear("b", Timing(0.0, Speed("b", 0.8, 0), Speed("c", 0.5, 0)), 0)
    assert {speed.name for speed in speeds.believed(1.0)} == {"b", "c"}
    assert speeds.fastest_met(Speed("me", 1.0, 0)).name == "b"


@pytest.mark.parametrize("of", ["told", "passed on"])
def test_a_speed_with_a_future_round_expires_like_any_other(of):
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
def test_a_single_false_delay_skips_a_bounded_part_of_the_schedule(said):
    """The liar, the only other island, reports it once and ends, so no island is left to contradict it."""
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
def test_false_speeds_skip_at_most_a_few_rounds_of_the_schedule(lie):
    """i2 lies in rounds 10 to 12, in which it meets both others, or always from round 10 on; i3 has ended."""
    world = paced([ROUND] * 4, 10.2 * ROUND, downtime=None)
    world.crash(world.nodes["i3"], "kill")
    liar = world.nodes["i2"].machine
    assert liar is not None
    pace: Any = liar._context.pace
    lies = [LIES[lie]("i2")] * (10**6 if "always" in lie else 6)
    true_timing = pace.timing
    pace.timing = lambda *arguments: lies.pop() if lies else true_timing(*arguments)
    honest = [world.nodes["i0"], world.nodes["i1"]]
    before = [node.position for node in honest]
    world.run(40 * ROUND).finish()
    for node, position in zip(honest, before, strict=True):
        assert node.position - position <= 1.1 * 29.8 * STEPS


def test_a_constant_claim_of_the_highest_believed_speed_has_a_bounded_effect():
    """The liar always claims about twice the others' current speed through the schedule."""
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
    assert 1.1 * 39.8 * STEPS < honest.position - before <= MOST_TIMED * 39.8 * STEPS  # the claims had an effect
