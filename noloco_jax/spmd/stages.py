"""Parameters shared by a replica's pipeline stages: the vocabulary, sharded over them, and what each has a copy of.

Vocabulary parallelism (arXiv 2411.05288): V is padded to V' tokens, a multiple of 8 S and at least 32 S, and each of
the S stages holds V'/S rows of the embedding and V'/S columns of the head. The tokens from V on are padding and stay
zero: no position looks them up, and no softmax counts them. The last norm's weight is small, so every stage holds a
copy.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from noloco_jax.config import ModelConfig
from noloco_jax.model.architecture import axes_at

PyTree = Any


def padded_vocab_size(vocab_size: int, mesh_shape: Mapping[str, int]) -> int:
    """Return V', the padded vocabulary of a run on a mesh of this shape.

    With several stages it is also a multiple of the `tensor` devices that shard a stage's part. Each part is a multiple
    of 8 and at least 32, so that the blocks of a wire format lie as in whole tables (`wire_sizes.block_shape`).
    """
    if mesh_shape["stage"] == 1:
        return vocab_size
    multiple = 8 * mesh_shape["stage"] * mesh_shape["tensor"]
    return -(-max(vocab_size, 32 * mesh_shape["stage"]) // multiple) * multiple


def vocabulary_axis(model: ModelConfig, path: tuple[Any, ...]) -> int | None:
    """Return the axis of tokens, counted from the last (-1), of the array at a path; None if it has none.

    Args:
      model: the model.
      path: path of a parameter, or of what is kept beside one, see `axes_at`. Windows are of blocks, not of tokens.
    """
    if any(getattr(key, "name", None) == "windows" for key in path):
        return None
    axes = axes_at(model, path)
    return axes.index("vocab") - len(axes) if axes and "vocab" in axes else None


def resize_vocabulary(model: ModelConfig, tree: PyTree, vocab_size: int) -> PyTree:
    """Pad with zeros, or cut, every table of tokens in a tree to `vocab_size` tokens; leave other arrays unchanged.

    Args:
      model: the model.
      tree: parameters, or a state that holds dicts like them: moments, slow weights. Any leading axes.
      vocab_size: the new vocabulary size; only padding may be cut.
    """
    return jax.tree.map_with_path(lambda path, x: resize_table(x, vocabulary_axis(model, path), vocab_size), tree)


def resize_table(x: jax.Array, axis: int | None, vocab_size: int) -> jax.Array:
    """Pad with zeros, or cut, one array along its axis of tokens (-1: the last); None: return it unchanged."""
    if axis is None or x.shape[axis] == vocab_size:
        return x
    if x.shape[axis] > vocab_size:
        return x[..., :vocab_size, *[slice(None)] * (-1 - axis)]
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, vocab_size - x.shape[axis])
    return jnp.pad(x, widths)


def sum_over_stages(tree: PyTree) -> PyTree:
    """Sum every stage's tree, with the result on all stages. For use inside `shard_map` over `stage`."""
    if jax.lax.axis_size("stage") == 1:  # XLA's partitioner refuses a sum over one device beside auto axes
        return tree

    def total(x: jax.Array) -> jax.Array:
        # XLA's CPU compiler aborts on sums of bfloat16 beside auto axes ("Invalid binary instruction opcode copy", jax
        # 0.10.2): GPUs sum in bfloat16, the CPU in float32.
        widened = x.astype(jnp.float32) if x.dtype == jnp.bfloat16 and jax.default_backend() == "cpu" else x
        return jax.lax.psum(widened, "stage").astype(x.dtype)

    return jax.tree.map(total, tree)


def sum_copies(model: ModelConfig, gradient: PyTree) -> PyTree:
    """Sum the gradients of parameters that every stage copies over the stages; keep the rest, this stage's part.

    For use inside `shard_map` over `stage`. All stages get the same sum, so that their copies stay equal.
    """

    def total(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        return sum_over_stages(x) if _is_copied(model, path) else x

    return jax.tree.map_with_path(total, gradient)


def replica_square_norm(model: ModelConfig, gradient: PyTree) -> jax.Array:
    """Return the squared norm of a replica's gradient over all stages, counting copied parameters once.

    For use inside `shard_map` over `stage`, on what `sum_copies` returns.
    """
    leaves = jax.tree.leaves_with_path(gradient)
    parts, copies = ([x for path, x in leaves if _is_copied(model, path) == is_copied] for is_copied in (False, True))
    square = sum_over_stages(optax.tree.norm(parts, squared=True))
    return square + optax.tree.norm(copies, squared=True)


def _is_copied(model: ModelConfig, path: tuple[Any, ...]) -> bool:
    """Return True for a parameter of which every stage has a copy: neither stacked layers nor a table of tokens."""
    return not {"layer", "vocab"} & {*(axes_at(model, path) or ())}
