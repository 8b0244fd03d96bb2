"""Permutation of replicas' arrays by an entry of a compiled pool, chosen at run time."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from noloco_jax.exchange.axes import ReplicaAxes
from noloco_jax.exchange.routes import NOWHERE, Pattern, Routes

PyTree = Any


def permute(tree: PyTree, routes: Routes, index: jax.Array, axes: ReplicaAxes) -> PyTree:
    """Give every replica the tree of its source under entry `index` of the routes.

    Args:
      tree: arrays of one replica.
      routes: the pool of permutations, lowered to these axes.
      index: int32 scalar, equal on all replicas and not batched by `vmap`.
      axes: axes of the replicas.
    """
    if axes.slot is None or routes.num_slots == 1:
        return _send(tree, routes, index, axes.device)
    # Over a `vmap` axis, all_gather costs nothing: it is the unbatched view of the device's replicas.
    received, positions_L = _deliver(lax.all_gather(tree, axes.slot), routes, index, axes.device)
    return _rows(received, positions_L[lax.axis_index(axes.slot)])


def permute_blocks(tree: PyTree, routes: Routes, index: jax.Array, device_axes: tuple[str, ...]) -> PyTree:
    """Give every slot of every device the arrays of its source under entry `index` of the routes.

    Args:
      tree: arrays (L, ...), the slots of this device in front.
      routes: the destinations. A device without a destination sends nothing; one without a source receives zeros.
      index: int32 scalar, equal on all devices.
      device_axes: the mesh axes in the order in which devices are numbered.
    """
    received, positions_L = _deliver(tree, routes, index, device_axes)
    return _rows(received, positions_L) if routes.num_slots > 1 else received


def _deliver(block: PyTree, routes: Routes, index: jax.Array, device_axes: tuple[str, ...]) -> tuple[PyTree, jax.Array]:
    """Return the block that arrives at this device, and the position of each slot's data in it (L,)."""
    if routes.num_devices == 1:
        return block, jnp.asarray(routes.receive)[index, 0]
    device = lax.axis_index(device_axes)
    if routes.num_slots > 1:
        outgoing_L = jnp.asarray(routes.send)[index, device]
        block = _rows(block, outgoing_L)
    return _send(block, routes, index, device_axes), jnp.asarray(routes.receive)[index, device]


def _rows(tree: PyTree, index: jax.Array) -> PyTree:
    """Take the given rows of every array. `x[index]` would need 64-bit indices for the arrays of a large model."""
    return jax.tree.map(lambda x: jnp.take(x, index, axis=0, mode="clip"), tree)


def _send(tree: PyTree, routes: Routes, index: jax.Array, device_axes: tuple[str, ...]) -> PyTree:
    """Send blocks between devices along the pattern of entry `index`."""
    arrays, structure = jax.tree.flatten(tree)
    branches = [partial(_send_along, pattern, routes.num_slots, device_axes) for pattern in routes.patterns]
    if len(branches) > 1:
        return structure.unflatten(lax.switch(jnp.asarray(routes.pattern_of)[index], branches, arrays))
    return structure.unflatten(branches[0](arrays))


def _send_along(pattern: Pattern, num_slots: int, device_axes: tuple[str, ...], arrays: list[Any]) -> list[Any]:
    """Send arrays: a replica's if a device holds one replica, else its blocks (L, ...) ordered by `Routes.send`."""
    parts: list[list[Any]] = [[] for _ in arrays]
    start = 0
    for destinations, count in pattern:
        pairs = [(source, destination) for source, destination in enumerate(destinations) if destination != NOWHERE]
        for x, received in zip(arrays, parts, strict=True):
            part = x if count == num_slots else lax.slice_in_dim(x, start, start + count)
            if any(source != destination for source, destination in enumerate(destinations)):
                part = lax.ppermute(part, device_axes, pairs)
            received.append(part)
        start += count
    return [received[0] if len(received) == 1 else jnp.concatenate(received) for received in parts]
