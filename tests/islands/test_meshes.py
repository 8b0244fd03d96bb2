"""Islands on several devices, with sharded or offloaded states: they match one program of as many replicas."""

import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from noloco_jax import draws
from noloco_jax.config import TrainConfig, from_dict
from noloco_jax.island.membership import Membership
from noloco_jax.islands.agent import Healed
from noloco_jax.islands.start import begin
from noloco_jax.spmd.batches import place_batch
from noloco_jax.spmd.compile import compile_programs
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.programs import Programs, TrainState, build_programs, shardings_of
from noloco_jax.spmd.solo import build_solo
from support import tiny_model
from support.rosters import on_loopback
from support.sites import side_by_side

NAMES = ("paris", "berlin")
CONFIG = from_dict(
    {
        "num_replicas": 2,
        "num_steps": 9,  # not a multiple of sync_every: two replicas are equal after an outer step
        "model": {"kind": tiny_model.KIND, "hidden_size": 16, "intermediate_size": 32, "num_layers": 1},
        "inner": {"lr": 1e-2, "warmup_steps": 2, "eps": 1e-4},
        "outer": {"sync_every": 2},
        "data": {"sequence_length": 8, "batch_size": 2},
    }
)
PROGRAMS = ("inner_step", "outer_step")


def laid_out(offload: bool = False, **sizes: int) -> TrainConfig:
    return replace(CONFIG, outer=replace(CONFIG.outer, offload=offload), mesh=replace(CONFIG.mesh, **sizes))


def inner(programs: Programs, state: TrainState, step: int, replicas: range) -> TrainState:
    """Run an inner step of some replicas on batches that depend on step and replica alone; return the new state."""
    size = CONFIG.data.batch_size, CONFIG.data.sequence_length
    numbers = [np.random.default_rng([step, replica]).integers(0, 259, (2, *size)) for replica in replicas]
    batch = {i: {"input_ids": x[0], "labels": x[1]} for i, x in enumerate(x.astype(np.int32) for x in numbers)}
    params, moments, _ = programs.inner_step(
        state.params, state.inner, place_batch(batch, programs.batch), np.int32(step)
    )
    return TrainState(params, moments, state.outer)


def trained_together(config: TrainConfig) -> TrainState:
    """Train two replicas in one program; return the final state on the host."""
    programs = compile_programs(config, build_programs(config, make_mesh(config, jax.devices()[:2])), only=PROGRAMS)
    assert programs.outer_step is not None
    state = programs.init(draws.key(config.seed))
    for step in range(1, config.num_steps + 1):
        state = inner(programs, state, step, range(2))
        if step % config.outer.sync_every == 0:
            params, outer = programs.outer_step(state.params, state.outer)
            state = TrainState(params, state.inner, outer)
    return jax.device_get(state)


def trained_as_islands(configs: list[TrainConfig], folder: Path) -> list[TrainState]:
    """Train one island per configuration on its own devices, waiting for each exchange; return the final states."""
    roster = on_loopback(*NAMES)
    devices = iter(jax.devices())
    final: dict[int, TrainState] = {}

    def train(replica: int, config: TrainConfig, devices: list[Any]) -> None:
        member = Membership(roster, NAMES[replica], None, at_once=True)
        member.check(config)
        own = member.own(config)
        programs = compile_programs(own, build_programs(own, make_mesh(own, devices)), only=PROGRAMS[:1])
        solo = build_solo(own, programs)
        agent = member.open_agent(
            config, solo, programs, None, folder / NAMES[replica], lambda: False, lambda line: None
        )
        assert agent is not None
        assert begin(agent, folder / NAMES[replica], lambda: False)
        island = member.steps(own, agent, solo, programs)
        state, seconds = programs.init(draws.key(config.seed)), -time.perf_counter()
        for step in range(1, config.num_steps + 1):
            state = inner(programs, state, step, range(replica, replica + 1))
            assert shardings_of(state.outer) == shardings_of(programs.resting.outer)
            state = island.take(state, step, int(step % config.outer.sync_every == 0))
        seconds += time.perf_counter()
        met = agent.take_met()
        assert [one.outcome for one in met] == ["met"] * 4
        assert 0 < island.seconds_exposed < seconds
        final[replica] = jax.device_get(state)
        leaves = dict(enumerate(jax.tree.leaves(final[replica])))
        healed, _ = island.healed(Healed(3, 9, leaves, whole=True))
        jax.tree.map(
            lambda x, like: x.sharding == like.sharding or pytest.fail("another sharding"), healed, programs.resting
        )
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(healed), final[replica])
        agent.close()

    works = []
    for replica, config in enumerate(configs):
        own_devices = list(itertools.islice(devices, config.mesh.fsdp * config.mesh.tensor))
        works.append(lambda replica=replica, config=config, own=own_devices: train(replica, config, own))
    side_by_side(*works)
    return [final[replica] for replica in range(2)]


@pytest.fixture(scope="module")
def one_program() -> TrainState:
    return trained_together(CONFIG)


@pytest.mark.parametrize(
    "layouts",
    [
        [{"tensor": 2}, {"fsdp": 2, "tensor": 2}],
        [{"fsdp": 2, "offload": True}, {"offload": True}],
    ],
    ids=["each-its-own", "offloaded"],
)
def test_islands_of_any_layout_match_the_states_of_one_program(tmp_path, one_program, layouts):
    found = trained_as_islands([laid_out(**layout) for layout in layouts], tmp_path)
    for path, expected in jax.tree.leaves_with_path(one_program):
        for replica in range(2):
            mine = dict(jax.tree.leaves_with_path(found[replica]))[path]
            row = slice(replica, replica + 1) if expected.ndim else ()
            np.testing.assert_allclose(mine, expected[row], rtol=5e-4, atol=5e-6, err_msg=str((replica, path)))
    embed = np.asarray(one_program.params["embed"])
    assert np.abs(embed[0] - embed[1]).max() > 1e-4  # they are no copies of each other
