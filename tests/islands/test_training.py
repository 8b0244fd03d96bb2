"""Islands that train over Flight on loopback, in threads of one process."""

import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from noloco_jax import draws
from noloco_jax.config import TrainConfig, from_dict
from noloco_jax.islands.roster import Address, Island, Roster
from noloco_jax.islands.station import Station
from noloco_jax.islands.steps import IslandSteps
from noloco_jax.methods import meetings_of
from noloco_jax.run.island import Membership, open_station, steps_of
from noloco_jax.spmd.batches import place_batch
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.programs import Programs, TrainState, build_programs
from noloco_jax.spmd.solo import SoloPrograms, build_solo
from support.islands import free_ports

NAMES = ("paris", "berlin", "rome", "oslo")


def small(**outer: Any) -> TrainConfig:
    return from_dict(
        {
            "num_replicas": 4,
            "num_steps": 12,
            "model": {"hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1},
            "inner": {"lr": 1e-2, "warmup_steps": 2, "eps": 1e-4},
            "outer": {"sync_every": 2, **outer},
            "data": {"sequence_length": 8, "batch_size": 2},
        }
    )


class NeverStopped:
    def at(self, step: int) -> bool:
        return False


class World:
    """Islands of one configuration, whose programs are compiled once."""

    def __init__(self, config: TrainConfig, folder: Any):
        self.config, self.folder = config, folder
        addresses = [Address("127.0.0.1", port) for port in free_ports(len(NAMES))]
        self.roster = Roster("test", tuple(map(Island, NAMES, addresses)))
        self.own = Membership(self.roster, NAMES[0], None).own(config)
        self.programs: Programs = build_programs(self.own, make_mesh(self.own, jax.devices()[:1]))
        self.solo: SoloPrograms = build_solo(self.own, self.programs)
        self.lines: list[str] = []

    def join(self, name: str, **options: Any) -> tuple[Station, IslandSteps]:
        member = Membership(self.roster, name, None, **options)
        station = open_station(
            member, self.config, self.solo, self.programs, None, self.folder / name, NeverStopped(), self.lines.append
        )
        assert station is not None
        return station, steps_of(member, self.own, station, self.solo, self.programs)

    def batch(self, step: int, replicas: range) -> dict[int, dict[str, np.ndarray]]:
        """Of some replicas, a function of step and replica alone."""
        size = (self.config.data.batch_size, self.config.data.sequence_length)
        numbers = [np.random.default_rng([step, replica]).integers(0, 259, (2, *size)) for replica in replicas]
        return {i: dict(zip(("input_ids", "labels"), x.astype(np.int32), strict=True)) for i, x in enumerate(numbers)}

    def inner(self, programs: Programs, state: TrainState, step: int, replicas: range) -> TrainState:
        batch = place_batch(self.batch(step, replicas), programs.batch)
        params, inner, _ = programs.inner_step(state.params, state.inner, batch, np.int32(step))
        return TrainState(params, inner, state.outer)


def in_threads(*works: Callable[[], None]) -> None:
    """Runs them side by side; raises what one of them raises."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if errors:
        raise errors[0]


@pytest.mark.parametrize("fragments", [1, 2])
def test_exchanges_at_once_give_the_weights_of_one_program(tmp_path, fragments):
    world = World(small(fragments=fragments), tmp_path)
    config, meetings = world.config, meetings_of(world.config)
    assert meetings is not None
    final: dict[int, Any] = {}

    def train(replica: int) -> None:
        station, island = world.join(NAMES[replica], at_once=True)
        state = world.programs.init(draws.key(config.seed))
        for step in range(1, config.num_steps + 1):
            state = world.inner(world.programs, state, step, range(replica, replica + 1))
            state = island.take(state, step, meetings.due(step))
        final[replica] = jax.device_get(state.params)
        met, status = station.take_met()
        assert status.committed == status.due == meetings.total(config.num_steps)
        assert {one.outcome for one in met} == {"met"}
        station.close()

    in_threads(*[lambda i=i: train(i) for i in range(4)])

    together = build_programs(config, make_mesh(config, jax.devices()[:4]))
    state = together.init(draws.key(config.seed))
    for step in range(1, config.num_steps + 1):
        state = world.inner(together, state, step, range(4))
        for _ in range(meetings.due(step)):
            assert together.outer_step is not None
            params, outer = together.outer_step(state.params, state.outer)
            state = TrainState(params, state.inner, outer)
    for path, expected in jax.tree.leaves_with_path(jax.device_get(state.params)):
        for replica in range(4):
            found = dict(jax.tree.leaves_with_path(final[replica]))[path][0]
            np.testing.assert_allclose(found, expected[replica], rtol=2e-4, atol=2e-6, err_msg=str(path))
        assert np.abs(expected[0] - expected[1]).max() > 1e-4  # they are no copies of each other
