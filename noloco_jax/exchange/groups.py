"""Averages over groups of replicas.

Every member sends its whole message to every other member.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from noloco_jax.exchange.axes import AxisName, ReplicaAxes, checked_axes, names_of
from noloco_jax.exchange.blocks import cuts_or_last, tree_from_blocks, tree_in_blocks
from noloco_jax.exchange.buckets import bucketing_over
from noloco_jax.exchange.modulo import Modulo
from noloco_jax.exchange.permute import permute
from noloco_jax.exchange.routes import lower
from noloco_jax.exchange.wire import Float32, Wire, bytes_of, from_code, to_code
from noloco_jax.outer.pairing import Pairing, largest_group

PyTree = Any


@dataclass(frozen=True)
class AllExchange:
    """The mean over all replicas by an all-reduce: an `outer.rule.Exchange`."""

    axis_name: AxisName

    def __call__(
        self, message: PyTree, round: Any, movement: PyTree, windows: PyTree, cuts: PyTree
    ) -> tuple[PyTree, PyTree]:
        del round, movement, cuts
        return all_mean(message, self.axis_name), windows

    def sent(self, message: PyTree, cuts: PyTree, num_replicas: int, parts: int) -> Callable[[int], int]:
        """See `outer.rule.Exchange`."""
        del cuts, parts
        total = all_mean_bytes(message, num_replicas)
        return lambda round: total


@dataclass(frozen=True)
class GroupExchange:
    """The mean of a replica's group in a wire format: an `outer.rule.Exchange`.

    Attributes:
      pairing: the groups of every round; None for islands, whose exchange is elsewhere.
      wire: wire format of the messages; `Modulo` for pairs only.
      axis_name: axes of the replicas.
    """

    pairing: Pairing | None
    wire: Wire | Modulo
    axis_name: AxisName

    def __call__(
        self, message: PyTree, round: Any, movement: PyTree, windows: PyTree, cuts: PyTree
    ) -> tuple[PyTree, PyTree]:
        pairing = self._checked_pairing()
        meeting = message, pairing, pairing.pool_index(round), self.axis_name
        if isinstance(self.wire, Modulo):
            return pair_mean_in_windows(*meeting, self.wire, movement, windows, cuts)
        return group_mean(*meeting, self.wire, cuts), windows

    def sent(self, message: PyTree, cuts: PyTree, num_replicas: int, parts: int) -> Callable[[int], int]:
        """See `outer.rule.Exchange`."""
        del num_replicas, parts
        pairing = self._checked_pairing()
        each = bytes_of(lambda tree: self._to_each(tree, cuts), message)
        in_all = [each * sum(len(group) * (len(group) - 1) for group in groups) for groups in pairing.pool]
        return lambda round: in_all[int(pairing.pool_index(round))]

    def _checked_pairing(self) -> Pairing:
        if self.pairing is None:
            raise ValueError(
                "noloco has no pairing, which only an Island does without: give RandomPairing(num_replicas)"
            )
        return self.pairing

    def _to_each(self, tree: PyTree, cuts: PyTree) -> list[Any]:
        """Return the arrays that a member sends to each other member of its group."""
        wire = self.wire
        if isinstance(wire, Modulo):
            blocks = jax.tree.leaves(tree_in_blocks(tree, cuts))
            windows = [jnp.zeros((*x.shape[:-1], 1), jnp.uint8) for x in blocks]
            return [windows, list(map(wire.encode, blocks, windows))]
        return list(map(wire.encode, jax.tree.leaves(to_code(wire, tree, cuts))))


def all_mean_bytes(tree: PyTree, num_replicas: int) -> int:
    """Return the bytes that all replicas together send for the mean of such a tree by ring all-reduce."""
    return 2 * (num_replicas - 1) * bytes_of(lambda tree: tree, tree)


def all_mean(tree: PyTree, axis_name: AxisName) -> PyTree:
    """Return the mean over all replicas by an all-reduce, as in DiLoCo's outer step and every step of DDP."""
    for name in reversed(names_of(axis_name)):
        if lax.axis_size(name) > 1:  # XLA's partitioner refuses an all-reduce over one device beside auto axes
            tree = lax.pmean(tree, name)
    return tree


