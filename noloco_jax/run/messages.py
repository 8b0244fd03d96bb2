"""What the replicas of a run send to each other, as its method has it: how often, how many bytes, in which pairings."""

import math

import jax

from noloco_jax.config import TrainConfig
from noloco_jax.methods import meetings_of, method_of
from noloco_jax.model.llama import param_shapes


def bytes_sent(config: TrainConfig) -> int:
    """Bytes that a replica sends at an outer step (for ddp: at every step), an all-reduce counted as a ring."""
    fragments = config.outer.fragments if method_of(config).has_outer_steps else 1
    sizes = [math.prod(leaf.shape) // fragments for leaf in jax.tree.leaves(param_shapes(config.model))]
    return method_of(config).bytes_sent(config, sizes)


def total_bytes_sent(config: TrainConfig) -> int:
    """Bytes that a replica sends in the whole run, an all-reduce counted as a ring."""
    times = config.num_steps if method_of(config).averages_gradients else num_outer_steps(config)
    return times * bytes_sent(config)


def num_outer_steps(config: TrainConfig) -> int:
    """Outer steps of the whole run; 0 for methods without."""
    meetings = meetings_of(config)
    return meetings.total(config.num_steps) if meetings else 0


def num_pairings(config: TrainConfig) -> int:
    """Partitions of the replicas into groups that outer steps draw from; 0 for methods that draw none."""
    pairing = method_of(config).pairing
    return len(pairing(config).pool) if pairing else 0
