"""The inner optimizer's moments averaged with those of the partner, beside the weights."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from noloco_jax.outer.fragments import Fragments
from noloco_jax.outer.rule import Exchange

PyTree = Any
# What Adam adds to the root of its second moment, by default: moments below its square change nothing.
_FLOOR = 1e-16


def share_moments(inner: PyTree, params: PyTree, number: jax.Array, fragments: Fragments, exchange: Exchange) -> PyTree:
    """The inner state with the moments of one fragment at the mean of its group.

    A second moment travels as its logarithm, so that a code of few bits keeps its ratios, and its mean is the
    geometric one.

    Args:
      inner: the inner optimizer's state, of one replica.
      params: the parameters, or their shapes: what ends with a parameter's path and has its shape is a moment.
      number: int32 scalar, of the outer step that this goes with.
      fragments: how parameters, and so their moments, are cut.
      exchange: (tree, number, how far its numbers have moved) -> the mean of the group.
    """
    cuts = dict(jax.tree.leaves_with_path(fragments.cuts(params)))
    moments, cut_of, codes = {}, {}, {}
    for path, x in jax.tree.leaves_with_path(inner):
        cut = _of_parameter(path, cuts)
        if cut is not None and x.ndim:
            name = jax.tree_util.keystr(path)
            moments[name], cut_of[name] = x, cut
            codes[name] = _SECOND if any(getattr(key, "name", None) == "nu" for key in path) else _FIRST
    parts = fragments.part(moments, cut_of, number)
    sent = {name: codes[name][0](part) for name, part in parts.items()}
    movement = {name: codes[name][2](part) for name, part in sent.items()}
    means = {name: codes[name][1](mean) for name, mean in exchange(sent, number, movement).items()}
    moments = fragments.put(moments, means, cut_of, number)
    return jax.tree.map_with_path(lambda path, x: moments.get(jax.tree_util.keystr(path), x), inner)


def _of_parameter(path: tuple, of_parameter: dict[tuple, Any]) -> Any:
    """What belongs to the parameter with whose path a path ends; None if there is none."""
    ends = (of_parameter.get(path[start:]) for start in range(len(path)))
    return next((found for found in ends if found is not None), None)


# What is sent, what is made of its mean, and how far it has moved: by its own size, or by a factor of e.
Code = tuple[Callable[[jax.Array], jax.Array], Callable[[jax.Array], jax.Array], Callable[[jax.Array], jax.Array]]
_FIRST: Code = (lambda x: x, lambda x: x, lambda x: x)
_SECOND: Code = (lambda x: jnp.log(x + _FLOOR), lambda x: jnp.maximum(jnp.exp(x) - _FLOOR, 0), jnp.ones_like)
