"""Averages over groups of replicas: the only place where replicas of a model communicate their weights.

Replicas live on one named axis (a mesh axis inside `shard_map`, or a `vmap` axis), or, several to a device, on a pair
of axes (mesh axis, vmap axis): replica i = device · L + slot with L slots a device.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree

from noloco_jax.exchange.routes import NOWHERE, Pattern, Routes, lower
from noloco_jax.outer.pairing import Pairing

AxisName = str | tuple[str, str]
PyTree = Any


def all_mean(tree: PyTree, axis_name: AxisName) -> PyTree:
    """The mean over all replicas: an all-reduce. What NoLoCo avoids; DiLoCo's outer step, and every step of ddp."""
    for name in reversed(_names(axis_name)):
        if lax.axis_size(name) > 1:  # over one device XLA's partitioner refuses it beside axes that are left to it
            tree = lax.pmean(tree, name)
    return tree


def unbatched(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """`x`, equal on all replicas, as one value for those that `vmap` batches: `lax.cond` on it runs one side, not both.

    Over a `vmap` axis that is a maximum, which sends nothing; over a mesh axis every device decides by its own `x`.
    """
    mesh_axes = jax.sharding.get_abstract_mesh().manual_axes
    vmap_axes = tuple(name for name in _names(axis_name) if name not in mesh_axes)
    return lax.pmax(x, vmap_axes) if vmap_axes else x


def group_mean(
    tree: PyTree,
    pairing: Pairing,
    index: jax.Array,
    axis_name: AxisName,
    wire_dtype: jax.typing.DTypeLike | None = None,
) -> PyTree:
    """The mean of every replica's tree over its group in entry `index` of the pairing's pool.

    One message of the tree's size goes to each other member of the group, over `lax.ppermute`; which one is decided at
    run time, by a `lax.switch` over the pool. `index` must be the same on every replica and not batched by `vmap`
    (`unbatched` sees to it), which would run every branch. The message is one array, unless the partitioner shards the
    tree over further mesh axes: then it is one an array of the tree.

    Args:
      tree: arrays of the replica, any shapes, of one dtype.
      pairing: the pool. Its number of replicas must be that of the axes.
      index: int32 scalar.
      axis_name: where the replicas live.
      wire_dtype: what the others' values are rounded to on their way, a replica's own are not. None: not at all.

    Raises:
      ValueError: if the axes hold another number of replicas than the pairing.
    """
    num_devices, num_slots = _axis_sizes(axis_name)
    if num_devices * num_slots != pairing.num_replicas:
        raise ValueError(
            f"the pairing is of {pairing.num_replicas} replicas, axis {axis_name!r} holds {num_devices * num_slots}: "
            "make the two equal"
        )
    sizes, sources = _partners(pairing)
    group_size = sizes.max()
    message, restore = _pack(tree, wire_dtype, num_devices)
    total = tree
    for k in range(1, group_size):
        received = restore(_permute(message, lower(sources[:, k - 1], num_devices, num_slots), index, axis_name))
        if (sizes > k).all():
            total = jax.tree.map(jnp.add, total, received)
        else:
            live = _lookup(sizes > k, index, axis_name)
            total = jax.tree.map(lambda t, r, live=live: jnp.where(live, t + r, t), total, received)
    if (sizes == group_size).all():
        return jax.tree.map(lambda t: t / group_size, total)
    size = _lookup(sizes, index, axis_name)
    return jax.tree.map(lambda t: t / size.astype(t.dtype), total)


def _pack(
    tree: PyTree, wire_dtype: jax.typing.DTypeLike | None, num_devices: int
) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """What to send, and how to undo that: one vector, where something is sent and laying arrays end to end is free."""
    mesh = jax.sharding.get_abstract_mesh()
    sharded = any(mesh.shape[name] > 1 for name in mesh.axis_names if name not in mesh.manual_axes)
    message, restore = (tree, lambda received: received) if sharded or num_devices == 1 else ravel_pytree(tree)
    if wire_dtype is None:
        return message, restore
    # As bits: a backend that has no messages of this type, like the CPU, would widen them to float32.
    bits = jnp.dtype(f"uint{8 * jnp.dtype(wire_dtype).itemsize}")
    message = jax.tree.map(lambda x: lax.bitcast_convert_type(x.astype(wire_dtype), bits), message)
    dtype = jax.tree.leaves(tree)[0].dtype
    return message, lambda received: restore(
        jax.tree.map(lambda x: lax.bitcast_convert_type(x, wire_dtype).astype(dtype), received)
    )


def _names(axis_name: AxisName) -> tuple[str, ...]:
    return (axis_name,) if isinstance(axis_name, str) else axis_name


def _axis_sizes(axis_name: AxisName) -> tuple[int, int]:
    if isinstance(axis_name, str):
        return lax.axis_size(axis_name), 1
    device_axis, slot_axis = axis_name
    return lax.axis_size(device_axis), lax.axis_size(slot_axis)


def _partners(pairing: Pairing) -> tuple[np.ndarray, np.ndarray]:
    """Group sizes (pool, N), and the replica that each receives from at shift k = 1.. within its group (pool, k, N).

    Members of a group smaller than the shift receive from themselves, to be left out by the caller.
    """
    pool, n = pairing.pool, pairing.num_replicas
    largest = max(len(group) for round_ in pool for group in round_)
    sizes = np.zeros((len(pool), n), np.int32)
    sources = np.tile(np.arange(n, dtype=np.int32), (len(pool), max(largest - 1, 1), 1))
    for p, round_ in enumerate(pool):
        for group in round_:
            sizes[p, list(group)] = len(group)
            for k in range(1, len(group)):
                for position, replica in enumerate(group):
                    sources[p, k - 1, replica] = group[(position + k) % len(group)]
    return sizes, sources


def _lookup(table: np.ndarray, index: jax.Array, axis_name: AxisName) -> jax.Array:
    """This replica's entry of a (pool, N) table."""
    if isinstance(axis_name, str):
        replica = lax.axis_index(axis_name)
    else:
        replica = lax.axis_index(axis_name[0]) * lax.axis_size(axis_name[1]) + lax.axis_index(axis_name[1])
    return jnp.asarray(table)[index, replica]


def permute_blocks(tree: PyTree, routes: Routes, index: jax.Array, device_axis: str | tuple[str, ...]) -> PyTree:
    """Every slot of every device receives from its source under entry `index` of the routes.

    Args:
      tree: arrays (L, ...), the slots of this device in front.
      routes: where they go. What a device without destination holds is not sent; who has no source receives zeros.
      index: int32 scalar, the same on all devices.
      device_axis: the mesh axis, or the axes in the order in which devices are numbered.
    """
    received, positions_L = _deliver(tree, routes, index, device_axis)
    return _rows(received, positions_L) if routes.num_slots > 1 else received


def _permute(tree: PyTree, routes: Routes, index: jax.Array, axis_name: AxisName) -> PyTree:
    """Every replica receives the tree of its source under entry `index` of the routes."""
    if isinstance(axis_name, str):
        return _send(tree, routes, index, axis_name)
    device_axis, slot_axis = axis_name
    if routes.num_slots == 1:
        return _send(tree, routes, index, device_axis)
    # The block of a device's replicas as one array: under vmap an all_gather is only the unbatched view.
    received, positions_L = _deliver(lax.all_gather(tree, slot_axis), routes, index, device_axis)
    return _rows(received, positions_L[lax.axis_index(slot_axis)])


def _deliver(block: PyTree, routes: Routes, index: jax.Array, device_axis) -> tuple[PyTree, jax.Array]:
    """What arrives at this device, and at which position each of its slots finds its own (L,)."""
    if routes.num_devices == 1:
        return block, jnp.asarray(routes.receive)[index, 0]
    device = lax.axis_index(device_axis)
    if routes.num_slots > 1:
        outgoing_L = jnp.asarray(routes.send)[index, device]
        block = _rows(block, outgoing_L)
    return _send(block, routes, index, device_axis), jnp.asarray(routes.receive)[index, device]


def _rows(tree: PyTree, index: jax.Array) -> PyTree:
    """Of every array the given rows. `x[index]` would want 64 bits for a vector of all parameters of a large model."""
    return jax.tree.map(lambda x: jnp.take(x, index, axis=0, mode="clip"), tree)


def _send(tree: PyTree, routes: Routes, index: jax.Array, device_axis: str | tuple[str, ...]) -> PyTree:
    """Sends blocks between devices along the pattern of entry `index`."""
    branches: Sequence[Callable[[PyTree], PyTree]] = [
        lambda t, pattern=pattern: jax.tree.map(lambda x: _send_array(x, pattern, routes.num_slots, device_axis), t)
        for pattern in routes.patterns
    ]
    if len(branches) == 1:
        return branches[0](tree)
    return lax.switch(jnp.asarray(routes.pattern_of)[index], branches, tree)


def _send_array(x: jax.Array, pattern: Pattern, num_slots: int, device_axis: str | tuple[str, ...]) -> jax.Array:
    """`x` is one replica's array if a device holds one, else the block (slots, ...) in the order of `Routes.send`."""
    parts, start = [], 0
    for destinations, count in pattern:
        part = x if count == num_slots else lax.slice_in_dim(x, start, start + count)
        start += count
        if any(source != destination for source, destination in enumerate(destinations)):
            pairs = [(source, destination) for source, destination in enumerate(destinations) if destination != NOWHERE]
            part = lax.ppermute(part, device_axis, pairs)
        parts.append(part)
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)
