"""Background exchanges over the hosts: the collectives of their programs, and when results are awaited.

`tests/run/test_parts_and_modes.py` compares their numbers.
"""

import dataclasses
from typing import Any

import jax
import pytest

from noloco_jax.config import MeshConfig, OuterConfig
from noloco_jax.errors import UserError
from noloco_jax.methods import schedule_of
from noloco_jax.run.sync import BackgroundSync
from noloco_jax.spmd.background import build_background, compile_background, host_mesh, training_devices
from noloco_jax.spmd.hlo import Collective, read_hlo
from noloco_jax.spmd.mesh import make_mesh
from support import modes

CONFIG = dataclasses.replace(modes.CONFIG, outer=OuterConfig(sync_every=2, delay=1))


def collectives(program: Any) -> list[Collective]:
    return list(read_hlo(program.as_text(), {"replica": 4, "stage": 1, "fsdp": 1, "tensor": 1}).collectives())


def test_device_programs_send_nothing_between_replicas():
    outer = OuterConfig(sync_every=2, delay=1, moments=1)
    config = dataclasses.replace(CONFIG, mesh=MeshConfig(replica=4), outer=outer)
    programs = modes.programs_of(config)
    background = compile_background(build_background(config, programs, host_mesh(programs.mesh)), programs)
    moments = background.moments
    assert moments is not None
    of_devices = (background.solo, background.keep, programs.correct_step, moments.send, moments.keep)
    for program in (*of_devices, programs.enter_moments):
        assert not collectives(program)
    for program in (background.exchange, moments.exchange):
        assert {one.kind for one in collectives(program)} == {"collective-permute"}


def test_hosts_mirror_the_mesh_on_devices_that_do_not_train():
    config = dataclasses.replace(CONFIG, mesh=MeshConfig(replica=2, fsdp=2))
    mesh = make_mesh(config, training_devices(config, jax.devices("cpu")))
    hosts = host_mesh(mesh)
    assert hosts.shape == mesh.shape
    assert not set(hosts.devices.flat) & set(mesh.devices.flat)


def test_a_delay_that_one_device_imitates_takes_no_devices_from_its_replicas():
    config = dataclasses.replace(CONFIG, mesh=MeshConfig(replica=1, fsdp=4, tensor=2))
    assert training_devices(config, jax.devices("cpu")) == jax.devices("cpu")


def test_a_mesh_that_leaves_no_devices_for_exchanges_is_refused():
    config = dataclasses.replace(CONFIG, num_replicas=8, mesh=MeshConfig(replica=8))
    with pytest.raises(UserError, match="a CPU device for each device, and process 0 has too few"):
        host_mesh(make_mesh(config, jax.devices("cpu")))


def test_a_correction_is_awaited_only_when_it_is_due():
    config = dataclasses.replace(CONFIG, mesh=MeshConfig(replica=4), outer=OuterConfig(sync_every=4, delay=3))
    programs = modes.programs_of(config)
    sync, schedule = modes.sync_of(config, programs), schedule_of(config)
    assert schedule is not None and isinstance(sync, BackgroundSync)
    state = programs.init(jax.random.key(0))
    waiting = []
    for step in range(1, 10):
        state, _ = sync.after_step(modes.pushed(config, state, step), step, 1)
        waiting.append(len(sync._exchange.under_way))
    assert waiting == [0, 0, 0, 1, 1, 1, 0, 1, 1]
