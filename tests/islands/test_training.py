"""Islands that train over Flight on loopback, in threads of one process."""

import re
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest

from noloco_jax import draws
from noloco_jax.config import TrainConfig, from_dict
from noloco_jax.errors import UserError
from noloco_jax.island.final_merge import FinalMerge
from noloco_jax.island.membership import Membership, _incarnation, _write
from noloco_jax.islands.agent import Agent
from noloco_jax.islands.client import Client
from noloco_jax.islands.query import About, ask_about, fetch_weights
from noloco_jax.islands.roster import Address, Island, Roster
from noloco_jax.islands.steps import IslandSteps, weight_specs
from noloco_jax.methods import schedule_of
from noloco_jax.spmd.batches import place_batch
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.programs import Programs, TrainState, build_programs
from noloco_jax.spmd.solo import SoloPrograms, build_solo
from support.ports import free_ports
from support.sites import side_by_side

NAMES = ("paris", "berlin", "rome", "oslo")


def small(**outer: Any) -> TrainConfig:
    return from_dict(
        {
            "num_replicas": 4,
            "num_steps": 20,
            "model": {"hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1},
            "inner": {"lr": 1e-2, "warmup_steps": 2, "eps": 1e-4},
            "outer": {"sync_every": 2, **outer},
            "data": {"sequence_length": 8, "batch_size": 2},
        }
    )


class World:
    """Islands of one configuration, whose programs are compiled once."""

    def __init__(self, config: TrainConfig, folder: Any):
        self.config = config
        self.begin(folder)
        self.own = Membership(self.roster, NAMES[0], None).own(config)
        self.programs: Programs = build_programs(self.own, make_mesh(self.own, jax.devices()[:1]))
        self.solo: SoloPrograms = build_solo(self.own, self.programs)
        self.lines: list[str] = []

    def begin(self, folder: Any) -> None:
        """Other ports and folders, where no island has been before."""
        self.folder = folder
        addresses = [Address("127.0.0.1", port) for port in free_ports(len(NAMES))]
        self.roster = Roster("test", tuple(map(Island, NAMES, addresses)))

    def open(self, member: Membership) -> Agent:
        arguments = (None, self.folder / member.name, lambda: False, self.lines.append)
        agent = member.open_agent(self.config, self.solo, self.programs, *arguments)
        assert agent is not None
        return agent

    def join(self, name: str, **options: Any) -> tuple[Agent, IslandSteps]:
        member = Membership(self.roster, name, None, **options)
        agent = self.open(member)
        steps = member.steps(self.own, agent, self.solo, self.programs)
        assert Membership.begin(agent, self.folder / name, lambda: False)
        return agent, steps

    def batch(self, step: int, replicas: range) -> dict[int, dict[str, np.ndarray]]:
        """Make the batch of some replicas, a function of step and replica alone."""
        size = (self.config.data.batch_size, self.config.data.sequence_length)
        numbers = [np.random.default_rng([step, replica]).integers(0, 259, (2, *size)) for replica in replicas]
        return {i: dict(zip(("input_ids", "labels"), x.astype(np.int32), strict=True)) for i, x in enumerate(numbers)}

    def inner(self, programs: Programs, state: TrainState, step: int, replicas: range) -> TrainState:
        batch = place_batch(self.batch(step, replicas), programs.batch)
        params, inner, _ = programs.inner_step(state.params, state.inner, batch, np.int32(step))
        return TrainState(params, inner, state.outer)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# Of `configs/*:best`.
BEST = {
    **{"fragments": 8, "wire": "modulo4", "order": "hypercube", "momentum": 0.3, "momentum_of": "corrections"},
    **{"sync_every": 8, "lr": 1.0},
}


# What is within float32's rounding of the middle between two values of a code may be sent as either, and training goes
# on from there. Weights then differ by at most such a share of how far replicas are apart; by another wire's, by all of
# it or more.
@pytest.mark.parametrize(
    ("outer", "apart"),
    [
        ({}, 0),
        ({"fragments": 2}, 0),
        ({"fragments": 2, "wire": "bfloat16"}, 0.2),
        ({"wire": "int6"}, 0.2),
        (BEST, 0.2),
    ],
)
def test_exchanges_at_once_give_the_weights_of_one_program(tmp_path, outer, apart):
    world = World(small(**outer), tmp_path)
    config, schedule = world.config, schedule_of(world.config)
    assert schedule is not None
    final: dict[int, Any] = {}

    def train(replica: int) -> None:
        agent, island = world.join(NAMES[replica], at_once=True)
        state = world.programs.init(draws.key(config.seed))
        for step in range(1, config.num_steps + 1):
            state = world.inner(world.programs, state, step, range(replica, replica + 1))
            state = island.take(state, step, schedule.due(step))
        final[replica] = jax.device_get(state.params)
        met, status = agent.take_met()
        assert status.committed == status.due == schedule.total(config.num_steps)
        assert {one.outcome for one in met} == {"met"}
        agent.close()

    side_by_side(*[lambda i=i: train(i) for i in range(4)])

    together = build_programs(config, make_mesh(config, jax.devices()[:4]))
    state = together.init(draws.key(config.seed))
    for step in range(1, config.num_steps + 1):
        state = world.inner(together, state, step, range(4))
        for _ in range(schedule.due(step)):
            assert together.outer_step is not None
            params, outer = together.outer_step(state.params, state.outer)
            state = TrainState(params, state.inner, outer)
    for path, expected in jax.tree.leaves_with_path(jax.device_get(state.params)):
        for replica in range(4):
            found = dict(jax.tree.leaves_with_path(final[replica]))[path][0]
            if apart:
                distance = np.sqrt(np.mean(np.square(expected[0] - expected[1])))
                assert np.sqrt(np.mean(np.square(found - expected[replica]))) <= apart * distance, path
            else:
                np.testing.assert_allclose(found, expected[replica], rtol=2e-4, atol=2e-6, err_msg=str(path))
            np.testing.assert_allclose(found, expected[replica], rtol=0, atol=2e-3, err_msg=str(path))
        assert np.abs(expected[0] - expected[1]).max() > 1e-4  # they are no copies of each other


def learning_rate_counts(state: TrainState) -> set[int]:
    """Steps behind the inner optimizer, as far as its learning rate goes."""
    parts = jax.tree.leaves(state.inner, is_leaf=lambda part: isinstance(part, optax.ScaleByScheduleState))
    return {int(np.asarray(part.count)[0]) for part in parts if isinstance(part, optax.ScaleByScheduleState)}


def test_an_island_of_a_quarter_of_the_speed_ends_its_rounds_with_the_fast_one_and_weighs_less(tmp_path):
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

        def noted(own: Any, others: Any, weight: float) -> Any:
            weights.setdefault(name, []).append(weight)
            return correct(own, others, weight)

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


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return World(small(), tmp_path_factory.mktemp("islands"))


def round_of(first: str, second: str, world: World) -> int:
    """The first round in which the two meet."""
    partner = Membership(world.roster, first, None).partner(world.config)
    return next(round for round in range(99) if partner(round) == second)


def train(world: World, island: IslandSteps, state: TrainState, step: int, replica: int) -> tuple[TrainState, int]:
    """A round."""
    for _ in range(world.config.outer.sync_every):
        step += 1
        state = world.inner(world.programs, state, step, range(replica, replica + 1))
    return island.take(state, step, 1), step


def test_what_is_saved_has_entered_what_its_journal_tells_of(world, tmp_path):
    world.begin(tmp_path)
    meeting = round_of("paris", "berlin", world)
    results: list[Any] = []

    def one(replica: int) -> None:
        agent, island = world.join(NAMES[replica])
        state, step = world.programs.init(draws.key(0)), 0
        for _ in range(meeting + 1):
            state, step = train(world, island, state, step, replica)
        before = np.array(state.params["embed"])
        wait_until(lambda: agent.take_met()[1].committed == 1)
        state, journal = island.at_rest(state)
        assert journal is not None and journal.round == meeting
        committed = [xid for xid, outcome in journal.outcomes.items() if outcome == "committed"]
        results.append((committed, np.array(state.params["embed"]) - before))
        is_over.wait()
        agent.close()

    is_over = threading.Barrier(2, timeout=60)
    side_by_side(lambda: one(0), lambda: one(1))
    (first, correction), (second, opposite) = results
    assert first == second and len(first) == 1
    np.testing.assert_allclose(correction, -opposite, atol=1e-7)
    assert np.abs(correction).max() > 1e-4


def test_what_comes_of_an_exchange_under_way_enters_before_a_step_is_queued_behind_the_one_that_runs():
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 300, lambda _, y: y @ x, x))
    state = TrainState({"w": slow(np.ones((300, 300), np.float32))}, (), None)
    ran: list[bool] = []

    def take() -> list[Any]:
        ran.append(state.params["w"].is_ready())
        return []

    quiet: Any = SimpleNamespace(
        pause=lambda: 0.0,
        is_exchanging=True,
        take=take,
        wants_state=False,
        snapshots=SimpleNamespace(wanted=False),
    )
    unused: Any = None
    IslandSteps(quiet, unused, unused, lambda step: 1).enter(state, 0)
    assert ran == [True]


