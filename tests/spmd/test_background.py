"""Background exchanges over the hosts: the collectives of their programs, and when results are awaited.

`tests/train/test_parts_and_modes.py` compares their numbers.
"""

import dataclasses
import threading
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from noloco_jax.config import MeshConfig, OuterConfig, TrainConfig
from noloco_jax.errors import UserError
from noloco_jax.spmd.background import host_mesh, training_devices
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.train.sync import BackgroundSync
from support import modes

CONFIG = dataclasses.replace(modes.CONFIG, outer=OuterConfig(sync_every=2, delay=1))


def after_steps(config: TrainConfig, num_steps: int) -> tuple[Any, Any, Any]:
    """Return the programs, the exchanges, and the state after steps by noise."""
    programs = modes.programs_of(config)
    sync, state = modes.syncs_of(config, programs)(), programs.init(jax.random.key(0))
    for step in range(1, num_steps + 1):
        state, _ = sync.after_step(modes.pushed(config, state, step), step, 1)
    return programs, sync, state


@pytest.mark.parametrize("replica", [1, 2], ids=["collective", "background"])
def test_finish_applies_every_pending_correction(replica):
    """Replicas of DiLoCo are equal after an outer step, and with its correction pending they are apart."""
    outer = OuterConfig(sync_every=2, delay=2)
    config = dataclasses.replace(CONFIG, method="diloco", mesh=MeshConfig(replica=replica), outer=outer)
    programs, sync, state = after_steps(config, 4)
    pending = float(programs.spread(state.params))
    state = sync.finish(state, 4)
    sync.close(state, True)
    assert pending > 1e-3 and float(programs.spread(state.params)) < 1e-7


def test_settle_stores_the_corrections_of_all_exchanges_in_flight():
    """A collective exchange stores each at once: its state is the oracle."""
    config = dataclasses.replace(CONFIG, outer=OuterConfig(sync_every=4, delay=4, fragments=4))
    states = []
    for replica in (1, 2):
        _, sync, state = after_steps(dataclasses.replace(config, mesh=MeshConfig(replica=replica)), 5)
        states.append(jax.device_get(sync.settle(state)[0].outer.delayed.correction))
        sync.close(state, False)
    collective, background = states
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(collective))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-7), background, collective)


def test_hosts_mirror_the_mesh_on_devices_that_do_not_train():
    config = dataclasses.replace(CONFIG, mesh=MeshConfig(replica=2, fsdp=2))
    mesh = make_mesh(config.mesh, config.num_replicas, training_devices(config.delay, config.mesh, jax.devices("cpu")))
    hosts = host_mesh(mesh)
    assert hosts.shape == mesh.shape
    assert not set(hosts.devices.flat) & set(mesh.devices.flat)


def test_a_delay_that_one_device_imitates_takes_no_devices_from_its_replicas():
    config = dataclasses.replace(CONFIG, mesh=MeshConfig(replica=1, fsdp=4, tensor=2))
    assert training_devices(config.delay, config.mesh, jax.devices("cpu")) == jax.devices("cpu")


def test_processes_of_one_cpu_device_each_are_refused():
    devices = [SimpleNamespace(platform="cpu", process_index=number) for number in range(2)]
    with pytest.raises(UserError, match="exchanges on CPU devices beside those that train, and a process has one"):
        training_devices(CONFIG.delay, CONFIG.mesh, devices)


def test_a_mesh_that_leaves_no_devices_for_exchanges_is_refused():
    config = dataclasses.replace(CONFIG, num_replicas=8, mesh=MeshConfig(replica=8))
    with pytest.raises(UserError, match="a CPU device for each device, and process 0 has too few"):
        host_mesh(make_mesh(config.mesh, config.num_replicas, jax.devices("cpu")))


def test_a_correction_is_awaited_only_when_it_is_due():
    config = dataclasses.replace(CONFIG, mesh=MeshConfig(replica=4), outer=OuterConfig(sync_every=4, delay=3))
    programs = modes.programs_of(config)
    sync, schedule = modes.syncs_of(config, programs)(), config.schedule
    assert schedule is not None and isinstance(sync, BackgroundSync)
    state = programs.init(jax.random.key(0))
    waiting = []
    for step in range(1, 10):
        state, _ = sync.after_step(modes.pushed(config, state, step), step, 1)
        waiting.append(len(sync._exchange.under_way))
    assert waiting == [0, 0, 0, 1, 1, 1, 0, 1, 1]


@pytest.mark.parametrize(("replica", "outer"), [(1, {}), (1, {"delay": 2}), (2, {"delay": 2})])
def test_the_host_waits_for_outer_steps_once_in_log_every_steps(monkeypatch, replica, outer):
    """An outer step of a fragment follows each inner step; in between, programs are dispatched ahead of the devices."""
    outer = OuterConfig(sync_every=4, fragments=4, **outer)
    config = dataclasses.replace(CONFIG, num_steps=40, log_every=10, outer=outer, mesh=MeshConfig(replica=replica))
    programs = modes.programs_of(config)
    sync, state = modes.syncs_of(config, programs)(), programs.init(jax.random.key(0))
    waits, seconds, block, main = [], [], jax.block_until_ready, threading.current_thread()
    monkeypatch.setattr(
        jax, "block_until_ready", lambda tree: waits.append(threading.current_thread() is main) or block(tree)
    )
    for step in range(1, 41):
        state, taken = sync.after_step(state, step, 1)
        assert taken is not None
        seconds.append(taken.seconds)
    sync.close(state, True)
    assert sum(waits) == 2 * 4 * (1 + bool(outer.delay))
    assert sum(x > 0 for x in seconds) in range(4, 9)
