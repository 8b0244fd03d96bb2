"""Islands that train over Flight on loopback, in threads of one process."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from noloco_jax import draws
from noloco_jax.island.mode import IslandMode
from noloco_jax.islands.agent import Healed, Met
from noloco_jax.islands.log import IslandLog, earlier_events
from noloco_jax.islands.protocol.messages import Status
from noloco_jax.islands.steps import WARM_UP_STEPS, IslandSteps
from noloco_jax.islands.sync import IslandSync
from noloco_jax.methods import schedule_of
from noloco_jax.schedule import SyncSchedule
from noloco_jax.spmd.compile import PROGRAMS
from noloco_jax.spmd.inner import at_step
from noloco_jax.spmd.programs import TrainState
from noloco_jax.train.messages import Messages
from support.sites import side_by_side
from support.training_islands import NAMES, World, round_of, small, train, wait_until

STATUS = Status(1, 4, True, True, 2, 3, 0.0, "")


def learning_rate_counts(state: TrainState) -> set[int]:
    """Return the step counts of the learning rate schedule in the inner optimizer's state."""
    parts = jax.tree.leaves(state.inner, is_leaf=lambda part: isinstance(part, optax.ScaleByScheduleState))
    return {int(np.asarray(part.count)[0]) for part in parts if isinstance(part, optax.ScaleByScheduleState)}


def test_a_four_times_slower_island_ends_rounds_with_the_fast_one_and_weighs_less(tmp_path):
    world = World(small(sync_every=8), tmp_path)
    schedule, rounds = schedule_of(world.config), 24
    assert schedule is not None
    ends: dict[str, list[float]] = {}
    weights: dict[str, list[float]] = {}
    shares: dict[str, float] = {}

    def train(replica: int, seconds: float) -> None:
        name = NAMES[replica]
        agent, island = world.join(name, pace="time")
        correct = agent._codec.correction

        def noted(own: Any, others: Any, weight: float, *factors: Any) -> Any:
            weights.setdefault(name, []).append(weight)
            return correct(own, others, weight, *factors)

        agent._codec.correction = noted  # type: ignore[method-assign]
        state, step, taken = world.programs.init(draws.key(0)), 0, 0
        state = world.inner(world.programs, state, 1, range(replica, replica + 1))  # compiles
        ready.wait()
        while step < rounds * 8:
            state, step = island.enter(state, step)
            state, stride = island.advance(state, step, rounds * 8 - step)
            assert learning_rate_counts(state) == {step + stride - 1}
            time.sleep(seconds)
            before, step, taken = step, step + stride, taken + 1
            state = world.inner(world.programs, state, step, range(replica, replica + 1))
            count = schedule.total(step) - schedule.total(before)
            state = island.take(state, step, count)
            ends.setdefault(name, []).extend([time.monotonic()] * count)
        shares[name] = taken / (rounds * 8)
        ready.wait()
        agent.close()

    ready = threading.Barrier(2, timeout=100)
    side_by_side(lambda: train(0, 0.1), lambda: train(1, 0.4))
    assert len(ends["paris"]) == len(ends["berlin"]) == rounds
    assert shares["paris"] > 0.7 and shares["berlin"] < 0.6
    apart = [abs(one - other) for one, other in zip(ends["paris"], ends["berlin"], strict=True)]
    round_seconds = (ends["paris"][-1] - ends["paris"][0]) / (rounds - 1)
    assert np.median(apart[rounds // 2 :]) < round_seconds
    assert np.median(weights["paris"]) < 0.4 and np.median(weights["berlin"]) > 0.6


def test_saved_weights_include_every_correction_committed_in_their_journal(world, tmp_path):
    world.begin(tmp_path)
    meeting = round_of("paris", "berlin", world)
    results: list[Any] = []

    def one(replica: int) -> None:
        agent, island = world.join(NAMES[replica])
        state, step = world.programs.init(draws.key(0)), 0
        for _ in range(meeting + 1):
            state, step = train(world, island, state, step, replica)
        before = np.array(state.params["embed"])
        wait_until(lambda: agent.status().committed == 1)
        state, journal = island.at_rest(state)
        assert journal is not None and journal["round"] == meeting
        committed = [xid for *xid, outcome in journal["outcomes"] if outcome == "committed"]
        results.append((committed, np.array(state.params["embed"]) - before))
        is_over.wait()
        agent.close()

    is_over = threading.Barrier(2, timeout=60)
    side_by_side(lambda: one(0), lambda: one(1))
    (first, correction), (second, opposite) = results
    assert first == second and len(first) == 1
    np.testing.assert_allclose(correction, -opposite, atol=1e-7)
    assert np.abs(correction).max() > 1e-4


def test_corrections_of_a_running_exchange_are_taken_after_the_current_step_ends():
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 300, lambda _, y: y @ x, x))
    state = TrainState({"w": slow(np.ones((300, 300), np.float32))}, (), None)
    was_ready: list[bool] = []

    def take() -> list[Any]:
        was_ready.append(state.params["w"].is_ready())
        return []

    quiet: Any = SimpleNamespace(
        pause=lambda: 0.0,
        is_exchanging=True,
        take=take,
        wants_state=False,
        is_removed=False,
        snapshots=SimpleNamespace(wanted=False),
    )
    unused: Any = None
    IslandSteps(quiet, unused, unused, lambda step: 1).enter(state, 0)
    assert was_ready == [True]


