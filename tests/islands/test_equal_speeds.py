"""Islands of equal speed: they begin together, stay together by giving way to each other, and nobody heals."""

import dataclasses
import random

import pytest

from noloco_jax.islands.protocol.catch_up import ASKED_AT_ONCE
from noloco_jax.islands.protocol.context import Settings
from noloco_jax.islands.protocol.messages import Speed, Timing
from noloco_jax.islands.protocol.pace import MOST_GIVEN, MOST_UNEQUAL, Pace
from support.island_world import ROUND, World

SETTINGS = Settings(answer_seconds=3.0, state_seconds=30.0)
STEPS = 50  # inner steps per round
ROUNDS = 120


def apart(world: World, round: int) -> float:
    """Return the seconds between the first and the last island's end of a round."""
    ends = [node.ends[round] for node in world.nodes.values()]
    return max(ends) - min(ends)


@pytest.mark.parametrize(("count", "seed"), [(2, 0), (4, 1), (6, 2)])
def test_no_island_heals_after_uneven_compile_times_and_short_delays(count, seed):
    """The delays of half a round would drive the islands apart by several rounds if none gave way."""
    chance = random.Random(seed)
    preparing = [chance.uniform(0, 6 * ROUND) for _ in range(count)]
    world = World(count, seed=seed, durations=[ROUND] * count, steps=STEPS, settings=SETTINGS, preparing=preparing)
    for node in world.nodes.values():
        for _ in range(ROUNDS // 10):
            begin = chance.uniform(max(preparing) + ROUND, ROUNDS * ROUND)
            world.at(begin, setattr, node, "stopped_until", begin + 0.5 * ROUND)
    world.run(ROUNDS * ROUND).finish()
    nodes = world.nodes.values()
    assert not any(node.heals for node in nodes)
    last = min(max(node.ends) for node in nodes)
    assert world.participation(0, last - 1) == 1
    assert all(node.all_steps == node.position for node in nodes)  # every step was taken
    assert sum(apart(world, round) for round in range(last)) / last < ROUND


@pytest.mark.parametrize(("reach_seconds", "heals"), [(5 * ROUND, 0), (0.0, 1)])
def test_peers_give_way_to_a_delayed_island_within_the_reach_and_it_heals_beyond_it(reach_seconds, heals):
    settings = dataclasses.replace(SETTINGS, reach_seconds=reach_seconds)
    world = World(3, durations=[ROUND] * 3, steps=STEPS, settings=settings)
    world.at(20.2 * ROUND, setattr, world.nodes["i1"], "stopped_until", 23.2 * ROUND)
    world.run(45 * ROUND).finish()
    assert [len(node.heals) for node in world.nodes.values()] == [0, heals, 0]
    last = min(max(node.ends) for node in world.nodes.values())
    assert apart(world, last) < 0.2 * ROUND
    assert world.participation(last - 9, last) == 1
    assert max(node.paused for node in world.nodes.values()) < 4 * ROUND


@pytest.mark.parametrize("rounds", [2.2, 2.4, 3.0, 3.6])
def test_an_island_within_the_reach_takes_a_state_where_no_peer_gives_way(rounds, monkeypatch):
    """Guard a regression: rounds late for all exchanges and too few for a state, it stayed alone to the end.

    Delayed by little more than 2 rounds, it hears nothing of its peers in some rounds.
    """
    monkeypatch.setattr(Pace, "pause", lambda pace: 0.0)
    settings = dataclasses.replace(SETTINGS, reach_seconds=5 * ROUND)
    world = World(3, durations=[ROUND] * 3, steps=STEPS, settings=settings)
    world.at(20.2 * ROUND, setattr, world.nodes["i1"], "stopped_until", (20.2 + rounds) * ROUND)
    world.run(60 * ROUND).finish()
    assert [len(node.heals) for node in world.nodes.values()] == [0, 1, 0]
    last = min(max(node.ends) for node in world.nodes.values())
    assert world.participation(last - 9, last) == 1


def test_an_island_rounds_ahead_of_all_others_falls_back_to_them():
    """The others are delayed together, so that none of them is late, and none heals."""
    world = World(4, durations=[ROUND] * 4, steps=STEPS, settings=SETTINGS)
    for name in ("i0", "i1", "i3"):
        world.at(10.2 * ROUND, setattr, world.nodes[name], "stopped_until", 15.2 * ROUND)
    world.run(40 * ROUND).finish()
    assert not any(node.heals for node in world.nodes.values())
    last = min(max(node.ends) for node in world.nodes.values())
    assert apart(world, last) < 0.2 * ROUND
    assert world.participation(last - 9, last) == 1


def test_islands_that_compile_for_different_times_begin_together():
    world = World(4, durations=[ROUND] * 4, preparing=[1.0, 20.0, 50.0, 7.0]).run(100.0).finish()
    assert apart(world, 0) < 0.2
    assert min(node.ends[0] for node in world.nodes.values()) == pytest.approx(50.0 + ROUND, abs=1.0)


def test_the_wait_for_an_island_that_is_never_ready_is_bounded():
    world = World(3, durations=[ROUND] * 3, preparing=[1.0, 2.0, 1000.0], settings=SETTINGS)
    world.run(SETTINGS.start_seconds + 30.0)
    begun = [node.ends[0] - ROUND for node in world.nodes.values() if node.ends]
    assert len(begun) == 2 and max(begun) < SETTINGS.start_seconds + 2.0 + SETTINGS.answer_seconds + 1.0


AWAITING = dataclasses.replace(SETTINGS, awaits_absent=True)


def test_a_run_begins_once_all_its_islands_have_been_started():
    world = World(
        3, durations=[ROUND] * 3, steps=STEPS, starts=[0.0, 70.0, 30.0], preparing=[9.0] * 3, settings=AWAITING
    )
    world.run(40 * ROUND).finish()
    assert apart(world, 0) < 0.2 and not any(node.heals for node in world.nodes.values())
    assert min(node.ends[0] for node in world.nodes.values()) == pytest.approx(79.0 + ROUND, abs=1.0)
    assert any(
        "i0 is ready and waits for i1, i2 to begin together, 120 s at most" in x for x in world.nodes["i0"].lines
    )


@pytest.mark.parametrize("late", ["started", "compiled"])
def test_a_run_of_more_islands_than_one_asks_at_once_begins_once_the_last_has(late):
    """Regression test: an island began as soon as those that it happened to ask were ready."""
    count = ASKED_AT_ONCE + 4
    is_started = late == "started"
    starts = [0.1] * (count - 1) + [60.0 if is_started else 0.1]
    preparing = [1.0] * (count - 1) + [1.0 if is_started else 60.0]
    world = World(count, durations=[ROUND] * count, starts=starts, preparing=preparing, settings=AWAITING)
    world.run(100.0).finish()
    assert apart(world, 0) < 2.0 and not any(node.heals for node in world.nodes.values())
    assert min(node.ends[0] for node in world.nodes.values()) > 60.0 + ROUND


def test_the_wait_for_an_island_that_is_not_started_is_bounded_and_once_a_run():
    world = World(3, durations=[ROUND] * 3, steps=STEPS, starts=[0.0, 0.1, 1e6], settings=AWAITING, downtime=5.0)
    world.run(SETTINGS.start_seconds + 5 * ROUND)
    nodes = [world.nodes[name] for name in ("i0", "i1")]
    assert all(node.ends[0] == pytest.approx(SETTINGS.start_seconds + ROUND, abs=2.0) for node in nodes)
    world.crash(nodes[0], "lose disk")
    ended = max(nodes[0].ends)
    world.run(world.now + 5.0 + 3 * ROUND).finish()
    assert nodes[0].heals and max(nodes[0].ends) > ended  # it does not wait for i2 again


@pytest.mark.parametrize("action", ["kill", "vanish"])
def test_islands_do_not_wait_for_a_peer_that_dies_while_compiling(action):
    world = World(3, durations=[ROUND] * 3, preparing=[1.0, 2.0, 60.0], settings=SETTINGS, downtime=None)
    world.at(5.0, world.crash, world.nodes["i2"], action)
    world.run(60.0)
    ends = [world.nodes[name].ends[0] for name in ("i0", "i1")]
    assert max(ends) < ROUND + 5.0 + 3 * SETTINGS.answer_seconds
    assert max(ends) - min(ends) < 2 * SETTINGS.answer_seconds


def test_a_late_starter_takes_weights_as_of_the_end_of_its_compilation():
    world = World(4, durations=[ROUND] * 4, preparing=[1.0, 1.0, 1.0, 45.0], settings=SETTINGS, downtime=20.0)
    world.run(80.0)
    world.crash(world.nodes["i3"], "lose disk")
    world.run(250.0).finish()
    (heal,) = world.nodes["i3"].heals
    at = 80.0 + 20.0 + 45.0
    expected = sum(time < at for time in world.nodes["i0"].ends.values()) - 1
    assert abs(heal.round - expected) <= 1


def test_an_island_heals_from_trained_peers_without_waiting_for_one_that_compiles():
    world = World(4, durations=[ROUND] * 4, preparing=[1.0, 1.0, 5.0, 60.0], settings=SETTINGS, downtime=20.0)
    world.run(120.0)
    for name in ("i2", "i3"):
        world.crash(world.nodes[name], "lose disk")
    world.run(160.0)
    assert world.nodes["i2"].heals and not world.nodes["i3"].heals


def take_steps(pace: Pace, now: float, count: int) -> float:
    """Take inner steps of one second from `now` on; return the time after them."""
    for _ in range(count):
        pace.stride(now, 1)
        now += 1.0
    return now


def meet_partner(pace: Pace, lead: int, *, ago: float = 0.0, theirs: float = 1.0, delay: float = 0.0) -> float:
    """End round 0, take `lead` inner steps and hear from the partner; return the time.

    Args:
      pace: of the island.
      lead: inner steps since the end of round 0.
      ago: seconds since the partner ended round 0.
      theirs: seconds of an inner step of the partner.
      delay: latency of the partner's header, in seconds.
    """
    now = take_steps(pace, 0.0, 10)
    pace.round_ended(0, now)
    now = take_steps(pace, now, lead)
    pace.meet(0, Timing(ago, Speed("other", theirs, 0), None), now, delay)
    return now


def pauses(pace: Pace, now: float) -> list[float]:
    """Return the pauses before each of the next 100 inner steps, which take one second each."""
    given = []
    for _ in range(100):
        given.append(pace.pause())
        now += given[-1]
        assert pace.stride(now, 1) == 1
        now += 1.0
    return given


def test_the_leading_island_slows_to_a_quarter_of_its_speed_until_its_lead_is_gone():
    pace = Pace("me", ["other"], is_kept=False)
    given = pauses(pace, meet_partner(pace, lead=6, ago=2.0))
    assert sum(given) == pytest.approx(4.0)
    assert max(given) == pytest.approx(MOST_GIVEN)


def test_the_last_island_does_not_pause():
    pace = Pace("me", ["other"], is_kept=False)
    assert not any(pauses(pace, meet_partner(pace, lead=0, ago=6.0)))


def test_network_latency_does_not_count_as_a_lead():
    pace = Pace("me", ["other"], is_kept=False)
    assert sum(pauses(pace, meet_partner(pace, lead=6, delay=5.0))) == pytest.approx(1.0)


def test_inner_steps_queued_on_the_device_do_not_count_as_a_lead():
    pace = Pace("me", ["other"], is_kept=False)
    now = take_steps(pace, 0.0, 10)
    pace.round_ended(0, now)
    for _ in range(3):  # dispatched at once; the device takes a second for each
        pace.stride(now, 1)
    pace.meet(0, Timing(0.0, Speed("other", 1.0, 0), None), now + 0.5, 0.0)
    assert sum(pauses(pace, now + 0.5)) == pytest.approx(0.5)


def test_an_island_that_was_delayed_itself_has_no_lead():
    pace = Pace("me", ["other"], is_kept=False)
    now = take_steps(pace, 0.0, 10)
    pace.round_ended(0, now)
    pace.meet(0, Timing(0.0, Speed("other", 1.0, 0), None), now + 100.0, 0.0)  # sent long ago, and read only now
    assert not any(pauses(pace, now + 100.0))


def test_an_island_gives_way_to_a_temporarily_slow_partner_of_equal_usual_speed():
    pace = Pace("slow", ["other"], is_kept=False)
    now = take_steps(pace, 0.0, 100)
    for _ in range(50):
        pace.stride(now, 1)
        now += 5.0
    pace.round_ended(0, now)
    timing = pace.timing(0, now)
    assert timing is not None and timing.own is not None and timing.own.seconds == pytest.approx(1.0)
    other = Pace("me", ["other"], is_kept=False)
    now = take_steps(other, 0.0, 100)
    other.round_ended(0, now)
    for _ in range(20):  # meanwhile the cores of this island are idle, and its steps faster
        other.stride(now, 1)
        now += 0.4
    other.meet(0, timing, now, 0.0)
    assert other.pause() > 0


def test_no_island_gives_way_to_a_partner_that_is_usually_slower():
    pace = Pace("me", ["other"], is_kept=False)
    assert not any(pauses(pace, meet_partner(pace, lead=6, theirs=1.01 * MOST_UNEQUAL)))


def test_islands_that_keep_pace_never_pause():
    pace = Pace("me", ["other"])
    assert not any(pauses(pace, meet_partner(pace, lead=6)))
