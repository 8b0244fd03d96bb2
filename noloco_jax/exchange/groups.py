"""Averages over groups of replicas.

Both members of a pair send their whole message. In groups of n > 2, all of that size, every member owns a share of the
message: the others send it their part of that share, and it sends back the mean. That costs as much as a ring,
2 (n − 1)/n messages, in two rounds of messages instead of 2 (n − 1), and all members receive the same bits. The mean is
sent as float32. If the quantized message is so short that sending all of it to every member takes fewer bytes, that is
done instead.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from noloco_jax.exchange.axes import AxisName, ReplicaAxes, checked_axes, names_of, num_parts
from noloco_jax.exchange.blocks import cuts_or_last, tree_from_blocks, tree_in_blocks
from noloco_jax.exchange.buckets import bucketing, bucketing_over
from noloco_jax.exchange.modulo import Modulo
from noloco_jax.exchange.permute import permute
from noloco_jax.exchange.routes import lower
from noloco_jax.exchange.wire import Float32, Wire, bytes_of, from_code, to_code
from noloco_jax.outer.pairing import Pairing, largest_group
from noloco_jax.wires import goes_by_shares

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
        del num_replicas
        pairing = self._checked_pairing()
        each = bytes_of(lambda tree: self._to_each(tree, cuts, parts), message)
        in_all = [each * sum(len(group) * (len(group) - 1) for group in groups) for groups in pairing.pool]
        return lambda round: in_all[int(pairing.pool_index(round))]

    def _checked_pairing(self) -> Pairing:
        if self.pairing is None:
            raise ValueError(
                "noloco has no pairing, which only an Island does without: give RandomPairing(num_replicas)"
            )
        return self.pairing

    def _to_each(self, tree: PyTree, cuts: PyTree, parts: int) -> list[Any]:
        """Return the arrays that a member sends to each other member of its group, over both rounds of messages."""
        pairing = self._checked_pairing()
        wire, n = self.wire, largest_group(pairing)
        if isinstance(wire, Modulo):
            blocks = jax.tree.leaves(tree_in_blocks(tree, cuts))
            windows = [jnp.zeros((*x.shape[:-1], 1), jnp.uint8) for x in blocks]
            return [windows, list(map(wire.encode, blocks, windows))]
        blocks, kept_dims = to_code(wire, tree, cuts), int(wire.takes_blocks)
        if not _is_by_shares(pairing, wire):
            return list(map(wire.encode, jax.tree.leaves(blocks)))
        pack = jax.tree.leaves if parts > 1 else bucketing(blocks, kept_dims)[0]
        sent = []
        for x in pack(blocks):
            shares = _shares(x, n, kept_dims, parts)
            code = wire.encode(x if shares is None else shares[0][0])
            sent += [code] if shares is None else [code, wire.decode(code)]
        return sent


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
        self._is_by_shares = _is_by_shares(pairing, wire)
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
        if self._is_by_shares:
            shares = _shares(x, self._n, int(self._wire.takes_blocks), num_parts())
            if shares is not None:
                return self._mean_by_shares(x, *shares)
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

    def _mean_by_shares(self, x: jax.Array, shares: jax.Array, whole: Any) -> jax.Array:
        """Average over shares: `shares` is (n, ...), one share a member, and `whole` joins such an array again."""
        n, own, decode = self._n, self._position, self._wire.decode
        codes = jax.vmap(self._encoded)(shares)

        def code(member: jax.Array) -> jax.Array:
            return lax.dynamic_index_in_dim(codes, member % n, keepdims=False)

        mine = decode(code(own))
        # The member k places before this one receives its own share of this replica's message.
        others = [decode(self._from(k, code(own - k))) for k in range(1, n)]
        # Every share is summed in the order of members, so that the bits do not depend on how an array is cut.
        by_member = jnp.take(jnp.stack([mine, *others]), (lax.iota(jnp.int32, n) - own) % n, axis=0)
        mean = _mean_from(by_member[0], list(by_member[1:]), n)
        means = jnp.stack([mean, *(self._from(k, mean) for k in range(1, n))])  # of members own, own + 1, ...
        mean = whole(jnp.take(means, (lax.iota(jnp.int32, n) - own) % n, axis=0))
        return mean if self._wire.exact else x + (mean - whole(jax.vmap(decode)(codes))).astype(x.dtype)

    def _mean_of_all(self, x: jax.Array) -> jax.Array:
        """Average by sending whole messages to every member: for groups of unequal sizes, for arrays that have no n
        equal shares, and if that takes fewer bytes."""
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


def _is_by_shares(pairing: Pairing, wire: Wire) -> bool:
    """Return True if members average shares of the message instead of sending whole messages to every member."""
    n = largest_group(pairing)
    has_equal_sizes = all(len(group) == n for groups in pairing.pool for group in groups)
    return n > 2 and has_equal_sizes and goes_by_shares(wire.name, n)


def _shares(x: jax.Array, n: int, kept_dims: int, parts: int) -> tuple[jax.Array, Any] | None:
    """Split `x` into n equal shares (n, ...); return them and the function that joins them, or None if it cannot.

    The last `kept_dims` dimensions, a wire format's blocks, stay whole. An array that the partitioner may shard into
    `parts` is not raveled: it is cut along a dimension whose parts n divides, and a share takes every n-th element, so
    that the shares are sharded like the array. Without such a dimension there are no shares.
    """
    divided = x.ndim - kept_dims
    if parts == 1:
        flat = x.reshape(-1, *x.shape[divided:])
        padded = jnp.pad(flat, [(0, -len(flat) % n)] + [(0, 0)] * kept_dims)
        return padded.reshape(n, -1, *flat.shape[1:]), lambda shares: shares.reshape(padded.shape)[: len(flat)].reshape(
            x.shape
        )
    dims = [dim for by in (n * parts, n) for dim, size in enumerate(x.shape[:divided]) if size % by == 0]
    if not dims:
        return None
    dim = dims[0]
    cut = x.reshape(*x.shape[:dim], -1, n, *x.shape[dim + 1 :])
    return jnp.moveaxis(cut, dim + 1, 0), lambda shares: jnp.moveaxis(shares, 0, dim + 1).reshape(x.shape)


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
