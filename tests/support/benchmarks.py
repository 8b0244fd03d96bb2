"""The small runs that the tests of the benchmark measure."""

import os
import signal
import sys
from multiprocessing.connection import Connection

from noloco_jax.config import TrainConfig, from_dict
from noloco_jax.tools.bench import command

SMALL = {
    "num_replicas": 4,
    "model": {"hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1},
    "outer": {"sync_every": 4},
    "data": {"sequence_length": 8, "batch_size": 2},
    "mesh": {"replica": 2},
}
TINY = {"kind": "support.tiny_model:Tiny", "hidden_size": 16, "intermediate_size": 32, "num_layers": 1}


def small(**changes) -> TrainConfig:
    return from_dict(SMALL | changes)


def end_by_sigkill(sender: Connection) -> None:
    """Stand in for a measurement that the kernel ends, as for memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def threaded_modules_before_keeping_memory(sender: Connection) -> None:
    """Stand in for a measurement until it keeps freed memory; send the modules that start threads and are imported."""

    def keep() -> None:
        sender.send({"imported": [name for name in ("numpy", "jax", "pyarrow", "grain") if name in sys.modules]})
        os._exit(0)

    command.keep_freed_memory = keep
    command.start_measurement(sender)
