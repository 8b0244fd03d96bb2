"""Averages over a replica and those that send to it, in a directed graph."""

from typing import Any

import jax
from jax import lax

from noloco_jax.exchange.axes import AxisName, ReplicaAxes, num_parts, warn_if_sharded
from noloco_jax.exchange.buckets import packed
from noloco_jax.exchange.permute import permute
from noloco_jax.exchange.routes import lower
from noloco_jax.exchange.wire import Wire
from noloco_jax.outer.neighbours import RandomNeighbours
from noloco_jax.wires import block_of

PyTree = Any


def neighbour_mean(
    tree: PyTree, neighbours: RandomNeighbours, index: jax.Array, axis_name: AxisName, wire: Wire
) -> PyTree:
    """x_i + Σ (Q(x_j) − Q(x_i)) / (s + 1) over the s replicas j that send to i in graph `index`.

    For a wire that is exact this is the mean over i and them. As all send as often as they receive, the replicas' mean
    stays where it is; equal replicas stay equal.

    Args:
      tree: arrays of the replica, any shapes.
      neighbours: the graphs. Their number of replicas must be that of the axes.
      index: int32 scalar, equal on every replica and not batched by `vmap`.
      axis_name: where the replicas live.
      wire: the code in which values travel.

    Raises:
      ValueError: if the axes hold another number of replicas than the graphs.
    """
    axes = ReplicaAxes.bound(axis_name)
    if axes.num_devices * axes.num_slots != neighbours.num_replicas:
        raise ValueError(
            f"the neighbours are of {neighbours.num_replicas} replicas, axis {axis_name!r} holds "
            f"{axes.num_devices * axes.num_slots}: make the two equal"
        )
    if neighbours.num_replicas == 1:
        return tree
    warn_if_sharded(tree, axes)
    sources = neighbours.sources()
    routes = [lower(sources[:, k], axes.num_devices, axes.num_slots) for k in range(neighbours.degree)]

    def mean(x: jax.Array) -> jax.Array:
        # What is sent is what the sender decodes: behind a barrier, a compiler does not round twice and differently.
        code = x if wire.exact else lax.optimization_barrier(wire.encode(x))
        own = wire.decode(code, x)
        difference = sum(wire.decode(permute(code, route, index, axes), x) - own for route in routes)
        return x + difference / (neighbours.degree + 1)

    if axes.num_devices == 1 or num_parts() > 1:  # nothing is sent, or packing would exchange data inside a replica
        return jax.tree.map(mean, tree)
    buckets, unpack = packed(tree, block_of(wire.name))
    return unpack([mean(bucket) for bucket in buckets])
