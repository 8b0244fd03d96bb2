"""The small runs that the tests of the benchmark measure."""

from noloco_jax.bench.options import Options
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
QUICK = Options(steps=3, data_seconds=0.05, compile_only=False, profile=None)


def small(**changes) -> TrainConfig:
    return from_dict(SMALL | changes)
