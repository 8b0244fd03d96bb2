"""Training of islands on several devices, with sharded or offloaded states, and from a peer's weights."""

import dataclasses
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest

from noloco_jax.config import TrainConfig
from noloco_jax.islands import steps
from noloco_jax.islands.catch_up import CaughtUp
from noloco_jax.islands.interfaces import RoundOutcome
from noloco_jax.islands.membership import Membership
from noloco_jax.islands.programs import build_local
from noloco_jax.islands.run import labels_of, observe_by
from noloco_jax.islands.steps import WARM_UP_STEPS, IslandSteps
from noloco_jax.islands.sync import IslandSync
from noloco_jax.metrics.writer import MetricWriter
from noloco_jax.optim import prng
from noloco_jax.optim.schedule import SyncSchedule
from noloco_jax.spmd.compile import compile_programs
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.programs import TrainState, build_programs, shardings_of
from support.at_once import side_by_side, wait_for_exchanges
from support.fake_wandb import FakeWandb
from support.rosters import on_loopback
from support.training_islands import NAMES, World, small

PAIR = dataclasses.replace(small(), num_replicas=2, num_steps=9)


def laid_out(offload: bool = False, **sizes: int) -> TrainConfig:
    outer = dataclasses.replace(PAIR.outer, offload=offload)
    return dataclasses.replace(PAIR, outer=outer, mesh=dataclasses.replace(PAIR.mesh, **sizes))


def trained_as_islands(configs: list[TrainConfig], folder: Path) -> list[TrainState]:
    """Train an island per configuration on its own devices, waiting for each exchange; return the final states."""
    world, devices = World(PAIR, folder), iter(jax.devices())
    final: dict[int, TrainState] = {}

    def train(replica: int, config: TrainConfig, devices: list[Any]) -> None:
        mine = World.__new__(World)
        mine.__dict__.update(world.__dict__)
        mine.config, mine.own = config, dataclasses.replace(config, num_replicas=1)
        programs = build_programs(mine.own, make_mesh(mine.own.mesh, mine.own.num_replicas, devices))
        mine.programs = compile_programs(programs, offload=config.outer.offload, only=("inner_step",))
        link, island = mine.join(NAMES[replica])
        wait_for_exchanges(island)
        state = mine.programs.init(prng.key(config.seed))
        for step in range(1, config.num_steps + 1):
            state = mine.inner(state, step, range(replica, replica + 1))
            assert shardings_of(state.outer) == shardings_of(mine.programs.between_steps.outer)
            state = island.outer_step(state, step, int(step % config.outer.sync_every == 0))
        assert [one.outcome for one in link.take_outcomes()] == ["met"] * 4
        assert island.seconds_exposed > 0
        final[replica] = jax.device_get(state)
        leaves = dict(enumerate(map(np.asarray, jax.tree.leaves(final[replica].params))))
        again, _ = island.caught_up(CaughtUp(3, 9, leaves))
        assert shardings_of(again) == shardings_of(mine.programs.between_steps)
        assert again.outer is not None and int(again.outer.num_outer_steps) == 4
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(again.params), final[replica].params)
        link.close()

    works = []
    for replica, config in enumerate(configs):
        own = list(itertools.islice(devices, config.mesh.fsdp * config.mesh.tensor))
        works.append(lambda replica=replica, config=config, own=own: train(replica, config, own))
    side_by_side(*works)
    return [final[replica] for replica in range(2)]


