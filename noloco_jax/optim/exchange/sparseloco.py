"""SparseLoCo (arXiv 2508.15706): its rule with error feedback, and the mean of sparse messages over all replicas.

An array is cut into chunks of up to 4096 elements along the hidden dimension (`exchange.blocks`). The entries of
largest magnitude of a chunk are kept, each as a sign and one of the chunk's two magnitudes: the mean of the smaller and
the mean of the larger ones among them (zero and the mean of the nonzero ones, if fewer are nonzero than are kept). The
payload is these two magnitudes in bfloat16, the positions in 12 bits (8 in chunks of up to 256) and two bits an entry,
packed to bytes.

The paper's text specifies two bits an entry; the four values are this module's choice. It uses means, which minimize
the squared error.

Two replicas keep different entries, so every replica sends its message to all others: it is an all-gather.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from noloco_jax.optim.exchange.axes import AxisName, ReplicaAxes, by_parts, num_parts, warn_if_sharded
from noloco_jax.optim.exchange.blocks import pack, smallest_and_largest, tree_from_blocks, tree_in_blocks, unpack
from noloco_jax.optim.exchange.permute import bucketed
from noloco_jax.optim.fragments import Fragments
from noloco_jax.optim.outer_step import Exchange
from noloco_jax.optim.rule import Number, Outgoing, at
from noloco_jax.optim.wire_sizes import CHUNK, ENTRY_BITS, SIZE_BYTES, kept_of, position_bits

PyTree = Any


class Feedback(NamedTuple):
    """State of the rule, trees of the parameters' shapes.

    Attributes:
      slow: φ, the weights after the last outer step, equal on all replicas.
      error: e, the error feedback not sent yet.
    """

    slow: PyTree
    error: PyTree


class Sparse(NamedTuple):
    """Result of the exchange: mean(Δ̂), and the own Δ̂ = Q(TOP-k(e))."""

    mean: PyTree
    own: PyTree


@dataclass(frozen=True)
class SparseLoCo:
    """e ← βe + Δ with Δ = θ − φ; Δ̂ = Q(TOP-k(e)); e ← e − Δ̂; φ ← φ + α mean(Δ̂); θ ← φ (Algorithm 1).

    The paper's Δ is φ − θ, which it subtracts. The error takes the place of an outer momentum. The methods are those of
    `rule.Rule`, without a local step.

    Attributes:
      alpha, beta: the outer learning rate α and the decay of the error β.
    """

    alpha: Number
    beta: Number

    def init(self, params: PyTree) -> Feedback:
        """Return slow weights equal to the parameters, in copies, and no error."""
        slow = jax.tree.map(lambda p: jnp.array(p, jnp.float32, copy=True), params)
        return Feedback(slow, jax.tree.map(jnp.zeros_like, slow))

    def message(self, state: Feedback, theta: PyTree, k: Any) -> PyTree:
        """Return e ← βe + Δ."""
        beta = at(self.beta, k)
        return jax.tree.map(lambda e, th, phi: beta * e + (th - phi), state.error, theta, state.slow)

    def movement(self, state: Feedback, theta: PyTree, k: Any) -> PyTree:
        """Return |Δ|."""
        return jax.tree.map(lambda th, phi: jnp.abs(th - phi), theta, state.slow)

    def receive(self, state: Feedback, message: PyTree, mean: Sparse, k: Any) -> tuple[PyTree, Feedback]:
        """φ ← φ + α mean(Δ̂); θ ← φ; e ← e − Δ̂."""
        alpha = at(self.alpha, k)
        slow = jax.tree.map(lambda phi, x: phi + alpha * x, state.slow, mean.mean)
        return slow, Feedback(slow, jax.tree.map(jnp.subtract, message, mean.own))


@dataclass(frozen=True)
class SparseExchange(Exchange):
    """The mean over all replicas of sparse messages. All receive the same bits.

    Attributes:
      top_k: entries kept of a chunk of 4096; proportionally fewer of smaller chunks.
      axis_name: axes of the replicas.
    """

    top_k: int
    axis_name: AxisName

    def mean(self, outgoing: Outgoing, number: Any, fragments: Fragments) -> tuple[Sparse, None]:
        """Return the means of Q(TOP-k(message)), and the own one."""
        axes = ReplicaAxes.bound(self.axis_name)
        message, dims = outgoing.message, fragments.block_dims(outgoing.message)
        warn_if_sharded(message, axes)
        chunks = jax.tree.map(lambda x: sparsified(x, self.top_k), tree_in_blocks(message, dims, CHUNK))
        codes, structure = jax.tree.flatten(jax.tree.map(lambda x: encode(x, self.top_k), chunks))
        buffers, cut = bucketed(codes, axes)
        of_all = [_gathered(buffer, axes) for buffer in buffers]

        def sent_by(replica: Any) -> PyTree:
            sent = structure.unflatten(cut([of_one[replica] for of_one in of_all]))
            return jax.tree.map(lambda code, x: decode(code, x.shape[-1], self.top_k), sent, chunks)

        def plus(replica: Any, total: PyTree) -> PyTree:
            return jax.tree.map(jnp.add, total, sent_by(replica))

        # One after another, as a dense message is as large as the model.
        total = lax.fori_loop(1, axes.num_replicas, plus, sent_by(0))
        mean = jax.tree.map(lambda x: x / axes.num_replicas, total)
        return Sparse(*(tree_from_blocks(tree, message, dims, CHUNK) for tree in (mean, chunks))), None


def sparsified(chunks: jax.Array, top_k: int) -> jax.Array:
    """Quantize the largest entries of every chunk (..., C) to two magnitudes, and set the others to zero.

    All entries kept of a chunk with a NaN become NaN.
    """
    positions, values = _largest(chunks, top_k)
    sizes = jnp.abs(values)
    least, _ = smallest_and_largest(values)
    is_large = sizes > jnp.where(least == 0, 0, jnp.mean(sizes, axis=-1, keepdims=True))
    small, large = (_mean_of(sizes, which) for which in (~is_large, is_large))
    rounded = jnp.sign(values) * lax.reduce_precision(jnp.where(is_large, large, small), 8, 7)
    # The barrier makes the message and the remaining error use the same bits.
    return lax.optimization_barrier(_filled(chunks.shape, positions, rounded))


def encode(chunks: jax.Array, top_k: int) -> jax.Array:
    """Encode sparsified chunks (..., chunks, C), losslessly, as uint8 (..., chunks, bytes)."""
    positions, values = _largest(chunks, top_k)
    small, large = smallest_and_largest(values)
    both = lax.bitcast_convert_type(jnp.concatenate([small, large], axis=-1), jnp.uint32) >> 16
    entries = (values < 0).astype(jnp.uint32) + 2 * (jnp.abs(values) > small).astype(jnp.uint32)
    bits = position_bits(chunks.shape[-1])
    parts = [pack(both, 16), pack(positions.astype(jnp.uint32), bits), pack(entries, ENTRY_BITS)]
    return jnp.concatenate(parts, axis=-1)


def decode(code: jax.Array, size: int, top_k: int) -> jax.Array:
    """Return the encoded chunks, float32 (..., chunks, size)."""
    bits, kept = position_bits(size), kept_of(size, top_k)
    end = SIZE_BYTES + kept * bits // 8
    both = lax.bitcast_convert_type(unpack(code[..., :SIZE_BYTES], 16) << 16, jnp.float32)
    positions = unpack(code[..., SIZE_BYTES:end], bits).astype(jnp.int32)
    entries = unpack(code[..., end:], ENTRY_BITS)
    sizes = jnp.where(entries >= 2, both[..., 1:], both[..., :1])
    return _filled((*code.shape[:-1], size), positions, jnp.where(entries % 2 == 1, -sizes, sizes))


def _largest(chunks: jax.Array, top_k: int) -> tuple[jax.Array, jax.Array]:
    """Return positions and values of the kept entries of every chunk."""
    _, positions = lax.top_k(jnp.abs(chunks), kept_of(chunks.shape[-1], top_k))
    return positions, jnp.take_along_axis(chunks, positions, axis=-1)


def _gathered(x: jax.Array, axes: ReplicaAxes) -> jax.Array:
    """Gather the arrays of all replicas, (N, ...)."""
    block = x[None] if axes.slot is None else lax.all_gather(x, axes.slot)  # under vmap this is the unbatched view
    if axes.num_devices == 1:
        return block
    rows = block.reshape(len(block), -1)
    padded = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % num_parts())))
    gathered = by_parts(lambda part: lax.all_gather(part, axes.device, tiled=True), 1, 1)(padded)
    return gathered[:, : rows.shape[1]].reshape(-1, *x.shape)


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
