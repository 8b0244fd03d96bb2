"""An outer step whose exchange runs over the hosts gives what the same exchange on the devices gives."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from noloco_jax.config import DataConfig, InnerConfig, MeshConfig, ModelConfig, OuterConfig, TrainConfig
from noloco_jax.errors import UserError
from noloco_jax.methods import schedule_of
from noloco_jax.outer.moments import LateMoments
from noloco_jax.run.sync import BackgroundSync, CollectiveSync, Sync
from noloco_jax.spmd.background import build_background, compile_background, host_mesh, training_devices
from noloco_jax.spmd.compile import compile_programs
from noloco_jax.spmd.hlo import Collective, read_hlo
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.programs import Programs, TrainState, build_programs

OPTIONS = {"xla_backend_optimization_level": 0}
CONFIG = TrainConfig(
    num_replicas=4,
    num_steps=9,
    model=ModelConfig(hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=64),
    inner=InnerConfig(warmup_steps=1),
    outer=OuterConfig(sync_every=2, delay=1),
    data=DataConfig(sequence_length=16, batch_size=2),
)
SLOTS = MeshConfig(replica=2)  # two replicas a device
INSIDE = [MeshConfig(replica=2, fsdp=2), MeshConfig(replica=2, stage=2)]
CARRIED: dict[str, Any] = {"momentum_of": "corrections", "momentum": 0.3}
VARIANTS = {
    "pairs": ("noloco", OuterConfig(sync_every=2, delay=2)),
    "int4 fragments": ("noloco", OuterConfig(sync_every=4, delay=3, wire="int4", fragments=4)),
    "best": ("noloco", OuterConfig(sync_every=2, delay=1, wire="modulo4", fragments=4, order="hypercube", **CARRIED)),
    "groups": ("noloco", OuterConfig(sync_every=2, delay=1, group_size=3, wire="bfloat16")),
    "neighbours": ("epidemic", OuterConfig(sync_every=1, delay=1, wire="int8")),
    "all": ("diloco", OuterConfig(sync_every=2, delay=1, fragments=2)),
    "moments": ("noloco", OuterConfig(sync_every=2, delay=2, moments=2, fragments=2, wire="int8")),
    "offloaded": ("noloco", OuterConfig(sync_every=2, delay=1, offload=True)),
}


def programs_of(config: TrainConfig) -> Programs:
    size = int(np.prod([max(getattr(config.mesh, axis), 1) for axis in ("replica", "stage", "fsdp", "tensor")]))
    programs = build_programs(config, make_mesh(config, jax.devices("cpu")[:size]))
    needed = ("outer_step", "correct_step", "share_moments", "enter_moments")
    return compile_programs(config, programs, only=needed, options=OPTIONS)


def background_of(config: TrainConfig, programs: Programs) -> BackgroundSync:
    built = build_background(config, programs, host_mesh(programs.mesh))
    return BackgroundSync(config, programs, compile_background(built, programs))


def pushed(state: TrainState, step: int) -> TrainState:
    """The state after an inner step that pushes every replica elsewhere, and no moment below zero."""

    def push(x: Any) -> Any:
        noise = np.random.default_rng([step, x.size]).normal(size=x.shape)
        return jax.device_put((np.asarray(x) + 1e-3 * noise).astype(x.dtype), x.sharding)

    def push_moment(x: Any) -> Any:
        return jax.device_put(np.abs(push(x)), x.sharding)

    inner = state.inner
    if isinstance(inner, LateMoments):
        inner = inner._replace(inner=jax.tree.map(push_moment, inner.inner))
    return state._replace(params=jax.tree.map(push, state.params), inner=inner)


def trained(config: TrainConfig, programs: Programs, sync: Sync, settle_at: int = 0) -> TrainState:
    state = programs.init(jax.random.key(0))
    for step in range(1, config.num_steps + 1):
        state, _ = sync.after_step(pushed(state, step), step, 1)
        if step == settle_at:
            state, _ = sync.settle(state)
    return sync.settle(state)[0]


@pytest.mark.parametrize(
    ("variant", "mesh"),
    [(name, SLOTS) for name in VARIANTS] + [(name, mesh) for name in ("best", "all") for mesh in INSIDE],
)
def test_exchanges_over_the_hosts_give_the_weights_and_the_state_of_exchanges_on_the_devices(variant, mesh):
    method, outer = VARIANTS[variant]
    config = dataclasses.replace(CONFIG, method=method, outer=outer, mesh=mesh)
    programs = programs_of(config)
    expected = trained(config, programs, CollectiveSync(config, programs))
    actual = trained(config, programs, background_of(config, programs), settle_at=5)
    for mine, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-7)


def collectives(program: Any) -> list[Collective]:
    return list(read_hlo(program.as_text(), {"replica": 4, "stage": 1, "fsdp": 1, "tensor": 1}).collectives())


def test_no_program_of_the_devices_communicates_between_replicas():
    outer = OuterConfig(sync_every=2, delay=1, moments=1)
    config = dataclasses.replace(CONFIG, mesh=MeshConfig(replica=4), outer=outer)
    programs = programs_of(config)
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


def test_a_mesh_that_leaves_no_devices_for_exchanges_is_refused():
    config = dataclasses.replace(CONFIG, num_replicas=8, mesh=MeshConfig(replica=8))
    with pytest.raises(UserError, match="a CPU device for each device, and process 0 has too few"):
        host_mesh(make_mesh(config, jax.devices("cpu")))


def test_a_correction_is_waited_for_when_it_is_due_and_not_before():
    config = dataclasses.replace(CONFIG, mesh=MeshConfig(replica=4), outer=OuterConfig(sync_every=4, delay=3))
    programs = programs_of(config)
    sync, schedule = background_of(config, programs), schedule_of(config)
    assert schedule is not None
    state = programs.init(jax.random.key(0))
    waiting = []
    for step in range(1, 10):
        state, _ = sync.after_step(pushed(state, step), step, 1)
        waiting.append(len(sync._exchange.under_way))
    assert waiting == [0, 0, 0, 1, 1, 1, 0, 1, 1]