def group_mean(
    tree: PyTree,
    pairing: Pairing,
    index: jax.Array,
    axis_name: AxisName,
    wire: Wire | None = None,
    cuts: PyTree = None,
) -> PyTree:
    """Average every replica's tree over its group in entry `index` of the pairing's pool.

    Messages are sent by `lax.ppermute`; a `lax.switch` over the pool chooses the receivers at run time. With a lossy
    wire format a replica obtains x + mean(Q(x)) − Q(x), where its own value is quantized in the difference too.
    Replicas with equal values therefore keep them, the corrections of a pair are exactly opposite, and a replica keeps
    the part of its value that is below the format's resolution.

    Args:
      tree: arrays of the replica, any shapes.
      pairing: the pool. Its number of replicas must be that of the axes.
      index: int32 scalar, equal on every replica and not batched by `vmap`, since that would run every branch
        (`outer.transform.shared` unbatches it).
      axis_name: axes of the replicas.
      wire: wire format of the values; None: unchanged.
      cuts: the dimension of every array along which the wire format's blocks lie; None: the last.

    Raises:
      ValueError: if the axes hold another number of replicas than the pairing.
    """
    axes = checked_axes(tree, axis_name, "the pairing is", pairing.num_replicas)
    if largest_group(pairing) == 1:
        return tree
    wire = wire or Float32()
    meeting = _Meeting(pairing, index, axes, wire)
    blocks = to_code(wire, tree, cuts)
    pack, unpack = bucketing_over(axes, blocks, int(wire.takes_blocks))
    if meeting.is_of_exact_pairs:  # average array by array: the packed message need not be kept until the answer
        return jax.tree.map(meeting.mean_of_two, tree, unpack([meeting.other(bucket) for bucket in pack(tree)]))
    return from_code(wire, unpack([meeting.mean(bucket) for bucket in pack(blocks)]), tree, cuts)


def pair_mean_in_windows(
    tree: PyTree,
    pairing: Pairing,
    index: jax.Array,
    axis_name: AxisName,
    code: Modulo,
    movement: PyTree,
    remembered: PyTree,
    cuts: PyTree = None,
) -> tuple[PyTree, PyTree]:
    """Average pairs through the modulo wire format; return the means and the new windows of its blocks.

    Args:
      tree, pairing, index, axis_name, cuts: as for `group_mean`.
      code: the wire format.
      movement: a tree like `tree`, the movement of each value since its last exchange.
      remembered: windows of the blocks, uint8, a tree like `tree` with shapes `blocks.block_counts`; zeros initially.

    Raises:
      ValueError: as by `group_mean`.
      TypeError: if numbers are not real.
    """
    axes = checked_axes(tree, axis_name, "the pairing is", pairing.num_replicas)
    if largest_group(pairing) == 1:
        return tree, remembered
    meeting = _Meeting(pairing, index, axes, Float32())
    cuts = cuts_or_last(tree, cuts)
    blocks = tree_in_blocks(tree, cuts)
    pack, unpack = bucketing_over(axes, blocks, 1)
    moved = jax.tree.map(lambda x: jnp.max(jnp.abs(x), axis=-1, keepdims=True), tree_in_blocks(movement, cuts))
    remembered = jax.tree.map(lambda x, cut: jnp.moveaxis(x, cut, -1)[..., None], remembered, cuts)
    met = [meeting.mean_in_windows(code, *parts) for parts in zip(*map(pack, (blocks, moved, remembered)), strict=True)]
    means, remembered = (unpack([of_bucket[i] for of_bucket in met]) for i in range(2))
    return tree_from_blocks(means, tree, cuts), jax.tree.map(
        lambda x, cut: jnp.moveaxis(x[..., 0], -1, cut), remembered, cuts
    )


