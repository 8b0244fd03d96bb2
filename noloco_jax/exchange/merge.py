"""Mean over all replicas by rounds of pairs, in which no replica waits for more than one other at a time."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from noloco_jax.exchange.axes import AxisName, ReplicaAxes
from noloco_jax.exchange.permute import permute
from noloco_jax.exchange.routes import lower
from noloco_jax.exchange.wire import bytes_of
from noloco_jax.outer.rule import compute_dtype, computed

PyTree = Any


class MergeRound(NamedTuple):
    """One round of messages, arrays (N,): each replica's partner (itself if it has none) and the two weights."""

    partner: np.ndarray
    own: np.ndarray
    other: np.ndarray


def merge_rounds(num_replicas: int) -> list[MergeRound]:
    """Return the rounds that bring every replica to the mean: log2 N, and two more if N is not a power of two.

    In round j replica i averages with i XOR 2^j, weighted by the number of replicas that each value already covers.
    Replicas beyond the largest power of two send their values to another one in a first round and receive the result
    in a last one.
    """
    replicas = np.arange(num_replicas)
    core = 1 << (num_replicas.bit_length() - 1)
    extra = num_replicas - core
    weight = np.where(replicas < extra, 2.0, 1.0)
    nearest = np.where(replicas >= core, replicas - core, np.where(replicas < extra, replicas + core, replicas))
    is_extra, alone = replicas >= core, nearest == replicas
    rounds = []
    if extra:
        half = np.where(alone | is_extra, 0.0, 0.5)
        rounds.append(MergeRound(nearest, 1 - half, half))
    for bit in range(core.bit_length() - 1):
        partner = np.where(is_extra, replicas, replicas ^ (1 << bit))
        total = weight + weight[partner]
        other = np.where(is_extra, 0.0, weight[partner] / total)
        rounds.append(MergeRound(partner, 1 - other, other))
        weight = np.where(is_extra, weight, total)
    if extra:
        taken = np.where(is_extra, 1.0, 0.0)
        rounds.append(MergeRound(nearest, 1 - taken, taken))
    return rounds


def merge_bytes(tree: PyTree, num_replicas: int) -> int:
    """Return the bytes that all replicas together send in `mean_by_pairs` of such a tree."""
    messages = sum(int(np.sum(round.partner != np.arange(num_replicas))) for round in merge_rounds(num_replicas))
    return messages * bytes_of(computed, tree)


def mean_by_pairs(tree: PyTree, axis_name: AxisName) -> PyTree:
    """Return the mean of all replicas' trees, in their dtypes; bitwise equal on all if N is a power of two.

    Args:
      tree: arrays of the replica, any shapes.
      axis_name: axes of the replicas.
    """
    axes = ReplicaAxes.bound(axis_name)
    replica = axes.replica()

    def mean(x: jax.Array) -> jax.Array:
        value = x.astype(compute_dtype(x.dtype))
        for partner, own, other in merge_rounds(axes.num_replicas):
            routes = lower(partner[None], axes.num_devices, axes.num_slots)
            received = permute(value, routes, jnp.int32(0), axes)
            own_weight, other_weight = (jnp.asarray(weight, value.dtype)[replica] for weight in (own, other))
            value = own_weight * value + other_weight * received
        return value.astype(x.dtype)

    return jax.tree.map(mean, tree)
