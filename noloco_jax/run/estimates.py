"""The memory that a run will need, from its configuration and the shapes of its arrays."""

from typing import Any

import jax
import numpy as np

from noloco_jax.config import TrainConfig
from noloco_jax.spmd.programs import Programs

PyTree = Any


def memory_estimate(config: TrainConfig, programs: Programs) -> tuple[int, int]:
    """Bytes on one device: of the state and the gradients, and (roughly) of what the backward pass keeps."""

    def on_one_device(tree: PyTree) -> int:
        leaves = jax.tree.leaves(tree)
        return sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in leaves)

    state = programs.state._replace(outer=None) if config.outer.offload else programs.state
    held = on_one_device(state) + on_one_device(programs.state.params)
    model, data, shape = config.model, config.data, programs.mesh.shape
    width = {"float32": 4, "bfloat16": 2}[model.dtype]
    everything = 10 * model.hidden_size + 4 * model.intermediate_size
    kept = {"none": everything, "dots": 6 * model.hidden_size, "full": 0, "stage": 0}
    kept_a_token = model.num_layers * (kept[model.remat] + model.hidden_size) * width
    logits = 4 * min(data.batch_size * data.sequence_length * model.vocab_size, 2**26)
    tokens = data.batch_size // config.num_microbatches * data.sequence_length
    return held, (tokens * kept_a_token // shape["stage"] + logits) // shape["fsdp"] // shape["tensor"]
