"""Slow weights and outer momentum in host memory between outer steps."""

import dataclasses

import jax
import numpy as np
import pytest

from noloco_jax.config import DataConfig, MeshConfig, ModelConfig, OuterConfig, TrainConfig
from noloco_jax.spmd.compile import compile_programs
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.offload import from_host_memory
from noloco_jax.spmd.programs import build_programs
from support import tiny_model
from support.layouts import some_devices

CONFIG = TrainConfig(
    method="noloco",
    num_replicas=4,
    model=ModelConfig(kind=tiny_model.KIND, hidden_size=16, intermediate_size=32, num_layers=1, vocab_size=32),
    outer=OuterConfig(offload=True),
    data=DataConfig(sequence_length=8, batch_size=2),
)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_the_outer_state_is_in_host_memory_between_outer_steps(num_devices):
    config = dataclasses.replace(CONFIG, mesh=MeshConfig(replica=num_devices))
    programs = build_programs(config, make_mesh(config.mesh, config.num_replicas, some_devices(num_devices)))
    programs = compile_programs(programs, offload=True, only=["outer_step"])
    params, _, outer = programs.init(jax.random.key(0))
    for _ in range(2):
        assert {x.sharding.memory_kind for x in jax.tree.leaves(outer)} == {"pinned_host"}
        assert programs.outer_step is not None
        read = outer
        params, outer = programs.outer_step(params, read)
        assert all(x.is_deleted() for x in jax.tree.leaves(read))  # or the host would hold it twice
        assert {x.sharding.memory_kind for x in jax.tree.leaves(params)} == {jax.devices()[0].default_memory().kind}


def test_an_outer_step_that_cannot_start_leaves_the_state_as_it_was():
    config = dataclasses.replace(CONFIG, mesh=MeshConfig(replica=1))
    programs = build_programs(config, make_mesh(config.mesh, config.num_replicas, some_devices(1)))
    programs = compile_programs(programs, offload=True, only=[])
    params, _, outer = programs.init(jax.random.key(0))

    def out_of_memory(params, outer):
        raise MemoryError

    with pytest.raises(MemoryError):
        from_host_memory(out_of_memory, programs)(params, outer)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((params, outer)))