class _Meeting:
    """Averaging of arrays over this replica's group in one round of a pairing."""

    def __init__(self, pairing: Pairing, index: jax.Array, axes: ReplicaAxes, wire: Wire):
        self._index, self._axes, self._wire = index, axes, wire
        sizes, positions, sources = _tables(pairing)
        self._n = int(sizes.max())
        self._equal_sizes = bool((sizes == self._n).all())
        self._routes = [lower(sources[:, k], axes.num_devices, axes.num_slots) for k in range(self._n - 1)]
        replica = axes.replica()
        self._size = jnp.asarray(sizes)[index, replica]
        self._position = jnp.asarray(positions)[index, replica]

    @property
    def is_of_exact_pairs(self) -> bool:
        """Return True if all groups are pairs (or single replicas) and messages are not quantized."""
        return self._n == 2 and self._wire.exact

    def other(self, x: jax.Array) -> jax.Array:
        """Return the array of this replica's partner."""
        return self._from(1, x)

    def mean_of_two(self, x: jax.Array, other: jax.Array) -> jax.Array:
        """Return the mean of a pair's arrays; a replica without a partner keeps its own."""
        mean = (x + other) / 2
        return mean if self._equal_sizes else jnp.where(self._size == 2, mean, x)

    def mean_in_windows(
        self, code: Modulo, x: jax.Array, moved: jax.Array, remembered: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the mean of a pair's blocks through the modulo wire format, and the new windows of the blocks."""
        # The barriers, as in `_encoded`, make the sent and the locally used values one and the same rounding.
        windows = lax.optimization_barrier(code.windows(x, moved, remembered))
        windows = jnp.maximum(windows, self._from(1, windows))
        payload = lax.optimization_barrier(code.encode(x, windows))
        correction, remembered = code.correction(payload, self._from(1, payload), windows)
        mean = x + correction.astype(x.dtype)
        if self._equal_sizes:
            return mean, remembered
        return jnp.where(self._size == 2, mean, x), jnp.where(self._size == 2, remembered, windows)

    def mean(self, x: jax.Array) -> jax.Array:
        """Return the group's mean of an array, as this replica obtains it."""
        if self.is_of_exact_pairs:
            return self.mean_of_two(x, self.other(x))
        if self._n == 2:
            mean = self._mean_of_coded_pair(x)
            return mean if self._equal_sizes else jnp.where(self._size == 2, mean, x)
        return self._mean_of_all(x)

    def _from(self, k: int, tree: PyTree) -> PyTree:
        """Receive from the group member k places after this one."""
        return permute(tree, self._routes[k - 1], self._index, self._axes)

    def _encoded(self, x: jax.Array) -> jax.Array:
        # The sender must decode exactly what it sends: without the barrier a compiler may round twice, differently.
        return x if self._wire.exact else lax.optimization_barrier(self._wire.encode(x))

    def _mean_of_coded_pair(self, x: jax.Array) -> jax.Array:
        code = self._encoded(x)
        other = self._wire.decode(self._from(1, code))
        return x + ((other - self._wire.decode(code)) / 2).astype(x.dtype)

    def _mean_of_all(self, x: jax.Array) -> jax.Array:
        n, decode, code = self._n, self._wire.decode, self._encoded(x)
        by_place = jnp.stack([code, *(self._from(k, code) for k in range(1, n))])  # of members own, own + 1, ...
        # Unused from `_size` on.
        by_member = jnp.take(by_place, (lax.iota(jnp.int32, n) - self._position) % self._size, axis=0)
        first = decode(by_member[0])
        others = [jnp.where(member < self._size, decode(by_member[member]), first) for member in range(1, n)]
        mean = _mean_from(first, others, self._size.astype(first.dtype))  # in the same order on all members
        return mean if self._wire.exact else x + (mean - decode(code)).astype(x.dtype)


def _mean_from(one: jax.Array, others: Sequence[jax.Array], count: jax.Array | int) -> jax.Array:
    """Return the mean of `count` arrays as `one` plus the mean difference, so that equal arrays give exactly `one`.

    Sum / count may differ from it, since compilers turn a division by a constant into a multiplication by its rounded
    reciprocal.
    """
    return one + functools.reduce(jnp.add, [other - one for other in others]) / count


def _tables(pairing: Pairing) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return each replica's group size, its position there, and the members k = 1, 2, ... places after it.

    int32 (pool, N), (pool, N) and (pool, k, N). In groups of at most k members the source is the replica itself.
    """
    pool, n = pairing.pool, pairing.num_replicas
    sizes, positions = np.zeros((2, len(pool), n), np.int32)
    sources = np.tile(np.arange(n, dtype=np.int32), (len(pool), max(largest_group(pairing) - 1, 1), 1))
    for p, round_ in enumerate(pool):
        for group in round_:
            sizes[p, list(group)] = len(group)
            positions[p, list(group)] = range(len(group))
            for k in range(1, len(group)):
                for position, replica in enumerate(group):
                    sources[p, k - 1, replica] = group[(position + k) % len(group)]
    return sizes, positions, sources
