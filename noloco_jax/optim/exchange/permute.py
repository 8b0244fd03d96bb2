"""Permutation of replicas' arrays by an entry of a compiled pool, chosen at run time.

A device may hold several replicas: a permutation of replicas is lowered to messages between devices first.
"""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from noloco_jax.optim.exchange.axes import ReplicaAxes, num_parts
from noloco_jax.optim.exchange.swap import move

PyTree = Any
# Float32 arrays of at least this many bytes travel alone, without a copy.
ALONE = 2**27
# One exchange between devices: a sequence of (destination of every device, number of replicas that each sends).
Pattern = tuple[tuple[tuple[int, ...], int], ...]


class Routes(NamedTuple):
    """Movement of blocks of replicas for each entry of a pool of permutations.

    Attributes:
      num_devices: D.
      num_slots: L replicas a device.
      patterns: the distinct exchanges between devices.
      pattern_of: (pool,) the pattern of each entry.
      send: (pool, D, L) the slots in the order in which a device sends them; in their own order when D is 1.
      receive: (pool, D, L) the position of each slot's data in the block that its device received.
    """

    num_devices: int
    num_slots: int
    patterns: tuple[Pattern, ...]
    pattern_of: np.ndarray
    send: np.ndarray
    receive: np.ndarray


def device_routes(sources: np.ndarray, num_devices: int, num_slots: int) -> Routes:
    """Compute the routes of permutations of N = D·L replicas, replica i in slot i mod L of device i // L.

    The numbers of replicas that go from one device to another form a D×D matrix whose rows and columns all sum to L, so
    it is a sum of permutation matrices (Birkhoff, König), each of which is one `move`. Permutations that move whole
    blocks of devices take a single one.

    Args:
      sources: int (pool, N), the replica that each replica receives from; each row a permutation.
      num_devices: D.
      num_slots: L.
    """
    return _device_routes(tuple(map(tuple, np.asarray(sources).tolist())), num_devices, num_slots)


@functools.cache
def _device_routes(sources: tuple[tuple[int, ...], ...], num_devices: int, num_slots: int) -> Routes:
    patterns: dict[Pattern, int] = {}
    pattern_of, send, receive = [], [], []
    for row in sources:
        pattern, row_send, row_receive = _lower_one(row, num_devices, num_slots)
        pattern_of.append(patterns.setdefault(pattern, len(patterns)))
        send.append(row_send)
        receive.append(row_receive)
    return Routes(
        num_devices,
        num_slots,
        tuple(patterns),
        np.array(pattern_of, np.int32),
        np.array(send, np.int32),
        np.array(receive, np.int32),
    )


def _lower_one(sources: tuple[int, ...], num_devices: int, num_slots: int) -> tuple[Pattern, np.ndarray, np.ndarray]:
    waiting: dict[tuple[int, int], list[tuple[int, int]]] = {}  # (device, device) -> [(slot, slot)] not yet sent
    counts = np.zeros((num_devices, num_devices), int)
    for replica, source in enumerate(sources):
        (there, slot_there), (here, slot_here) = divmod(source, num_slots), divmod(replica, num_slots)
        waiting.setdefault((there, here), []).append((slot_there, slot_here))
        counts[there, here] += 1
    for slots in waiting.values():
        slots.sort(
            reverse=True
        )  # popped in the order of the sending slots, so that one device keeps its block as it is
    pattern = []
    send = np.zeros((num_devices, num_slots), np.int32)
    receive = np.zeros((num_devices, num_slots), np.int32)
    start = 0
    while start < num_slots:
        if counts.diagonal().all():  # replicas that stay on their device need no message
            destinations = np.arange(num_devices)
        elif num_slots == 1 or num_devices == 2:  # the counts are a multiple of a permutation matrix already
            destinations = counts.argmax(axis=1)
        else:
            from scipy.optimize import linear_sum_assignment  # imported only here: it takes as long as importing jax

            _, destinations = linear_sum_assignment(np.where(counts > 0, -counts, num_devices * num_slots))
        count = int(counts[np.arange(num_devices), destinations].min())
        for device, destination in enumerate(destinations.tolist()):
            counts[device, destination] -= count
            for position in range(start, start + count):
                slot, slot_there = waiting[device, destination].pop()
                send[device, position] = slot
                receive[destination, slot_there] = position
        pattern.append((tuple(destinations.tolist()), count))
        start += count
    return tuple(pattern), send, receive


def permute(tree: PyTree, routes: Routes, index: jax.Array, axes: ReplicaAxes) -> PyTree:
    """Give every replica the tree of its source under entry `index` of the routes, in one buffer a message.

    Args:
      tree: arrays of one replica.
      routes: the pool of permutations, lowered to these axes.
      index: int32 scalar, equal on all replicas and not batched by `vmap`.
      axes: axes of the replicas.
    """
    leaves, structure = jax.tree.flatten(tree)
    buffers, cut = bucketed(leaves, axes)
    if axes.slot is None or routes.num_slots == 1:
        received = _send(buffers, routes, index, axes.device)
    else:  # over a `vmap` axis, all_gather costs nothing: it is the unbatched view of the device's replicas
        block, positions_L = _deliver(lax.all_gather(buffers, axes.slot), routes, index, axes.device)
        received = _rows(block, positions_L[lax.axis_index(axes.slot)])
    return structure.unflatten(cut(received))


def bucketed(leaves: list[Any], axes: ReplicaAxes, kept: int = 0) -> tuple[list[Any], Callable[[list[Any]], list[Any]]]:
    """Join arrays of one dtype, float32 arrays of `ALONE` bytes or more excepted.

    No bucket is made if nothing leaves the device, or if that would move data inside a replica that the partitioner
    shards.

    Args:
      leaves: arrays.
      axes: axes of the replicas.
      kept: trailing dimensions that are not raveled; arrays share a bucket if these are equal.

    Returns:
      The buffers, and a function that cuts others like them into arrays like the leaves.
    """
    groups: dict[Any, list[int]] = {}
    for i, x in enumerate(leaves):
        is_alone = x.dtype == jnp.float32 and x.size * x.dtype.itemsize >= ALONE
        is_apart = is_alone or axes.num_devices == 1 or num_parts() > 1
        groups.setdefault(i if is_apart else (x.dtype, x.shape[x.ndim - kept :]), []).append(i)

    def rows(x: jax.Array) -> jax.Array:
        return x.reshape(-1, *x.shape[x.ndim - kept :])

    def cut(buffers: list[Any]) -> list[Any]:
        pieces = list(leaves)
        for group, buffer in zip(groups.values(), buffers, strict=True):
            ends = np.cumsum([len(rows(leaves[i])) for i in group[:-1]])
            for i, piece in zip(group, jnp.split(buffer, ends) if len(group) > 1 else [buffer], strict=True):
                pieces[i] = piece.reshape(leaves[i].shape)
        return pieces

    members = ([leaves[i] for i in group] for group in groups.values())
    return [jnp.concatenate([*map(rows, some)]) if len(some) > 1 else some[0] for some in members], cut


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
        for x, received in zip(arrays, parts, strict=True):
            part = x if count == num_slots else lax.slice_in_dim(x, start, start + count)
            received.append(move(part, destinations, device_axes))
        start += count
    return [received[0] if len(received) == 1 else jnp.concatenate(received) for received in parts]
