"""Parameters shared by a replica's pipeline stages: the vocabulary, sharded over them, and copies of the last norm.

Vocabulary parallelism (arXiv 2411.05288): V is padded to V' tokens, a multiple of 8 S, and each of the S stages holds
V'/S rows of the embedding and V'/S columns of the head. The tokens from V on are padding and stay zero: no position
looks them up, and no softmax counts them. The norm's weight is small, so every stage holds a copy.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

PyTree = Any
_VOCABULARY_AXIS = {"embed": -2, "head": -1}
_ON_EVERY_STAGE = "norm"


def padded_vocab_size(vocab_size: int, mesh_shape: Mapping[str, int]) -> int:
    """Return V', the padded vocabulary of a run on a mesh of this shape.

    With several stages it is also a multiple of the `tensor` devices that shard a stage's part. Each part is a multiple
    of 8, so that the blocks of a wire format lie as in whole tables (`wires.cut_of`).
    """
    if mesh_shape["stage"] == 1:
        return vocab_size
    multiple = 8 * mesh_shape["stage"] * mesh_shape["tensor"]
    return -(-vocab_size // multiple) * multiple


def resize_vocabulary(tree: PyTree, vocab_size: int) -> PyTree:
    """Pad with zeros, or cut, every embedding and head in a tree to `vocab_size` tokens; leave other arrays unchanged.

    Args:
      tree: parameters, or a state that holds dicts like them: moments, slow weights. Any leading axes.
      vocab_size: the new vocabulary size; only padding may be cut.
    """

    def resized(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        axis = _VOCABULARY_AXIS.get(getattr(path[-1], "key", ""))
        if axis is None or x.shape[axis] == vocab_size:
            return x
        if x.shape[axis] > vocab_size:
            return x[..., :vocab_size] if axis == -1 else x[..., :vocab_size, :]
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, vocab_size - x.shape[axis])
        return jnp.pad(x, widths)

    return jax.tree.map_with_path(resized, tree)


def sum_over_stages(tree: PyTree) -> PyTree:
    """Sum every stage's tree, with the result on all stages. For use inside `shard_map` over `stage`."""
    if jax.lax.axis_size("stage") == 1:  # XLA's partitioner refuses a sum over one device beside auto axes
        return tree

    def total(x: jax.Array) -> jax.Array:
        # XLA's CPU compiler aborts on sums of bfloat16 here ("Invalid binary instruction opcode copy").
        widened = x.astype(jnp.float32) if x.dtype == jnp.bfloat16 and jax.default_backend() == "cpu" else x
        return jax.lax.psum(widened, "stage").astype(x.dtype)

    return jax.tree.map(total, tree)


def sum_copies(gradient: PyTree) -> PyTree:
    """Sum the gradients of parameters that every stage copies over the stages; keep the rest, this stage's part.

    For use inside `shard_map` over `stage`. All stages get the same sum, so that their copies stay equal.
    """
    return gradient | {_ON_EVERY_STAGE: sum_over_stages(gradient[_ON_EVERY_STAGE])}


def replica_square_norm(gradient: PyTree) -> jax.Array:
    """Return the squared norm of a replica's gradient over all stages, counting copied parameters once.

    For use inside `shard_map` over `stage`, on what `sum_copies` returns.
    """
    part = {name: x for name, x in gradient.items() if name != _ON_EVERY_STAGE}
    square = sum_over_stages(optax.tree.norm(part, squared=True))
    return square + optax.tree.norm(gradient[_ON_EVERY_STAGE], squared=True)
