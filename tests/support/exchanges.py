"""One exchange of given groups through a wire format, on any layout."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

import noloco_jax as nj
from noloco_jax.optim.exchange.mean import MeanExchange
from noloco_jax.optim.exchange.wire import wire_of
from noloco_jax.optim.fragments import Fragments
from noloco_jax.optim.rule import Outgoing
from support.layouts import Layout, axis_of, over_replicas

PyTree = Any
LAST = Fragments(1, lambda path, shape: len(shape) - 1)  # blocks lie along the last dimension


def exchange_of(
    groups: Any, wire: str = "float32", layout: Layout = 8, draw: int = 0
) -> Callable[..., tuple[PyTree, PyTree]]:
    """Return (message, movement, windows) -> (means, windows) of stacked trees, in a pool of these partitions."""
    pool = groups if isinstance(groups[0][0], tuple | list) else [groups]
    exchange = MeanExchange(nj.ExplicitPairing(pool), wire_of(wire), axis_of(layout))

    def mean(message: PyTree, movement: PyTree = None, windows: PyTree = None) -> tuple[PyTree, PyTree]:
        return exchange.mean(Outgoing(message, movement, windows), jnp.int32(draw), LAST)

    return over_replicas(mean, layout)
