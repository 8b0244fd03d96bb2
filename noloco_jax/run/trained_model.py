"""One model's weights from a run's newest checkpoint."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from noloco_jax.config import TrainConfig, load_saved
from noloco_jax.data import Tokenizer
from noloco_jax.errors import UserError
from noloco_jax.run.checkpoint import Checkpointer
from noloco_jax.storage.local_copies import named

PyTree = Any


def load_for_export(
    workdir: str | Path, replica: int | None = None, tokenizer: Tokenizer | None = None
) -> tuple[TrainConfig, PyTree]:
    """Load the configuration and one model's weights from a run's newest checkpoint; the run may be training.

    Args:
      workdir: the run's folder.
      replica: number of the replica; None: the merged model, the plain mean of all.
      tokenizer: the tokenizer to use with the model, which must be the run's; None: unchecked.

    Returns:
      The run's configuration, and parameters without a replica axis as numpy arrays, to be put on devices by the
      caller. One array of all replicas is read at a time, which Orbax may hold twice while it decodes it.

    Raises:
      UserError: if there is no checkpoint, or no such replica, or the tokenizer differs.
    """
    config = load_saved(workdir)
    checkpointer = Checkpointer(workdir, config, read_only=True)

    def read(step: int | None) -> PyTree:
        if step is None:
            raise UserError(f"{named(Path(workdir))} holds no checkpoint: train first, or give another folder")
        if tokenizer is not None:
            checkpointer.check_tokenizer(step, tokenizer)
        num_replicas = checkpointer.saved_shape(step).num_replicas
        if replica is not None and not 0 <= replica < num_replicas:
            raise UserError(f"replica {replica} does not exist: the run has 0 to {num_replicas - 1}")
        return checkpointer.restore_params(step, one)

    def one(x: np.ndarray) -> np.ndarray:
        if replica is not None:
            return x[[replica]]  # a copy, since a slice would keep the others in memory
        return x.mean(axis=0, dtype=np.float32, keepdims=True).astype(x.dtype, copy=False)

    params = checkpointer.read_newest(read)
    checkpointer.close()
    return config, jax.tree.map(lambda x: x[0], params)