@pytest.mark.parametrize("catch_up", ["weights", "whole"])
def test_a_late_joiner_continues_from_a_donors_state(world, tmp_path, catch_up):
    world.begin(tmp_path)
    states: list[Any] = []
    is_over = threading.Event()
    ready = threading.Barrier(3, timeout=60)

    def donor(replica: int) -> None:
        agent, island = world.join(NAMES[replica])
        state, step = world.programs.init(draws.key(0)), 0
        ready.wait()
        for _ in range(3):
            state, step = train(world, island, state, step, replica)
            agent.settle(step // 2 - 1, 2.0)
            state, step = island.enter(state, step)
        states.append(jax.device_get(state))
        ready.wait()
        while not is_over.wait(0.01):
            state, step = island.enter(state, step)
        agent.close()

    def joiner() -> None:
        try:
            ready.wait()
            ready.wait()
            agent, island = world.join(NAMES[2], catch_up=catch_up)
            state, step = island.enter(world.programs.init(draws.key(1)), 0)
            assert (step, int(state.outer.num_outer_steps)) == (6, 3)
            mine = jax.device_get(state)
            (donor,) = [one for one in states if is_equal(mine.params, one.params)]
            if catch_up == "whole":
                assert is_equal(mine, donor)
            else:
                first = world.programs.from_params(jax.tree.map(lambda x: x[0], donor.params))
                assert is_equal(mine.outer.rule, first.outer.rule)
                assert is_equal(mine.inner, at_step(first.inner, 7))
            later, _ = island.advance(state, step, 1)
            stepped = world.inner(world.programs, jax.tree.map(jnp.copy, later), 7, range(2, 3))
            warmed = jax.device_get(island.warm_up(stepped))
            share = 1 if catch_up == "whole" else 1 / (WARM_UP_STEPS + 1)
            for x, before, after in zip(
                *map(jax.tree.leaves, (warmed.params, mine.params, stepped.params)), strict=True
            ):
                np.testing.assert_allclose(x, before + share * (np.asarray(after) - before), rtol=1e-5, atol=1e-7)
            state = later
            assert island.at_rest(state)[1] is not None
            agent.close()
        finally:
            is_over.set()

    side_by_side(lambda: donor(0), lambda: donor(1), joiner)


def test_a_round_of_shortened_steps_weighs_as_the_part_of_them_that_was_taken(world):
    weights: list[int] = []
    agent: Any = SimpleNamespace(stride=lambda most: 1, end_round=lambda round, tokens, *_: weights.append(tokens))
    state = world.programs.init(draws.key(0))
    island = IslandSteps(agent, world.solo, lambda item: state, lambda step: 1000)
    state, step = island.healed(Healed(-1, 0, {}, False))
    for step in range(1, WARM_UP_STEPS + 5):
        state, _ = island.advance(state, step - 1, 1)
        state = island.warm_up(world.inner(world.programs, state, step, range(1)))
        if step % 2 == 0:
            state = island.take(state, step, 1)
    shares = [min(step / (WARM_UP_STEPS + 1), 1) for step in range(1, WARM_UP_STEPS + 5)]
    expected = [1000 * (one + other) / 2 for one, other in zip(shares[::2], shares[1::2], strict=True)]
    np.testing.assert_allclose(weights, expected, atol=1.01)


def is_equal(one: Any, other: Any) -> bool:
    return all(map(np.array_equal, jax.tree.leaves(one), jax.tree.leaves(other)))


def test_an_island_compiles_only_the_programs_of_a_run_that_it_calls():
    """Its exchanges have programs of their own, and there is no other replica in its process to compare with."""
    assert {*PROGRAMS} - {*IslandMode.unused} == {"share_batch", "inner_step", "evaluate"}


def test_the_bytes_sent_are_those_of_the_messages_in_the_log(tmp_path):
    """Do not count messages without a partner, or whose exchange never committed; count one that was left out."""
    met = [
        Met(0, "berlin", "met"),
        Met(1, "", "alone", reason="an odd number of islands"),
        Met(2, "rome", "alone", reason="not committed in time"),
        Met(3, "berlin", "late", lag=1),
        Met(4, "rome", "alone", factor=0.0),
    ]
    arrived: list[Met] = []
    agent = SimpleNamespace(take_met=lambda: [arrived.pop()] if arrived else [], status=lambda: STATUS)
    steps: Any = SimpleNamespace(agent=agent, seconds_exposed=0.0)
    log = IslandLog(tmp_path, "paris")
    messages = Messages(outer_step=10)
    sync = IslandSync(SyncSchedule(1), steps, log, messages, lambda state: None, None)
    sent = []
    for one in met:
        arrived.append(one)
        sent.append(sync.bytes_sent())
        sync.news(1.0)
    assert sent == [10, 0, 0, 10, 10]
    assert [event["sent"] for event in earlier_events(tmp_path)] == sent
