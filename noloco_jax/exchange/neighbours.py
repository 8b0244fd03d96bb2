"""Averages over a replica and its senders in a directed graph."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from noloco_jax.exchange.axes import AxisName, checked_axes
from noloco_jax.exchange.buckets import bucketing_over
from noloco_jax.exchange.permute import permute
from noloco_jax.exchange.routes import lower
from noloco_jax.exchange.wire import Wire, bytes_of, from_code, to_code
from noloco_jax.outer.neighbours import RandomNeighbours

PyTree = Any


@dataclass(frozen=True)
class NeighbourExchange:
    """The mean over a replica and its senders, in a wire format: an `outer.rule.Exchange`."""

    neighbours: RandomNeighbours
    wire: Wire
    axis_name: AxisName

    def __call__(
        self, message: PyTree, round: Any, movement: PyTree, windows: PyTree, cuts: PyTree
    ) -> tuple[PyTree, PyTree]:
        del movement
        index = self.neighbours.pool_index(round)
        return neighbour_mean(message, self.neighbours, index, self.axis_name, self.wire, cuts), windows

    def sent(self, message: PyTree, cuts: PyTree, num_replicas: int, parts: int) -> Callable[[int], int]:
        """See `outer.rule.Exchange`."""
        del parts
        each = bytes_of(lambda tree: jax.tree.map(self.wire.encode, to_code(self.wire, tree, cuts)), message)
        return lambda round: num_replicas * self.neighbours.degree * each


def neighbour_mean(
    tree: PyTree,
    neighbours: RandomNeighbours,
    index: jax.Array,
    axis_name: AxisName,
    wire: Wire,
    cuts: PyTree = None,
) -> PyTree:
    """Return x_i + Σ (Q(x_j) − Q(x_i)) / (s + 1) over the s senders j of replica i in graph `index`.

    With an exact wire format this is the mean over i and its senders. Since every replica has as many receivers as
    senders, the replicas' mean does not change; equal replicas stay equal.

    Args:
      tree: arrays of the replica, any shapes.
      neighbours: the graphs. Their number of replicas must be that of the axes.
      index: int32 scalar, equal on every replica and not batched by `vmap`.
      axis_name: axes of the replicas.
      wire: wire format of the values.
      cuts: the dimension of every array along which the wire format's blocks lie; None: the last.

    Raises:
      ValueError: if the axes hold another number of replicas than the graphs.
    """
    axes = checked_axes(tree, axis_name, "the neighbours are", neighbours.num_replicas)
    if neighbours.num_replicas == 1:
        return tree
    sources = neighbours.sources()
    routes = [lower(sources[:, k], axes.num_devices, axes.num_slots) for k in range(neighbours.degree)]

    def mean(x: jax.Array) -> jax.Array:
        # The sender must decode exactly what it sends: without the barrier a compiler may round twice, differently.
        code = x if wire.exact else lax.optimization_barrier(wire.encode(x))
        own = wire.decode(code)
        differences = [wire.decode(permute(code, route, index, axes)) - own for route in routes]
        return x + (functools.reduce(jnp.add, differences) / (neighbours.degree + 1)).astype(x.dtype)

    blocks = to_code(wire, tree, cuts)
    pack, unpack = bucketing_over(axes, blocks, int(wire.takes_blocks))
    return from_code(wire, unpack([mean(bucket) for bucket in pack(blocks)]), tree, cuts)