@pytest.fixture(scope="module")
def on_one_device_each(tmp_path_factory) -> list[TrainState]:
    return trained_as_islands([PAIR, PAIR], tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(
    "layouts",
    [[{"tensor": 2}, {"fsdp": 2, "tensor": 2}], [{"fsdp": 2, "offload": True}, {"offload": True}]],
    ids=["each-its-own", "offloaded"],
)
def test_islands_of_any_layout_match_those_of_one_device(tmp_path, on_one_device_each, layouts):
    found = trained_as_islands([laid_out(**layout) for layout in layouts], tmp_path)
    for replica, expected in enumerate(on_one_device_each):
        mine = dict(jax.tree.leaves_with_path(found[replica]))
        for path, x in jax.tree.leaves_with_path(expected):
            np.testing.assert_allclose(mine[path], x, rtol=5e-4, atol=5e-6, err_msg=str((replica, path)))


def test_two_inner_steps_are_queued_at_most_while_a_message_may_arrive(monkeypatch):
    waited: list[int] = []
    numbers = itertools.count()

    class Mark:
        def __init__(self, x: jax.Array):
            self.number = next(numbers)

        def block_until_ready(self) -> None:
            waited.append(self.number)

    monkeypatch.setattr(steps, "_mark", Mark)
    link: Any = SimpleNamespace(
        pace=SimpleNamespace(pause=lambda: 0.0),
        is_exchanging=True,
        is_removed=False,
        take=lambda: [],
        copies=SimpleNamespace(wanted=()),
    )
    island = IslandSteps(link, None, None, lambda step: 1)  # type: ignore[arg-type]
    state = TrainState({"w": jax.numpy.zeros(3)}, (), None)
    for step in range(6):
        island.apply_arrived(state, step)
        assert waited == list(range(step - 1))


def test_a_round_of_shortened_steps_weighs_as_the_part_of_them_that_was_taken(tmp_path):
    world = World(PAIR, tmp_path)
    weights: list[int] = []
    link: Any = SimpleNamespace(
        stride=lambda most: 1, round_ended=lambda number, step, message, norm, tokens: weights.append(tokens)
    )
    state = world.programs.init(prng.key(0))
    island = IslandSteps(link, build_local(world.own, world.programs), lambda item: state, lambda step: 1000)
    state, step = island.caught_up(CaughtUp(-1, 0, {}))
    for step in range(1, WARM_UP_STEPS + 5):
        state, _ = island.advance(state, step - 1, 1)
        state = island.warm_up(world.inner(state, step, range(1)))
        if step % 2 == 0:
            state = island.outer_step(state, step, 1)
    shares = [min(step / (WARM_UP_STEPS + 1), 1) for step in range(1, WARM_UP_STEPS + 5)]
    expected = [1000 * (one + other) / 2 for one, other in zip(shares[::2], shares[1::2], strict=True)]
    np.testing.assert_allclose(weights, expected, atol=1.01)


def test_the_bytes_sent_are_those_of_messages_that_were_exchanged_and_lines_come_every_few_steps():
    outcomes = [
        RoundOutcome(0, "berlin", "met", steps_late=1),
        RoundOutcome(1, "", "alone", reason="an odd number of islands"),
        RoundOutcome(2, "rome", "alone", reason="not committed in time"),
        RoundOutcome(3, "berlin", "late", lag=1, steps_late=4),
        RoundOutcome(4, "rome", "alone", factor=0.0, one_sided=True, reason="far"),
    ]
    arrived: list[RoundOutcome] = []
    status = SimpleNamespace(due=3, committed=2, one_sided=1)
    link = SimpleNamespace(take_outcomes=lambda: [arrived.pop()] if arrived else [], status=lambda: status)
    steps: Any = SimpleNamespace(link=link, seconds_exposed=0.5, seconds_paused=0.0)
    sync = IslandSync("paris", SyncSchedule(1), steps, 10, cast(Any, None), log_every=5)
    sent, lines, figures = [], [], []
    for number, one in enumerate(outcomes):
        arrived.append(one)
        sent.append(sync.bytes_sent())
        sync._step = number + 1
        for news in sync.news(1.0):
            (figures if news.kind else lines).append(news.figures if news.kind else news.line)
    assert sent == [10, 0, 0, 10, 10]
    assert [line["outcome"] for line in figures] == [one.outcome for one in outcomes]
    assert [line["round"] for line in figures] == [1, 2, 3, 4, 5]  # as the lines count them
    assert figures[0]["participation"] == 2 / 3 and figures[0]["one_sided"] == 1
    (line,) = lines
    assert line.startswith("rounds 1 to 5: exchanged with berlin after 2.5 steps, 10 B each way, 1 alone, no partner")
    assert "1 alone, without rome: not committed in time" in line and "1 one-sided" in line


def test_an_island_s_figures_reach_tensorboard_wandb_and_those_who_watch(tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    member = Membership(on_loopback("paris", "rome", run="c4"), "paris", None)
    shown: dict[str, float] = {}
    link: Any = SimpleNamespace(record=shown.update)
    labels = labels_of(member).in_wandb
    with MetricWriter(
        tmp_path, resume_step=None, wandb_project="project", wandb_labels=labels, observe=observe_by(link)
    ) as metrics:
        metrics.write(10, "train", loss=2.5, grad_norm=1.0, tokens_per_second=100.0)
        metrics.write(12, "exchange", partner="rome", participation=0.5)
        metrics.write(12, "eval", island="paris", perplexity=9.0)
    [run] = wandb.runs
    assert (run["project"], run["name"], run["group"]) == ("project", "paris", "c4")
    scalars = {"train/loss": 2.5, "train/grad_norm": 1.0, "train/tokens_per_second": 100.0}
    assert wandb.logged == [(10, scalars), (12, {"exchange/participation": 0.5}), (12, {"eval/perplexity": 9.0})]
    assert shown == {"loss": 2.5, "tokens_per_second": 100.0, "perplexity": 9.0}
