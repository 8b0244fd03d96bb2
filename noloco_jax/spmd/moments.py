"""The inner optimizer's moments averaged with those of the partner, beside the weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from noloco_jax.outer.fragments import Fragments

PyTree = Any


def share_moments(
    inner: PyTree,
    params: PyTree,
    number: jax.Array,
    fragments: Fragments,
    exchange: Callable[[PyTree, Any, PyTree, PyTree], PyTree],
) -> PyTree:
    """The inner state with the moments of one fragment at the mean of its group.

    A second moment travels as its square root, and its mean is the square of theirs: the first moment of a row that
    only one of a pair has seen is halved, and so is the root that it is divided by. By a mean of logarithms that root
    would be nearly zero.

    Args:
      inner: the inner optimizer's state, of one replica.
      params: the parameters, or their shapes: what ends with a parameter's path and has its shape is a moment.
      number: int32 scalar, of the outer step that this goes with.
      fragments: how parameters, and so their moments, are cut.
      exchange: (tree, number, how far its numbers have moved: by all that they are, dimensions of hidden states) -> the
        mean of the group.
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
    sent = {name: codes[name].sent(part) for name, part in parts.items()}
    means = exchange(sent, number, sent, cut_of)
    means = {name: codes[name].received(mean, sent[name]) for name, mean in means.items()}
    moments = fragments.put(moments, means, cut_of, number)
    return jax.tree.map_with_path(lambda path, x: moments.get(jax.tree_util.keystr(path), x), inner)


def _of_parameter(path: tuple, of_parameter: dict[tuple, Any]) -> Any:
    """What belongs to the parameter with whose path a path ends; None if there is none."""
    ends = (of_parameter.get(path[start:]) for start in range(len(path)))
    return next((found for found in ends if found is not None), None)


@dataclass(frozen=True)
class _Code:
    """How moments of a kind travel.

    Attributes:
      sent: what is sent of a moment.
      received: the moment, from the mean of what was sent and from what was sent itself.
    """

    sent: Callable[[jax.Array], jax.Array]
    received: Callable[[jax.Array, jax.Array], jax.Array]


_FIRST = _Code(lambda moment: moment, lambda mean, own: mean)
# A mean with what is not negative is at least half of one's own: a code that rounds must not bring it near zero.
_SECOND = _Code(jnp.sqrt, lambda mean, own: jnp.square(jnp.maximum(mean, own / 2)))
