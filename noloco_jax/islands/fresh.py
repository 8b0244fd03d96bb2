"""Optimizer state of an island that catches up from weights alone: which arrays begin anew, and which a peer sends.

A part of the tree that holds arrays of the weights' shapes, or trees of the weights' structure as Adafactor's rows and
columns are, directly beside others, as Optax's `ScaleByAdamState` holds its moments beside their counter, begins anew
as a whole: a counter of many steps beside fresh moments would make Adam's first updates several times too large.
Everything else (a schedule's counter, random keys, numbers) is the peer's. The user's outermost dict, list or tuple is
no such part: each of its entries is judged by itself.
"""

from typing import Any

import jax
import numpy as np

PyTree = Any


def begins_anew(rest: PyTree, params: PyTree) -> list[bool]:
    """Return for every leaf of `rest` whether it begins anew."""
    shapes = {x.shape for x in jax.tree.leaves(params) if x.ndim}
    structure = jax.tree.structure(params)
    flags: list[bool] = []

    def is_like_weights(node: PyTree) -> bool:
        leaves = jax.tree.leaves(node)
        real = (np.issubdtype(x.dtype, np.inexact) or x.dtype.name == "bfloat16" for x in leaves)
        has_structure = len(leaves) > 1 and jax.tree.structure(node) == structure
        return bool(leaves) and all(real) and (has_structure or all(x.shape in shapes for x in leaves))

    def walk(node: PyTree) -> None:
        children = jax.tree.leaves(node, is_leaf=lambda x: x is not node)
        if len(children) == 1 and children[0] is node:  # a leaf
            flags.append(is_like_weights(node))
        elif any(map(is_like_weights, children)) and not (node is rest and type(node) in (dict, list, tuple)):
            flags.extend([True] * len(jax.tree.leaves(node)))
        else:
            for child in children:
                walk(child)

    walk(rest)
    return flags


def fresh_values(rest: PyTree, params: PyTree) -> dict[int, np.ndarray]:
    """Return the number and first value of every leaf of `rest` that begins anew."""
    found = {}
    for number, (x, flag) in enumerate(zip(jax.tree.leaves(rest), begins_anew(rest, params), strict=True)):
        if flag:
            values = np.array(x)
            found[number] = (
                values if values.any() else np.zeros_like(values)
            )  # zeros take no memory until they are used
    return found
