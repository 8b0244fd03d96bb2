"""Islands after their last step: they serve their weights to the others, and merge them."""

import threading
import time
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
import pytest

from noloco_jax import draws
from noloco_jax.islands.agent import Agent, Correction
from noloco_jax.islands.client import Client
from noloco_jax.islands.final_merge import FinalMerge
from noloco_jax.islands.protocol.members import Entry, Members
from noloco_jax.islands.query import About, ask_about, fetch_weights
from noloco_jax.islands.steps import IslandSteps, weight_specs
from support.sites import side_by_side
from support.training_islands import NAMES, World, train


def test_finished_islands_serve_their_weights_until_all_have_finished(world, tmp_path):
    world.begin(tmp_path)
    together = threading.Barrier(4, timeout=100)
    is_first_through, is_served = threading.Event(), threading.Event()
    said: dict[str, list[str]] = {name: [] for name in NAMES}
    final: list[Any] = []
    served: list[dict[str, np.ndarray]] = []

    def train_one(replica: int) -> None:
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
    side_by_side(*[lambda i=i: train_one(i) for i in range(4)], merge)
    assert time.monotonic() - started < 90
    for found, expected in zip(served[0].values(), jax.tree.leaves(final[0]), strict=True):
        np.testing.assert_array_equal(found, expected[0])
    assert not any("leaves" in line for lines in said.values() for line in lines)
    assert "oslo" in said["paris"][0]


def final_merge(world: World, name: str, agent: Agent, island: IslandSteps, seconds: float, say: Any) -> FinalMerge:
    return FinalMerge(island, name, weight_specs(world.config.model), seconds, lambda: False, say)


def test_a_final_merge_gives_every_island_the_mean_of_all_last_weights(world, tmp_path):
    world.begin(tmp_path)
    together = threading.Barrier(4, timeout=100)
    last, merged = {}, {}
    said: dict[str, list[str]] = {name: [] for name in NAMES}

    def train_one(replica: int) -> None:
        name = NAMES[replica]
        agent, island = world.join(name)
        together.wait()
        state, step = train(world, island, world.programs.init(draws.key(0)), 0, replica)
        last[name] = jax.device_get(jax.tree.leaves(state.params))
        time.sleep(replica)  # the islands merge one after the other
        state = final_merge(world, name, agent, island, 100.0, said[name].append)(state, step)
        merged[name] = jax.device_get(jax.tree.leaves(state.params))
        agent.close()

    side_by_side(*[lambda i=i: train_one(i) for i in range(4)])
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
    merged = final_merge(world, "paris", agent, island, 0.5, said.append)(state, step)
    agent.close()
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(merged.params), before)
    assert said[-1] == "merged model: the mean of 1 of 4 islands, without berlin, rome, oslo"


def test_a_merge_leaves_out_own_weights_that_are_not_finite(world, tmp_path):
    """The others leave them out, and an island without finite weights is to end with the same model as they do."""
    world.begin(tmp_path)
    together = threading.Barrier(2, timeout=100)
    last, merged = {}, {}
    said: dict[str, list[str]] = {name: [] for name in NAMES[:2]}

    def train_one(replica: int) -> None:
        name = NAMES[replica]
        agent, island = world.join(name)
        together.wait()
        state, step = train(world, island, world.programs.init(draws.key(0)), 0, replica)
        if name == "berlin":
            state = state._replace(params=jax.tree.map(lambda x: x * np.float32("nan"), state.params))
        last[name] = jax.device_get(jax.tree.leaves(state.params))
        state = final_merge(world, name, agent, island, 3.0, said[name].append)(state, step)
        merged[name] = jax.device_get(jax.tree.leaves(state.params))
        agent.close()

    side_by_side(*[lambda i=i: train_one(i) for i in range(2)])
    for name in NAMES[:2]:
        for found, expected in zip(merged[name], last["paris"], strict=True):
            np.testing.assert_array_equal(found, expected)
    assert "berlin is left out of the merge: its weights are not finite" in said["berlin"]


@pytest.mark.parametrize("until", [1, 2], ids=["for a round", "from now on"])
def test_an_island_that_was_removed_keeps_its_own_weights_and_waits_for_nobody(until, world, tmp_path):
    world.begin(tmp_path)
    said: list[str] = []
    removal = Entry(0, "paris", "", from_round=0, until_round=until, issued=0, version=1)
    agent, island = world.join("paris", members=Members(NAMES, lambda entry: True, [removal]))
    state, step = train(world, island, world.programs.init(draws.key(0)), 0, 0)
    state, step = train(world, island, state, step, 0)
    before = jax.device_get(state.params)
    started = time.monotonic()
    merged = final_merge(world, "paris", agent, island, 50.0, said.append)(state, step)
    assert time.monotonic() - started < 20
    agent.close()
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(merged.params), before)
    assert said == ["not merged, as paris is no member of the run now: it keeps its own weights"]


def test_a_round_after_a_removal_is_alone_for_that_reason(world, tmp_path):
    world.begin(tmp_path)
    removal = Entry(0, "paris", "", from_round=0, until_round=1, issued=0, version=1)
    agent, island = world.join("paris", members=Members(NAMES, lambda entry: True, [removal]))
    state, step = train(world, island, world.programs.init(draws.key(0)), 0, 0)
    train(world, island, state, step, 0)
    agent.close()
    assert [one.reason for one in agent.take_met() if one.round == 1] == ["paris is no member in this round"]


def test_a_correction_that_arrives_at_the_end_is_not_added_to_the_mean(world, tmp_path):
    """A lost commit is asked for while the island waits, and the others may have its weights already."""
    world.begin(tmp_path)
    agent, island = world.join("paris")
    state, step = train(world, island, world.programs.init(draws.key(0)), 0, 0)
    before = jax.device_get(state.params)
    correction = [np.full(x.shape, 0.25, x.dtype) for x in jax.tree.leaves(world.solo.correction)]

    def arrive() -> None:
        arrays: Future[Any] = Future()
        arrays.set_result(correction)
        agent._inbox.append(Correction(0, arrays))

    merge = final_merge(world, "paris", agent, island, 0.5, [].append)
    island.linger = lambda *_: arrive()  # type: ignore[method-assign]
    merging = merge._merging
    merge._merging = lambda *arguments: (arrive(), merging(*arguments))[1]  # type: ignore[method-assign]
    merged = merge(state, step)
    state, _ = island.at_rest(merged)  # as it is saved
    agent.close()
    for found, expected in zip(jax.tree.leaves(state.params), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_an_island_that_stops_serving_names_the_unfinished_peers(world, tmp_path):
    world.begin(tmp_path)
    said: list[str] = []
    agent, island = world.join("paris")
    state, step = train(world, island, world.programs.init(draws.key(0)), 0, 0)
    agent.leave(finished=True)
    island.linger(state, step, 0.5, lambda: False, said.append)
    island.linger(state, step, 100.0, lambda: True, said.append)
    agent.close()
    assert said[1] == said[3] == "leaves; not known to have finished: berlin, rome, oslo"
