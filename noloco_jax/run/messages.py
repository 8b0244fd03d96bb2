"""What the replicas of a run send to each other, as its method has it: how often, how many bytes, in which pairings."""

import jax.numpy as jnp

from noloco_jax.config.fields import TrainConfig
from noloco_jax.model.llama import num_params
from noloco_jax.spmd.inner import run_pairing

# method -> after what a replica sends to others; "" where it never does.
SENDS_EVERY = {"noloco": "outer step", "diloco": "outer step", "ddp": "step", "local": ""}


def bytes_sent(config: TrainConfig) -> int:
    """Bytes that a replica sends at an outer step (for ddp: at every step), an all-reduce counted as a ring."""
    numel = num_params(config.model)[0]
    ring = 2 * 4 * numel * (config.num_replicas - 1) // config.num_replicas
    message = numel * jnp.dtype(config.outer.wire_dtype).itemsize
    return {"noloco": message * (config.outer.group_size - 1), "diloco": ring, "ddp": ring, "local": 0}[config.method]


def total_bytes_sent(config: TrainConfig) -> int:
    """Bytes that a replica sends in the whole run, an all-reduce counted as a ring."""
    times = {"outer step": num_outer_steps(config), "step": config.num_steps, "": 0}
    return times[SENDS_EVERY[config.method]] * bytes_sent(config)


def num_outer_steps(config: TrainConfig) -> int:
    """Outer steps of the whole run; 0 for methods without."""
    return config.num_steps // config.outer.sync_every if SENDS_EVERY[config.method] == "outer step" else 0


def num_pairings(config: TrainConfig) -> int:
    """Partitions of the replicas into groups that outer steps draw from; 0 for methods that draw none."""
    return len(run_pairing(config).pool) if config.method == "noloco" else 0
