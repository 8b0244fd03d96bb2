"""The small runs that the tests of the benchmark measure."""

import os
import signal
from multiprocessing.connection import Connection

from noloco_jax.config import TrainConfig, from_dict
from support import tiny_model

SMALL = {
    "num_replicas": 4,
    "model": {"hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1},
    "outer": {"sync_every": 4},
    "data": {"sequence_length": 8, "batch_size": 2},
    "mesh": {"replica": 2},
}
TINY = {"kind": tiny_model.KIND, "hidden_size": 16, "intermediate_size": 32, "num_layers": 1}


def small(**changes) -> TrainConfig:
    return from_dict(SMALL | changes)


def end_by_sigkill(sender: Connection) -> None:
    """Stand in for a measurement that the kernel ends, as for memory."""
    os.kill(os.getpid(), signal.SIGKILL)
