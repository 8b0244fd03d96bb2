"""The mesh and the model of the tests of what programs communicate."""

from noloco_jax.spmd.hlo import Collective, Traffic
from support import tiny_model

CUBE = {"a": 2, "b": 2, "c": 2}  # device 4a + 2b + c
MODEL = {"hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "num_kv_heads": 2, "vocab_size": 24}
TINY = {"kind": tiny_model.KIND, "hidden_size": 16, "intermediate_size": 32, "vocab_size": 24}


def numel(num_layers: int) -> int:
    """Parameters of `MODEL`."""
    return 2 * 24 * 16 + 16 + num_layers * (2 * 16 + 4 * 16 * 16 + 3 * 16 * 32)


def tiny_numel(num_layers: int) -> int:
    """Parameters of `TINY`."""
    return 2 * 24 * 16 + 16 + num_layers * 2 * 16 * 32


def only(traffic: Traffic) -> Collective:
    (collective,) = traffic.collectives()
    return collective
