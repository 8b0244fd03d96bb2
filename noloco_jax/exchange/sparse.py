"""Mean of sparse messages over all replicas: the largest entries of an array, two bits each, and their positions.

An array is cut into chunks of up to 4096 elements along the hidden dimension (`exchange.blocks`). The entries of
largest magnitude of a chunk are kept, each as a sign and one of the chunk's two magnitudes: the mean of the smaller and
the mean of the larger ones among them (zero and the mean of the nonzero ones, if fewer are nonzero than are kept). The
payload is these two magnitudes in bfloat16, the positions in 12 bits (8 in chunks of up to 256) and two bits an entry,
packed to bytes.

The paper's text specifies two bits an entry; the four values are this module's choice. It uses means, which minimize
the squared error.

Two replicas keep different entries, so every replica sends its message to all others: it is an all-gather.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from noloco_jax.exchange.axes import AxisName, ReplicaAxes, num_parts, warn_if_sharded
from noloco_jax.exchange.blocks import pack, tree_from_blocks, tree_in_blocks, unpack
from noloco_jax.exchange.buckets import bucketing_over
from noloco_jax.exchange.wire import bytes_of
from noloco_jax.wires import CHUNK, ENTRY_BITS, SIZE_BYTES, kept_of, position_bits

PyTree = Any


@dataclass(frozen=True)
class TopEntries:
    """Top-k sparsification Q(TOP-k(x)) and its wire format.

    Attributes:
      top_k: entries kept of a chunk of 4096; proportionally fewer of smaller chunks.
    """

    top_k: int

    def sparsify(self, tree: PyTree, cuts: PyTree = None) -> PyTree:
        """Quantize the largest entries of every chunk to two magnitudes, and set the others to zero.

        A chunk with a NaN keeps it and has NaN among its magnitudes.

        Raises:
          TypeError: if the arrays are not real.
        """
        chunks = tree_in_blocks(tree, cuts, CHUNK)
        return tree_from_blocks(jax.tree.map(self._sparsified, chunks), tree, cuts, CHUNK)

    def _sparsified(self, chunks: jax.Array) -> jax.Array:
        if not jnp.issubdtype(chunks.dtype, jnp.floating):
            raise TypeError(
                f"sparseloco rounds real numbers and the parameters hold {chunks.dtype}: use another method"
            )
        positions, values = self._largest(chunks)
        sizes = jnp.abs(values)
        least = jnp.min(sizes, axis=-1, keepdims=True)
        is_large = sizes > jnp.where(least == 0, 0, jnp.mean(sizes, axis=-1, keepdims=True))
        small, large = (_mean_of(sizes, which) for which in (~is_large, is_large))
        rounded = jnp.sign(values) * lax.reduce_precision(jnp.where(is_large, large, small), 8, 7)
        # The barrier makes the message and the remaining error use the same bits.
        return lax.optimization_barrier(_filled(chunks.shape, positions, rounded).astype(chunks.dtype))

    def encode(self, chunks: jax.Array) -> jax.Array:
        """Encode sparsified chunks (..., chunks, C), losslessly, as uint8 (..., chunks, bytes)."""
        positions, values = self._largest(chunks.astype(jnp.float32))
        sizes = jnp.abs(values)
        small, large = jnp.min(sizes, axis=-1, keepdims=True), jnp.max(sizes, axis=-1, keepdims=True)
        both = lax.bitcast_convert_type(jnp.concatenate([small, large], axis=-1), jnp.uint32) >> 16
        entries = (values < 0).astype(jnp.uint32) + 2 * (sizes > small).astype(jnp.uint32)
        bits = position_bits(chunks.shape[-1])
        parts = [pack(both, 16), pack(positions.astype(jnp.uint32), bits), pack(entries, ENTRY_BITS)]
        return jnp.concatenate(parts, axis=-1)

    def decode(self, code: jax.Array, size: int) -> jax.Array:
        """Return the encoded chunks, float32 (..., chunks, size)."""
        bits, kept = position_bits(size), kept_of(size, self.top_k)
        end = SIZE_BYTES + kept * bits // 8
        both = lax.bitcast_convert_type(unpack(code[..., :SIZE_BYTES], 16) << 16, jnp.float32)
        positions = unpack(code[..., SIZE_BYTES:end], bits).astype(jnp.int32)
        entries = unpack(code[..., end:], ENTRY_BITS)
        sizes = jnp.where(entries >= 2, both[..., 1:], both[..., :1])
        return _filled((*code.shape[:-1], size), positions, jnp.where(entries % 2 == 1, -sizes, sizes))

    def _largest(self, chunks: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return positions and values of the kept entries of every chunk."""
        kept, sizes = kept_of(chunks.shape[-1], self.top_k), jnp.abs(chunks)
        _, positions = lax.top_k(sizes, kept)
        return positions, jnp.take_along_axis(chunks, positions, axis=-1)


