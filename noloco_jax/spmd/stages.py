"""The parameters of a model that is cut into pipeline stages.

Shards of an array are equally large, so every stage has one slot of the vocabulary's size and one norm: the embedding
on the first stage, the head (transposed) and the last norm on the last. On the stages between them the slots stay zero:
for S stages that is (S - 2) V D weights a replica that are kept, and sent by outer steps, for nothing.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


def cut(params: PyTree, num_stages: int) -> PyTree:
    """Parameters for `num_stages` stages: `blocks` as they are, `stage_vocab` (N, S, V, D) and `stage_norm` (N, S, D).

    Args:
      params: the model's, untied, with the N replicas in front.
      num_stages: S; 1 leaves them alone.
    """
    if num_stages == 1:
        return params
    head_NVD = params["head"].swapaxes(1, 2)
    nothing = [jnp.zeros_like(head_NVD)] * (num_stages - 2)
    no_norm = [jnp.zeros_like(params["norm"])] * (num_stages - 1)
    return {
        "blocks": params["blocks"],
        "stage_vocab": jnp.stack([params["embed"], *nothing, head_NVD], axis=1),
        "stage_norm": jnp.stack([*no_norm, params["norm"]], axis=1),
    }


def uncut(params: PyTree) -> PyTree:
    """The model's parameters, of those of any number of stages."""
    if "stage_vocab" not in params:
        return params
    return {
        "embed": params["stage_vocab"][:, 0],
        "blocks": params["blocks"],
        "norm": params["stage_norm"][:, -1],
        "head": params["stage_vocab"][:, -1].swapaxes(1, 2),
    }


def map_params(transform: Callable[[PyTree], PyTree], tree: PyTree) -> PyTree:
    """Applies `transform` to every parameter dict in a state: the parameters, the moments, the slow weights."""

    def is_params(node: Any) -> bool:
        return isinstance(node, dict) and "blocks" in node

    return jax.tree.map(lambda node: transform(node) if is_params(node) else node, tree, is_leaf=is_params)
