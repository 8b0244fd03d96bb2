"""An exchange through a code in windows, step by step: for a pair that meets by other means than collectives.

The arithmetic is that of `groups.pair_mean_in_windows`. Arrays are one replica's; windows lie as in `OuterState`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from noloco_jax.exchange.blocks import tree_from_blocks, tree_in_blocks
from noloco_jax.exchange.modulo import Modulo

PyTree = Any


def proposed(code: Modulo, message: PyTree, movement: PyTree, remembered: PyTree, cuts: PyTree) -> PyTree:
    """Return the windows that a replica would choose; of a pair's, the larger count.

    Args:
      code: in which values travel.
      message: what is to be sent.
      movement: a tree like it, how far each value has moved since it last met others.
      remembered: what the last exchange left.
      cuts: the dimension of every array along which blocks lie.
    """
    moved = jax.tree.map(lambda x: jnp.max(jnp.abs(x), axis=-1, keepdims=True), tree_in_blocks(movement, cuts))
    windows = jax.tree.map(code.windows, tree_in_blocks(message, cuts), moved, _by_block(remembered, cuts))
    return _by_array(windows, cuts)


def encoded(code: Modulo, message: PyTree, windows: PyTree, cuts: PyTree) -> PyTree:
    """Return what travels of a message in the pair's windows."""
    return jax.tree.map(code.encode, tree_in_blocks(message, cuts), _by_block(windows, cuts))


def corrected(
    code: Modulo, own: PyTree, other: PyTree, windows: PyTree, like: PyTree, cuts: PyTree
) -> tuple[PyTree, PyTree]:
    """Return the correction that halves a pair's difference, and the windows to remember.

    Args:
      code: in which values travelled.
      own: what was sent.
      other: what was received.
      windows: of the pair.
      like: arrays of the message's shapes.
      cuts: the dimension of every array along which blocks lie.
    """
    pairs = jax.tree.map(code.correction, own, other, _by_block(windows, cuts))
    corrections, remembered = (jax.tree.map(lambda _, pair, i=i: pair[i], own, pairs) for i in range(2))
    return tree_from_blocks(corrections, like, cuts), _by_array(remembered, cuts)


def _by_block(windows: PyTree, cuts: PyTree) -> PyTree:
    return jax.tree.map(lambda x, cut: jnp.moveaxis(x, cut, -1)[..., None], windows, cuts)


def _by_array(windows: PyTree, cuts: PyTree) -> PyTree:
    return jax.tree.map(lambda x, cut: jnp.moveaxis(x[..., 0], -1, cut), windows, cuts)
