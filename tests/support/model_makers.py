"""Parameters and runs for tests, made without compiling anything."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from noloco_jax.checkpoint.store import Checkpointer
from noloco_jax.config import ModelConfig, TrainConfig, save_config
from noloco_jax.data import load_tokenizer
from noloco_jax.model import architecture
from noloco_jax.spmd.programs import TrainState


def random_params(config: ModelConfig, scale: float = 1.0) -> architecture.Params:
    """Numpy parameters, normal with deviation `scale`."""
    shapes = architecture.param_shapes(config)
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: (scale * rng.standard_normal(x.shape, np.float32)).astype(x.dtype), shapes)


def make_run(workdir: Path, config: TrainConfig, **facts: Any) -> list[architecture.Params]:
    """Write a run of one checkpoint with facts on its data, as the trainer does; return each replica's parameters."""
    replicas = [jax.tree.map(lambda leaf, by=by: leaf * by, random_params(config.model)) for by in (1, 3, -2, 6)]
    replicas = replicas[: config.num_replicas]
    save_config(config, workdir)
    checkpointer = Checkpointer(workdir, config)
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *replicas)
    state = TrainState(params=params, inner={"count": jnp.zeros(len(replicas))}, outer=None)
    facts = {"tokenizer": load_tokenizer(config.data.tokenizer).fingerprint} | facts
    checkpointer.save(7, state, {0: {"source": facts}})
    checkpointer.close()
    return replicas
