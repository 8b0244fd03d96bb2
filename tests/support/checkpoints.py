"""Checkpoints of random states of a tiny model, saved and opened as a run does."""

import functools
from pathlib import Path

import jax
import numpy as np

from noloco_jax.checkpoint.store import Checkpointer
from noloco_jax.config import DataConfig, InnerConfig, MeshConfig, ModelConfig, TrainConfig
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.programs import Programs, TrainState, build_programs
from support import tiny_model

CONFIG = TrainConfig(
    num_replicas=4,
    model=ModelConfig(kind=tiny_model.KIND, hidden_size=16, intermediate_size=32, num_layers=2, vocab_size=32),
    inner=InnerConfig(warmup_steps=1),
    data=DataConfig(sequence_length=8, batch_size=2),
    mesh=MeshConfig(replica=1),
)


@functools.cache
def programs_of(config: TrainConfig) -> Programs:
    sizes = [config.mesh.replica, config.mesh.stage, config.mesh.fsdp, config.mesh.tensor]
    return build_programs(config, make_mesh(config, jax.devices()[: int(np.prod(sizes))]))


def random_state(like: TrainState) -> TrainState:
    rng = np.random.default_rng(0)

    def draw(x: jax.ShapeDtypeStruct) -> jax.Array:
        values = rng.normal(size=x.shape) if np.issubdtype(x.dtype, np.floating) else np.full(x.shape, 7)
        return jax.device_put(values.astype(x.dtype), x.sharding)

    return jax.tree.map(draw, like)


def position(replica: int, num_replicas: int) -> dict:
    """Return a data position in the form that a stream reports."""
    shard = [0, replica, num_replicas, 10 + replica, 0, 1 << 16, 3, []]
    positions = {"data": {"epoch": 0, "shards": [shard]}}
    of = {"replica": replica, "num_replicas": num_replicas, "source": {"files": 4}}
    return of | {"drawn": 0, "positions": positions}


def positions(num_replicas: int) -> dict[int, dict]:
    return {replica: position(replica, num_replicas) for replica in range(num_replicas)}


def saved(workdir: Path, config: TrainConfig, step: int = 3) -> TrainState:
    """Save a random state and return it."""
    state = random_state(programs_of(config).state)
    with Checkpointer(workdir, config) as checkpoints:
        checkpoints.save(step, state, positions(config.num_replicas))
    return state
