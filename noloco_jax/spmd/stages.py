"""What all pipeline stages of a replica share: the vocabulary, in as many parts, and the last norm, whole on each.

Vocabulary parallelism (arXiv 2411.05288): of V' tokens, V rounded up to a multiple of 8 S, every one of the S stages
holds V'/S rows of the embedding and V'/S columns of the head. The tokens from V on are padding, and stay zero: no
position looks them up, and no softmax counts them. The norm's weight is small: every stage holds a copy.
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
    """V': the tokens that the tables of a run have, for the devices along every axis of its mesh.

    Of several stages it is a multiple of the `tensor` devices as well, which share a stage's part, and each has a
    multiple of 8, so that the blocks of a code lie as in whole tables (`wires.cut_of`).
    """
    if mesh_shape["stage"] == 1:
        return vocab_size
    multiple = 8 * mesh_shape["stage"] * mesh_shape["tensor"]
    return -(-vocab_size // multiple) * multiple


def resize_vocabulary(tree: PyTree, vocab_size: int) -> PyTree:
    """Every embedding and head in a tree, padded with zeros or cut to `vocab_size` tokens; the rest as it is.

    Args:
      tree: parameters, or a state that holds dicts like them: moments, slow weights. Any leading axes.
      vocab_size: what to make of the tables' vocabulary; only padding may be cut.
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
    """The sum of every stage's tree, on all stages. For use inside `shard_map` over `stage`."""
    if jax.lax.axis_size("stage") == 1:  # XLA's partitioner refuses it beside axes that are left to it
        return tree

    def total(x: jax.Array) -> jax.Array:
        # XLA's CPU compiler aborts on sums of bfloat16 here ("Invalid binary instruction opcode copy").
        widened = x.astype(jnp.float32) if x.dtype == jnp.bfloat16 and jax.default_backend() == "cpu" else x
        return jax.lax.psum(widened, "stage").astype(x.dtype)

    return jax.tree.map(total, tree)


def sum_copies(gradient: PyTree) -> PyTree:
    """The gradient of what every stage holds a copy of, summed over the stages; of the rest, this stage's part.

    For use inside `shard_map` over `stage`. All stages get the same sum, so that their copies stay equal.
    """
    return gradient | {_ON_EVERY_STAGE: sum_over_stages(gradient[_ON_EVERY_STAGE])}


def replica_square_norm(gradient: PyTree) -> jax.Array:
    """The squared norm of a replica's gradient, whose parts its stages hold; what all hold a copy of counts once.

    For use inside `shard_map` over `stage`, on what `sum_copies` returns.
    """
    part = {name: x for name, x in gradient.items() if name != _ON_EVERY_STAGE}
    square = sum_over_stages(optax.tree.norm(part, squared=True))
    return square + optax.tree.norm(gradient[_ON_EVERY_STAGE], squared=True)
