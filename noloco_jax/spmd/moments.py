"""Averaging of the inner optimizer's moments with the partner's, in the same outer step as the weights."""

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
    """Average the moments of one fragment over its group; return the inner state.

    A second moment is averaged as its square root. If only one of a pair has seen a row (such as a rare token), the
    mean halves that row's first moment, and it also halves the root that Adam divides it by. A mean of logarithms
    would bring that root near zero.

    Args:
      inner: the inner optimizer's state, of one replica.
      params: the parameters or their shapes; a leaf of the state whose path ends with a parameter's path and whose
        shape is the parameter's is a moment.
      number: int32 scalar, the outer step.
      fragments: cut of the parameters, and of their moments, into fragments.
      exchange: (tree, number, movement of its numbers, hidden dimensions) -> the mean of the group. The movement is
        taken as the full value.
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
    """Look up the value of the parameter whose path is a suffix of `path`; None if there is none."""
    ends = (of_parameter.get(path[start:]) for start in range(len(path)))
    return next((found for found in ends if found is not None), None)


@dataclass(frozen=True)
class _Code:
    """Transformation of one kind of moment for averaging.

    Attributes:
      sent: moment -> value to send.
      received: (mean of the sent values, own sent value) -> moment.
    """

    sent: Callable[[jax.Array], jax.Array]
    received: Callable[[jax.Array, jax.Array], jax.Array]


_FIRST = _Code(lambda moment: moment, lambda mean, own: mean)
# A pair's mean of non-negative values is at least half of one's own; the bound keeps quantization from bringing it
# near zero.
_SECOND = _Code(jnp.sqrt, lambda mean, own: jnp.square(jnp.maximum(mean, own / 2)))