def test_an_island_that_comes_later_goes_on_from_the_state_of_one_that_trains(world, tmp_path):
    world.begin(tmp_path)
    given: list[tuple[int, list[np.ndarray]]] = []
    is_over = threading.Event()
    ready = threading.Barrier(3, timeout=60)

    def donor(replica: int) -> None:
        agent, island = world.join(NAMES[replica])
        give = agent.give

        def recorded(round: int, arrays: Any) -> None:
            given.append((round, arrays))
            give(round, arrays)

        agent.give = recorded  # type: ignore[method-assign]
        state, step = world.programs.init(draws.key(0)), 0
        ready.wait()
        for _ in range(3):
            state, step = train(world, island, state, step, replica)
            agent.settle(step // 2 - 1, 2.0)
            state, step = island.enter(state, step)
        ready.wait()
        while not is_over.wait(0.01):
            state, step = island.enter(state, step)
        agent.close()

    def joiner() -> None:
        try:
            ready.wait()
            ready.wait()
            agent, island = world.join(NAMES[2])
            state, step = island.enter(world.programs.init(draws.key(1)), 0)
            (round, arrays), *_ = given
            assert (step, int(state.outer.round)) == (6, 3) and round == 2
            for mine, theirs in zip(jax.tree.leaves(jax.device_get(state)), arrays[1:], strict=True):
                np.testing.assert_array_equal(mine, theirs)
            assert island.at_rest(state)[1] is not None
            agent.close()
        finally:
            is_over.set()

    side_by_side(lambda: donor(0), lambda: donor(1), joiner)
    assert given


def test_islands_that_have_finished_serve_their_weights_until_all_have(world, tmp_path):
    world.begin(tmp_path)
    together = threading.Barrier(4, timeout=100)
    is_first_through, is_served = threading.Event(), threading.Event()
    said: dict[str, list[str]] = {name: [] for name in NAMES}
    final: list[Any] = []
    served: list[dict[str, np.ndarray]] = []

    def one(replica: int) -> None:
        name = NAMES[replica]
        agent, island = world.join(name)
        together.wait()
        state, step = train(world, island, world.programs.init(draws.key(0)), 0, replica)
        if name == "paris":
            final.append(jax.device_get(state.params))
        if name == "oslo":
            assert is_served.wait(60)
        agent.leave(finished=True)
        if name == "paris":
            is_first_through.set()
        island.linger(state, step, 100.0, lambda: False, said[name].append)
        agent.close()

    def merge() -> None:
        assert is_first_through.wait(100)
        client = Client(world.roster, "oslo", None, "paris")
        (about,) = ask_about({"paris": client}, 10.0).values()
        assert isinstance(about, About) and about.training
        served.append(fetch_weights(client, weight_specs(world.config.model), 30.0).arrays)
        is_served.set()

    started = time.monotonic()
    side_by_side(*[lambda i=i: one(i) for i in range(4)], merge)
    assert time.monotonic() - started < 90
    for found, expected in zip(served[0].values(), jax.tree.leaves(final[0]), strict=True):
        np.testing.assert_array_equal(found, expected[0])
    assert not any("leaves" in line for lines in said.values() for line in lines)
    assert "oslo" in said["paris"][0]


def merged_by(world: World, name: str, agent: Agent, island: IslandSteps, seconds: float, say: Any) -> FinalMerge:
    return FinalMerge(island, world.roster.names, name, world.config.model, seconds, lambda: False, say)


def test_islands_that_end_with_a_merge_have_the_mean_of_all_last_weights(world, tmp_path):
    world.begin(tmp_path)
    together = threading.Barrier(4, timeout=100)
    last, merged = {}, {}
    said: dict[str, list[str]] = {name: [] for name in NAMES}

    def one(replica: int) -> None:
        name = NAMES[replica]
        agent, island = world.join(name)
        together.wait()
        state, step = train(world, island, world.programs.init(draws.key(0)), 0, replica)
        last[name] = jax.device_get(jax.tree.leaves(state.params))
        time.sleep(replica)  # one after the other
        state = merged_by(world, name, agent, island, 100.0, said[name].append)(state, step)
        merged[name] = jax.device_get(jax.tree.leaves(state.params))
        agent.close()

    side_by_side(*[lambda i=i: one(i) for i in range(4)])
    for number, found in enumerate(zip(*merged.values(), strict=True)):
        mean = np.mean([np.float64(last[name][number]) for name in NAMES], axis=0)
        np.testing.assert_allclose(found[0], mean, rtol=2e-7, atol=1e-7)
        for other in found[1:]:
            np.testing.assert_array_equal(found[0], other)
    assert {lines[-1] for lines in said.values()} == {"merged model: the mean of 4 of 4 islands"}


def test_a_merge_names_the_islands_that_it_leaves_out(world, tmp_path):
    world.begin(tmp_path)
    said: list[str] = []
    agent, island = world.join("paris")
    state, step = train(world, island, world.programs.init(draws.key(0)), 0, 0)
    before = jax.device_get(state.params)
    merged = merged_by(world, "paris", agent, island, 0.5, said.append)(state, step)
    agent.close()
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(merged.params), before)
    assert said[-1] == "merged model: the mean of 1 of 4 islands, without berlin, rome, oslo"