@dataclass(frozen=True)
class SparseExchange:
    """The mean over all replicas of messages sparsified by `entries`: an `outer.rule.Exchange`."""

    entries: TopEntries
    axis_name: AxisName

    def __call__(self, message: Any, round: Any, movement: PyTree, windows: PyTree, cuts: PyTree) -> tuple[Any, PyTree]:
        del round, movement
        return message._replace(sent=sparse_mean(message.sent, self.entries, self.axis_name, cuts)), windows

    def sent(self, message: PyTree, cuts: PyTree, num_replicas: int, parts: int) -> Callable[[int], int]:
        """See `outer.rule.Exchange`."""
        del parts
        each = bytes_of(lambda tree: jax.tree.map(self.entries.encode, tree_in_blocks(tree, cuts, CHUNK)), message)
        return lambda round: num_replicas * (num_replicas - 1) * each


def sparse_mean(tree: PyTree, entries: TopEntries, axis_name: AxisName, cuts: PyTree = None) -> PyTree:
    """Return the mean over all replicas of arrays sparsified by `entries`, bitwise equal on all of them.

    Args:
      tree: arrays of the replica, any shapes.
      entries: their wire format.
      axis_name: axes of the replicas.
      cuts: the dimension of every array along which its chunks lie; None: the last.
    """
    axes = ReplicaAxes.bound(axis_name)
    warn_if_sharded(tree, axes)
    chunks = tree_in_blocks(tree, cuts, CHUNK)
    codes = jax.tree.map(entries.encode, chunks)
    packed, unpacked = bucketing_over(axes, codes)
    of_all = [_gathered(bucket, axes) for bucket in packed(codes)]

    def sent_by(replica: Any) -> PyTree:
        sent = unpacked([code[replica] for code in of_all])
        sent = jax.tree.map(lambda code, x: entries.decode(code, x.shape[-1]).astype(x.dtype), sent, chunks)
        return tree_from_blocks(sent, tree, cuts, CHUNK)

    def plus(replica: Any, total: PyTree) -> PyTree:
        return jax.tree.map(jnp.add, total, sent_by(replica))

    # One after another, as a dense message is as large as the model.
    total = lax.fori_loop(1, axes.num_replicas, plus, sent_by(0))
    return jax.tree.map(lambda x: x / axes.num_replicas, total)


def _gathered(x: jax.Array, axes: ReplicaAxes) -> jax.Array:
    """Gather the arrays of all replicas, (N, ...)."""
    block = x[None] if axes.slot is None else lax.all_gather(x, axes.slot)  # under vmap this is the unbatched view
    if axes.num_devices == 1:
        return block
    if num_parts() == 1:
        return lax.all_gather(block, axes.device, tiled=True)
    return _gathered_in_a_ring(block, axes)


def _gathered_in_a_ring(block: jax.Array, axes: ReplicaAxes) -> jax.Array:
    """Gather all devices' blocks by a ring; for an all-gather the partitioner would first unshard every block."""
    number = axes.num_devices
    ring = [(device, (device + 1) % number) for device in range(number)]

    def pass_on(held: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        held = lax.ppermute(held, axes.device, ring)
        return held, held

    _, others = lax.scan(pass_on, block, length=number - 1)
    blocks = jnp.concatenate([block[None], others])  # from this device, the one before it, the one before that, ...
    blocks = jnp.take(blocks, (lax.axis_index(axes.device) - jnp.arange(number)) % number, axis=0)
    return blocks.reshape(-1, *block.shape[1:])


def _mean_of(sizes: jax.Array, which: jax.Array) -> jax.Array:
    """Return the mean of a row's chosen sizes (..., 1); 0 of none, where a NaN would stop `jax_debug_nans`."""
    number = jnp.sum(which, axis=-1, keepdims=True, dtype=sizes.dtype)
    return jnp.sum(sizes, axis=-1, keepdims=True, where=which) / jnp.maximum(number, 1)


def _filled(shape: tuple[int, ...], positions: jax.Array, values: jax.Array) -> jax.Array:
    """Return chunks of that shape that are zero except for the values at the given positions."""

    def fill(row: jax.Array, places: jax.Array, entries: jax.Array) -> jax.Array:
        return row.at[places].set(entries, unique_indices=True)

    for _ in range(len(shape) - 1):  # by vmap over chunks, so that the partitioner sees that they are independent
        fill = jax.vmap(fill)
    return fill(jnp.zeros(shape, values.dtype), positions, values)