def test_who_serves_for_others_in_vain_names_them(world, tmp_path):
    world.begin(tmp_path)
    said: list[str] = []
    agent, island = world.join("paris")
    state, step = train(world, island, world.programs.init(draws.key(0)), 0, 0)
    agent.leave(finished=True)
    island.linger(state, step, 0.5, lambda: False, said.append)
    island.linger(state, step, 100.0, lambda: True, said.append)
    agent.close()
    assert said[1] == said[3] == "leaves; not known to have finished: berlin, rome, oslo"


def test_an_island_of_another_configuration_is_refused_before_it_compiles(world, tmp_path):
    world.begin(tmp_path)
    agents = [world.join(name)[0] for name in NAMES[:2]]
    other = World.__new__(World)
    other.__dict__.update(world.__dict__, config=small(lr=0.5))
    try:
        with pytest.raises(
            UserError, match=r"2 of 3 islands refuse rome; .* outer.lr: 0.5 here, .* at (berlin|paris): give"
        ):
            other.join("rome")
    finally:
        for agent in agents:
            agent.close()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"num_replicas": 5}, "num_replicas=5 and the roster of test has 4 islands: give --config.num_replicas=4"),
        ({"method": "diloco"}, "method='diloco': islands meet in pairs"),
    ],
)
def test_a_configuration_that_islands_cannot_follow_is_told_in_a_line(changes, line):
    roster = Roster("test", tuple(Island(name, Address("127.0.0.1", 1)) for name in NAMES))
    with pytest.raises(UserError, match=re.escape(line)):
        Membership(roster, "paris", None).check(from_dict({"num_replicas": 4} | changes))


def test_an_island_has_begun_when_it_may_train(world, tmp_path):
    """One that is killed while it compiles has no weights to lose, and waits for nobody's when it starts again."""
    world.begin(tmp_path)
    agent = world.open(Membership(world.roster, "paris", None))
    assert not _incarnation(tmp_path / "paris")[1]
    assert Membership.begin(agent, tmp_path / "paris", lambda: False)
    assert _incarnation(tmp_path / "paris")[1]
    agent.close()


def test_every_start_has_a_larger_incarnation_than_all_before(tmp_path):
    first, began = _incarnation(tmp_path)
    _write(tmp_path, first)
    second, again = _incarnation(tmp_path)
    assert second > first and (began, again) == (False, True)
